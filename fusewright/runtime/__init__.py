"""Turns captured graphs into callables: dispatch by bucket, lowering, verification, CUDA graphs."""
