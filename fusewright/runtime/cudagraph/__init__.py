"""CUDA graphs: which part of a compiled graph is captured, by what, and how tensors get in and out."""
