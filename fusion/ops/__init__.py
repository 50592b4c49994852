"""Operators of the `fusewright::` namespace: schema, shape rule, CPU and CUDA implementation, autograd."""
