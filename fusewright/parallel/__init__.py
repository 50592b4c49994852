"""Wrapping a model for several ranks, so that its communication shows in the compiled graph."""

from fusewright.parallel.shard import shard

__all__ = ["shard"]
