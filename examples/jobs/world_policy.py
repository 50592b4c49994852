"""A job file with a model of one's own: a small robot policy, attention by hand, trajectories that end early.

Nothing but torch is needed. The model is plain PyTorch: nothing in it knows of fusewright.
"""

import math

import torch
from torch import Tensor, nn

from fusewright import Workload

JOINTS, ACTION, PIXELS, WIDTH, HEADS = 14, 7, 32, 192, 6


class Norm(nn.Module):
    """RMSNorm, written out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """x (..., width)."""
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Block(nn.Module):
    """Causal attention and a gated MLP over the steps of a trajectory."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = Norm(WIDTH), Norm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        """x (batch, steps, width); hidden (batch, 1, steps, steps) bool, True where a step must not look."""
        batch, steps, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, steps, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        weights = scores.masked_fill(hidden, torch.finfo(scores.dtype).min).softmax(dim=-1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(batch, steps, WIDTH))
        y = self.norm2(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


class Policy(nn.Module):
    """Camera frames and joint states in; the next action, and the next frame's features, out."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.see = nn.Conv2d(3, WIDTH, kernel_size=16, stride=16)
        self.feel = nn.Sequential(nn.Linear(JOINTS, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm = Norm(WIDTH)
        self.act = nn.Linear(WIDTH, ACTION)
        self.imagine = nn.Linear(WIDTH, WIDTH)

    def forward(self, frames: Tensor, joints: Tensor, valid: Tensor) -> dict[str, Tensor]:
        """frames (batch, steps, 3, pixels, pixels), joints (batch, steps, joints), valid (batch, steps) bool."""
        batch, steps = valid.shape
        seen = self.see(frames.flatten(0, 1)).mean(dim=(2, 3)).view(batch, steps, WIDTH)
        x = seen + self.feel(joints)
        at = torch.arange(steps, device=x.device)
        later = at[None, :] > at[:, None]
        itself = at[None, :] == at[:, None]
        hidden = ((later | ~valid[:, None, :]) & ~itself).unsqueeze(1)
        for block in self.blocks:
            x = block(x, hidden)
        x = self.norm(x)
        return {"action": self.act(x), "next_latent": self.imagine(x), "latent": seen.detach(), "valid": valid}


def inputs(steps: int, seed: int) -> tuple[tuple, dict]:
    """Two trajectories; the second ends after half of the steps."""
    generator = torch.Generator().manual_seed(seed)
    valid = torch.ones(2, steps, dtype=torch.bool)
    valid[1, (steps + 1) // 2 :] = False
    return (), {
        "frames": torch.randn(2, steps, 3, PIXELS, PIXELS, generator=generator),
        "joints": torch.randn(2, steps, JOINTS, generator=generator),
        "valid": valid,
    }


def loss(output: dict[str, Tensor]) -> Tensor:
    """Imagine the next step's features where there is a next step; keep actions small."""
    exists = output["valid"][:, 1:, None].to(output["action"].dtype)
    wrong = (output["next_latent"][:, :-1] - output["latent"][:, 1:]).pow(2) * exists
    return wrong.mean() + output["action"].pow(2).mean()


WORKLOADS = [
    Workload(
        name="world_policy",
        family="multimodal",
        model=Policy,
        inputs=inputs,
        lengths=(16, 64, 256),
        dims={"frames": {1: "steps"}, "joints": {1: "steps"}, "valid": {1: "steps"}},
        loss=loss,
    )
]
