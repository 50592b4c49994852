"""Test helpers that are part of the product: they let kernels be checked on machines without a GPU."""
