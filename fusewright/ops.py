"""The fused operators by themselves, for models that call them directly: `from fusewright import ops`."""

from __future__ import annotations

from fusewright.fusion.ops.attention import attention
from fusewright.fusion.ops.linear_cross_entropy import linear_cross_entropy
from fusewright.fusion.ops.rms_norm import rms_norm

__all__ = ["attention", "linear_cross_entropy", "rms_norm"]
