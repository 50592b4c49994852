"""A process group without processes."""

from tests.parallel.fake_world import fake_world

__all__ = ["fake_world"]
