"""A Llama-like model whose sizes do not divide by the number of ranks, and a backend that shows what is compiled."""

from __future__ import annotations

from collections.abc import Callable

import torch
from functorch.compile import make_boxed_func
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition

# B batch, T tokens, D model width, H heads, V vocabulary
D, H, V, HIDDEN = 36, 4, 51, 45


class RMSNorm(nn.Module):
    """x / rms(x) * weight, over the last dim."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class Block(nn.Module):
    """Attention and gated MLP, each after a norm and around a residual; a learned scale of one element at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = RMSNorm(D), RMSNorm(D)
        self.q, self.k, self.v, self.o = (nn.Linear(D, D, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(D, HIDDEN), nn.Linear(D, HIDDEN)
        self.down = nn.Linear(HIDDEN, D)
        self.scale = nn.Parameter(torch.tensor([0.9]))

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        h_BTD = self.norm_1(x_BTD)
        q, k, v = (p(h_BTD).unflatten(-1, (H, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        score = (q @ k.transpose(-1, -2) * (D // H) ** -0.5).softmax(-1)
        x_BTD = x_BTD + self.o((score @ v).transpose(1, 2).flatten(2))
        h_BTD = self.norm_2(x_BTD)
        mlp_BTD = self.down(nn.functional.silu(self.gate(h_BTD)) * self.up(h_BTD))
        return x_BTD + mlp_BTD * self.scale


class Llama(nn.Module):
    """Embedding, one block, norm, head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(V, D)
        self.blocks = nn.Sequential(Block())
        self.norm = RMSNorm(D)
        self.head = nn.Linear(D, V, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.norm(self.blocks(self.embedding(tokens_BT))))
        return out


def tokens(rank: int, step: int) -> torch.Tensor:
    """Token ids [2, 7], different on each rank and in each step."""
    return torch.randint(V, (2, 7), generator=torch.Generator().manual_seed(1000 * step + rank))


def aten_backend(rewrite: Callable[[fx.GraphModule], None]) -> Callable[..., object]:
    """A Dynamo backend: `rewrite` each forward and backward graph after the split, then run it with ATen kernels."""

    def compiler(gm: fx.GraphModule, _: object) -> object:
        rewrite(gm)
        return make_boxed_func(gm.forward)

    backend: Callable[..., object] = aot_autograd(
        fw_compiler=compiler, bw_compiler=compiler, partition_fn=min_cut_rematerialization_partition
    )
    return backend
