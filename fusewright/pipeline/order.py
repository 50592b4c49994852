"""THE order of passes. One literal; a comment for every constraint; tests/pipeline/test_order.py shows each is real."""

from __future__ import annotations

from fusewright.fusion.match.attention import FuseAttention
from fusewright.fusion.match.rms_norm import FuseRMSNorm
from fusewright.passes.base import Pass
from fusewright.passes.cleanup.canonicalize import Canonicalize
from fusewright.passes.comm.bucket_collectives import BucketCollectives

ORDER: tuple[Pass, ...] = (
    # First: an idle dropout between softmax and the second matmul would hide an attention from its matcher.
    Canonicalize(),
    # Before attention: a norm of queries and keys is then one node to look through, not six.
    FuseRMSNorm(),
    FuseAttention(),
    # Last: it sees the collectives of forward and backward only after the joint graph is split.
    BucketCollectives(),
)
