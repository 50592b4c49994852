"""Passes over the collectives in a graph."""
