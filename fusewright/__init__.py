"""fusewright: a graph optimizer for PyTorch that is never silently wrong and never silently eager."""
