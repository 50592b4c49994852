"""Rewrites of a graph, one a file; base.py holds the contract."""
