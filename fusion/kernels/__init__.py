"""Triton kernels, one operator a file, and the compiler that reads their machine code."""
