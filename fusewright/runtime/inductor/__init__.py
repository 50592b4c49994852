"""What stands between a graph and Inductor: proofs of what its own patterns rewrite."""
