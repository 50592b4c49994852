"""Triton kernels, one operator a file under the operator's name, and their ahead-of-time compilation."""
