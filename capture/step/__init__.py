"""A whole training step, forward, loss, backward and optimizer, as one graph."""
