"""Rewrites of collectives: fewer, larger, in the same order on every rank."""
