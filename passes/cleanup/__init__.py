"""Exact rewrites that make later matching simpler."""
