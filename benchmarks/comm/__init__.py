"""Benchmarks of communication passes on several ranks."""
