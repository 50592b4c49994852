"""Benchmarks a workload: its cells, the providers that compete in each, and the rows they leave."""
