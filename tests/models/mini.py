"""Three mini models, each a `Workload` that builds and steps in well under a second, for golden graphs and numerics."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.models.builders import WORLD_POLICY_DIMS
from benchmarks.models.packing import draw_trajectories
from benchmarks.models.world_policy import WorldPolicy, WorldPolicyConfig, world_policy_loss
from fusewright.workload import ADVERSARIAL_SEED, Inputs, Workload

LLAMA_VOCABULARY = 128


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=160,
        vocab_size=LLAMA_VOCABULARY,
        max_position_embeddings=256,
        use_cache=False,
        attn_implementation="eager",
    )
    return LlamaForCausalLM(config)


def _llama_inputs(tokens: int, seed: int) -> Inputs:
    ids = torch.randint(LLAMA_VOCABULARY, (2, tokens), generator=torch.Generator().manual_seed(seed))
    return (), {"input_ids": ids, "labels": ids.clone()}


def _library_loss(output: object) -> Tensor:
    loss: Tensor = output.loss  # type: ignore[attr-defined]
    return loss


class ConvNet(nn.Module):
    """A stem, a residual block with a depthwise convolution, a strided block, pooling: conv-BN-ReLU in usual places."""

    def __init__(self, width: int = 16, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.block = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, groups=width, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.down = nn.Sequential(nn.Conv2d(width, 2 * width, 3, stride=2, padding=1), nn.BatchNorm2d(2 * width))
        self.head = nn.Linear(2 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, 3, size, size) -> logits (B, classes)."""
        x = self.stem(x)
        x = functional.relu(x + self.block(x))
        x = functional.relu(self.down(x))
        logits: Tensor = self.head(x.mean(dim=(2, 3)))
        return logits


def _images(batch: int, seed: int) -> Inputs:
    return (torch.randn(batch, 3, 16, 16, generator=torch.Generator().manual_seed(seed)),), {}


def _classification_loss(logits: Tensor) -> Tensor:
    return functional.cross_entropy(logits, torch.arange(logits.shape[0]) % logits.shape[1])


POLICY = WorldPolicyConfig(
    width=32,
    heads=4,
    kv_heads=2,
    blocks=3,  # one for each spelling of attention
    video_blocks=1,
    mlp_width=48,
    image=8,
    patch=4,
    words=4,
    vocabulary=32,
    joints=3,
    action=2,
    proposed=4,
    window=2,
    stride=2,
)


def _trajectories(tokens: int, seed: int) -> Inputs:
    return (), draw_trajectories(POLICY, tokens, seed, hostile=seed == ADVERSARIAL_SEED)


MINI_LLAMA = Workload(
    name="mini_llama",
    family="language",
    model=_llama,
    inputs=_llama_inputs,
    lengths=(8, 16, 32),
    dims={"input_ids": {1: "tokens"}, "labels": {1: "tokens"}},
    loss=_library_loss,
)
MINI_CONVNET = Workload(
    name="mini_convnet",
    family="convolution",
    model=ConvNet,
    inputs=_images,
    lengths=(2, 4, 8),
    dims={"x": {0: "batch"}},
    loss=_classification_loss,
)
MINI_WORLD_POLICY = Workload(
    name="mini_world_policy",
    family="multimodal",
    model=lambda: WorldPolicy(POLICY),
    inputs=_trajectories,
    lengths=(20, 32, 44),
    dims=WORLD_POLICY_DIMS,
    loss=world_policy_loss,
)
MINI = {workload.name: workload for workload in (MINI_LLAMA, MINI_CONVNET, MINI_WORLD_POLICY)}
