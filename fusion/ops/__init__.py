"""Fused operators: schema, fake, reference, autograd."""
