"""Rewrites of weights that do not change while a model infers, and what computes them once instead of on every call."""
