"""Packs robot trajectories of different lengths into one padded batch, and draws synthetic ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.models.world_policy import JOINTS, PATCH, PROPOSED, TAKEN, WORD, WorldPolicyConfig


def pack(
    config: WorldPolicyConfig, steps: Sequence[int], words: Sequence[int], tokens: int, max_steps: int
) -> dict[str, Tensor]:
    """Index tensors that pack trajectories of `steps[b]` steps and `words[b]` words into `tokens` tokens each.

    A source is one of W + (P + 2) * max_steps + K embeddings of a trajectory, in the order words, steps, proposals.

    Returns:
        slot (B, T) int64: source of each token; kind, step (B, T) int64; valid (B, T) bool; last (B, max_steps) int64:
        token that ends each step; ask (B, K) int64: tokens of the proposed actions; step_valid (B, max_steps) bool.

    Raises:
        ValueError: a trajectory does not fit.
    """
    per_step = config.step_tokens
    first_proposal = config.words + per_step * max_steps
    step_kinds = [PATCH] * config.patches + [JOINTS, TAKEN]
    batch = len(steps)
    slot, kind, step = (torch.zeros(batch, tokens, dtype=torch.int64) for _ in range(3))
    valid = torch.zeros(batch, tokens, dtype=torch.bool)
    last = torch.zeros(batch, max_steps, dtype=torch.int64)
    ask = torch.zeros(batch, config.proposed, dtype=torch.int64)
    for b, (f, w) in enumerate(zip(steps, words, strict=True)):
        length = w + per_step * f + config.proposed
        if length > tokens or f > max_steps or w > config.words:
            raise ValueError(f"{f} steps and {w} words need {length} tokens; there are {tokens} for {max_steps} steps.")
        stepped = torch.arange(per_step * f)
        proposals = torch.arange(config.proposed)
        slot[b, :length] = torch.cat((torch.arange(w), config.words + stepped, first_proposal + proposals))
        kind[b, :length] = torch.tensor([WORD] * w + step_kinds * f + [PROPOSED] * config.proposed)
        step[b, w:length] = torch.cat((stepped // per_step, torch.full_like(proposals, f)))
        valid[b, :length] = True
        last[b, :f] = w + per_step * torch.arange(1, f + 1) - 1
        ask[b] = length - config.proposed + proposals
    step_valid = torch.arange(max_steps) < torch.tensor(list(steps))[:, None]
    return {
        "slot": slot, "kind": kind, "step": step, "valid": valid, "last": last, "ask": ask, "step_valid": step_valid
    }  # fmt: skip


def draw_trajectories(
    config: WorldPolicyConfig, tokens: int, seed: int, batch: int = 2, hostile: bool = False
) -> dict[str, Tensor]:
    """Keyword arguments of `WorldPolicy.forward` for `batch` random trajectories of at most `tokens` tokens.

    The first trajectory is as long as fits; the others have between a half and all of its steps and some of its words.
    `hostile`: the others have one step and no words, so that most of the batch is padding, and every value is 50 times
    as large.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * (50.0 if hostile else 1.0)

    def whole(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    F = config.steps(tokens)
    others = range(batch - 1)
    steps = [F, *(1 if hostile else whole((F + 1) // 2, F) for _ in others)]
    words = [config.words, *(0 if hostile else whole(1, config.words) for _ in others)]
    return {
        "frames": normal(batch, F, 3, config.image, config.image),
        "joints": normal(batch, F, config.joints),
        "taken": normal(batch, F, config.action),
        "language": torch.randint(config.vocabulary, (batch, config.words), generator=generator),
        "actions": normal(batch, config.proposed, config.action),
        "noise": normal(batch, config.proposed, config.action),
        "flow_time": torch.rand(batch, generator=generator),
        **pack(config, steps, words, tokens, F),
    }
