"""Attention in all its spellings: products, scores, masks, and the operator that takes their place."""
