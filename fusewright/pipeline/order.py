"""THE order of passes. One literal; a comment for every constraint; tests/pipeline/test_order.py shows each is real."""

from __future__ import annotations

from fusewright.fusion.match.attention.fuse import FuseAttention
from fusewright.fusion.match.linear_cross_entropy import FuseLinearCrossEntropy
from fusewright.fusion.match.rms_norm import FuseRMSNorm
from fusewright.passes.base import Pass
from fusewright.passes.cleanup.canonicalize import Canonicalize
from fusewright.passes.comm.bucket_collectives import BucketCollectives
from fusewright.passes.frozen.fold_batch_norm import FoldBatchNorm
from fusewright.passes.frozen.fold_scale import FoldScale
from fusewright.passes.frozen.merge_linears import MergeLinears

ORDER: tuple[Pass, ...] = (
    # Before both matchers: an idle dropout on the scores hides an attention from its matcher, and an idle cast before
    # the square (`x.float()` of a float32 x) a normalization.
    Canonicalize(),
    # The next three do nothing unless the user freezes the weights. After cleanup: an idle dropout between a layer and
    # its norm, or before one of two layers that read the same input, would hide the pair.
    FoldBatchNorm(),
    # After batch norm, so that a scale behind it meets the layer; before merging, which leaves slices, no layers.
    FoldScale(),
    MergeLinears(),
    # Either way round with attention: each takes the other's output for a plain tensor.
    FuseRMSNorm(),
    FuseAttention(),
    # After cleanup: a dropout that does nothing would stand between the layer and its loss.
    FuseLinearCrossEntropy(),
    # Of a later stage, where the collectives of forward and backward are in the graph; passes of one stage never meet
    # those of another, so its place here binds nothing.
    BucketCollectives(),
)
