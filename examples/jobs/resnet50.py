"""A job file: ResNet-50 at three batch sizes. Needs `pip install timm`."""

import torch
from torch import nn

from fusewright import Workload


def model() -> nn.Module:
    """`pretrained=True` takes the published weights."""
    import timm

    return timm.create_model("resnet50", pretrained=False)


def inputs(batch: int, seed: int) -> tuple[tuple, dict]:
    """A batch of images as noise: what is in them does not change the time, only the numbers."""
    return (), {"x": torch.randn(batch, 3, 224, 224, generator=torch.Generator().manual_seed(seed))}


def loss(logits: torch.Tensor) -> torch.Tensor:
    """Cross entropy against made-up classes, one for each image."""
    classes = torch.arange(logits.shape[0], device=logits.device)
    return nn.functional.cross_entropy(logits, classes)


WORKLOADS = [
    Workload(
        name="resnet50",
        family="convolution",
        model=model,
        inputs=inputs,
        lengths=(1, 4, 8),
        dims={"x": {0: "batch"}},  # no length here: the batch size is what changes
        loss=loss,
    )
]
