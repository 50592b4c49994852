"""Fused operators, their kernels, and the matchers that put them into graphs."""
