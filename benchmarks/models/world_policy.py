"""A robot world-model policy in plain PyTorch: vision, video history, proprioception, language and actions.

The model reads a trajectory of F steps: at each step a camera frame, the joint state and the action that was taken, and
once an instruction of W words. It proposes the next K actions by flow matching and predicts, at every step, the visual
latent of the next one. Everything a step contributes becomes a token; a trajectory of f steps and w words is

    [w words] ([P patches] [joint state] [action]) * f  [K actions to propose]     = w + 6 f + K tokens (P = 4)

packed to one length T with padding at the end, so that trajectories of different lengths share a batch. Three parts:

1. *Tokenizer*: patch convolution; per patch, causal attention over the frames (video history); MLPs for the joints and
   actions; an embedding for words.
2. *Trunk*: L blocks of RMSNorm, rotary attention by time, RMSNorm, SwiGLU over the packed tokens. A token sees its own
   step and earlier ones: the last `window` steps, every `stride`-th step before that (long horizon), all words, and
   nothing of the padding.
3. *Heads*: the flow's velocity at the K action tokens, the next step's latent at each step's last token.

Attention is written out by hand, and on purpose not always in the same way (`ATTENTION_SPELLINGS`): models of this kind
are written by many hands, and an optimizer must recognise what is meant. References for the parts: flow matching
(Lipman et al. 2023), rotary embedding (Su et al. 2021), SwiGLU (Shazeer 2020), RMSNorm (Zhang & Sennrich 2019), grouped
key/value heads (Ainslie et al. 2023), sparse strided attention (Child et al. 2019).

    Legend: B batch, F steps, P patches a frame, W words, K actions to propose, S sources = W + (P + 2) F + K, T packed
    tokens, D width, N heads, G key/value heads, H head size, J joints, A action size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

WORD, PATCH, JOINTS, TAKEN, PROPOSED = range(5)
"""Kinds of token."""


@dataclass(frozen=True)
class WorldPolicyConfig:
    """Sizes. The defaults have 6.8 million parameters, for two CPU cores."""

    width: int = 256
    heads: int = 8
    kv_heads: int = 4
    blocks: int = 6
    video_blocks: int = 2
    mlp_width: int = 704
    image: int = 32  # pixels a side, 3 channels
    patch: int = 16  # pixels a side
    words: int = 8
    vocabulary: int = 1024
    joints: int = 14
    action: int = 7
    proposed: int = 8
    window: int = 16  # steps
    stride: int = 8  # steps

    @property
    def patches(self) -> int:
        """Patches of one frame."""
        return (self.image // self.patch) ** 2

    @property
    def step_tokens(self) -> int:
        """Tokens of one step: its patches, joint state and action."""
        return self.patches + 2

    def steps(self, tokens: int) -> int:
        """Steps of a trajectory that fills `tokens` with all words."""
        return (tokens - self.words - self.proposed) // self.step_tokens


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dim; the mean is taken in at least float32."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x (..., width) -> the same shape and dtype."""
        wide = x if x.dtype == torch.float64 else x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        scaled: Tensor = wide.to(x.dtype) * self.weight
        return scaled


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., width) -> (..., width)."""
        out: Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return out


def rotary_tables(time: Tensor, head_size: int, dtype: torch.dtype, base: float = 10000.0) -> tuple[Tensor, Tensor]:
    """Cosine and sine (..., head_size) of the rotation at `time` (...), in steps; the two halves of a head pair up."""
    half = torch.arange(0, head_size, 2, device=time.device, dtype=torch.float32) / head_size
    angle = time[..., None].float() * (1.0 / base**half)
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x_BNTH: Tensor, cos_B1TH: Tensor, sin_B1TH: Tensor) -> Tensor:
    """Rotate each pair (i, i + H/2) of a head by its token's angle."""
    first, second = x_BNTH.chunk(2, dim=-1)
    return x_BNTH * cos_B1TH + torch.cat((-second, first), dim=-1) * sin_B1TH


def attend_matmul(q_BNTH: Tensor, k_BNTH: Tensor, v_BNTH: Tensor, allowed_B1TT: Tensor) -> Tensor:
    """Scores by matmul, divided by sqrt(H); masked_fill with the least finite number."""
    scores = q_BNTH @ k_BNTH.transpose(-2, -1) / math.sqrt(q_BNTH.shape[-1])
    scores = scores.masked_fill(~allowed_B1TT, torch.finfo(scores.dtype).min)
    return torch.softmax(scores, dim=-1) @ v_BNTH


def attend_einsum(q_BNTH: Tensor, k_BNTH: Tensor, v_BNTH: Tensor, allowed_B1TT: Tensor) -> Tensor:
    """Both products by einsum; an additive mask of 0 and -inf; softmax in at least float32."""
    scores = torch.einsum("bnqh,bnkh->bnqk", q_BNTH, k_BNTH) * q_BNTH.shape[-1] ** -0.5
    bias = torch.zeros_like(allowed_B1TT, dtype=scores.dtype).masked_fill(~allowed_B1TT, float("-inf"))
    scores = scores + bias
    weights = functional.softmax(scores, dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    return torch.einsum("bnqk,bnkh->bnqh", weights.to(v_BNTH.dtype), v_BNTH)


def attend_prescaled(q_BNTH: Tensor, k_BNTH: Tensor, v_BNTH: Tensor, allowed_B1TT: Tensor) -> Tensor:
    """The query is scaled first; torch.where with a large negative number; softmax as exp over its sum."""
    scores = torch.matmul(q_BNTH * (1.0 / math.sqrt(q_BNTH.size(-1))), k_BNTH.mT)
    scores = torch.where(allowed_B1TT, scores, -1e9)
    weights = (scores - scores.amax(dim=-1, keepdim=True)).exp()
    weights = weights / weights.sum(dim=-1, keepdim=True)
    return torch.matmul(weights, v_BNTH)


ATTENTION_SPELLINGS = (attend_matmul, attend_einsum, attend_prescaled)


class Attention(nn.Module):
    """Rotary self-attention with G key/value heads for N query heads; `spelling` indexes `ATTENTION_SPELLINGS`."""

    def __init__(self, width: int, heads: int, kv_heads: int, spelling: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_size = heads, kv_heads, width // heads
        self.attend = ATTENTION_SPELLINGS[spelling % len(ATTENTION_SPELLINGS)]
        self.q = nn.Linear(width, heads * self.head_size, bias=False)
        self.k = nn.Linear(width, kv_heads * self.head_size, bias=False)
        self.v = nn.Linear(width, kv_heads * self.head_size, bias=False)
        self.out = nn.Linear(heads * self.head_size, width, bias=False)

    def forward(self, x_BTD: Tensor, rotation: tuple[Tensor, Tensor], allowed_B1TT: Tensor) -> Tensor:
        """x (B, T, D), cos and sin (B, 1, T, H), allowed (B, 1, T, T) bool, True where query t may see key t'."""
        B, T, _ = x_BTD.shape
        cos, sin = rotation
        q = rotate(self.q(x_BTD).view(B, T, self.heads, self.head_size).transpose(1, 2), cos, sin)
        k = rotate(self.k(x_BTD).view(B, T, self.kv_heads, self.head_size).transpose(1, 2), cos, sin)
        v = self.v(x_BTD).view(B, T, self.kv_heads, self.head_size).transpose(1, 2)
        groups = self.heads // self.kv_heads
        mixed = self.attend(q, k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1), allowed_B1TT)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(B, T, self.heads * self.head_size))
        return out


class Block(nn.Module):
    """x + attention(norm(x)), then x + swiglu(norm(x))."""

    def __init__(self, config: WorldPolicyConfig, kv_heads: int, spelling: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.width)
        self.attention = Attention(config.width, config.heads, kv_heads, spelling)
        self.mlp_norm = RMSNorm(config.width)
        self.mlp = SwiGLU(config.width, config.mlp_width)

    def forward(self, x_BTD: Tensor, rotation: tuple[Tensor, Tensor], allowed_B1TT: Tensor) -> Tensor:
        """Shapes as `Attention`."""
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), rotation, allowed_B1TT)
        out: Tensor = x_BTD + self.mlp(self.mlp_norm(x_BTD))
        return out


class VideoTokenizer(nn.Module):
    """Frames (B, F, 3, image, image) to patch tokens (B, F, P, D) that know their own past."""

    def __init__(self, config: WorldPolicyConfig) -> None:
        super().__init__()
        self.patchify = nn.Conv2d(3, config.width, kernel_size=config.patch, stride=config.patch)
        self.place = nn.Parameter(torch.randn(config.patches, config.width) * 0.02)
        self.blocks = nn.ModuleList(Block(config, config.heads, spelling=1 + i) for i in range(config.video_blocks))
        self.head_size = config.width // config.heads

    def forward(self, frames: Tensor, step_valid_BF: Tensor) -> Tensor:
        """Attention runs over F for each patch by itself: a step sees itself and earlier ones that exist."""
        B, F = step_valid_BF.shape
        tokens = self.patchify(frames.flatten(0, 1)).flatten(2).transpose(1, 2) + self.place
        P, D = tokens.shape[1:]
        tokens = tokens.view(B, F, P, D).transpose(1, 2).reshape(B * P, F, D)
        time = torch.arange(F, device=frames.device)
        cos, sin = rotary_tables(time, self.head_size, tokens.dtype)
        causal = time[:, None] >= time[None, :]
        itself = time[:, None] == time[None, :]
        allowed = (causal & step_valid_BF[:, None, :]) | itself
        allowed = allowed.repeat_interleave(P, dim=0).unsqueeze(1)
        for block in self.blocks:
            tokens = block(tokens, (cos, sin), allowed)
        tokens_BFPD: Tensor = tokens.view(B, P, F, D).transpose(1, 2)
        return tokens_BFPD


def horizon_mask(kind_BT: Tensor, step_BT: Tensor, valid_BT: Tensor, window: int, stride: int) -> Tensor:
    """Which key (last dim) each query (dim 2) may see: (B, 1, T, T) bool.

    Padding is seen by nobody but itself, so that no row is empty; what it computes is never read.
    """
    query_step, key_step = step_BT[:, :, None], step_BT[:, None, :]
    age = query_step - key_step
    near = (age >= 0) & (age < window)
    far = (age >= window) & (key_step % stride == 0)
    word = kind_BT[:, None, :] == WORD
    position = torch.arange(kind_BT.shape[1], device=kind_BT.device)
    itself = position[:, None] == position[None, :]
    return (((near | far | word) & valid_BT[:, None, :]) | itself).unsqueeze(1)


def take(x_BTD: Tensor, index_BM: Tensor) -> Tensor:
    """Rows of each trajectory by index: (B, M, D)."""
    return x_BTD.gather(1, index_BM.unsqueeze(-1).expand(-1, -1, x_BTD.shape[-1]))


class WorldPolicy(nn.Module):
    """The whole policy; see the module's docstring."""

    def __init__(self, config: WorldPolicyConfig | None = None) -> None:
        super().__init__()
        self.config = config = config or WorldPolicyConfig()
        D = config.width
        self.video = VideoTokenizer(config)
        self.words = nn.Embedding(config.vocabulary, D)
        self.word_place = nn.Parameter(torch.randn(config.words, D) * 0.02)
        self.joints = nn.Sequential(nn.Linear(config.joints, D), nn.GELU(), nn.Linear(D, D))
        self.taken = nn.Linear(config.action, D)
        self.proposed = nn.Linear(config.action, D)
        self.proposed_place = nn.Parameter(torch.randn(config.proposed, D) * 0.02)
        self.flow_time = nn.Sequential(nn.Linear(D, D), nn.SiLU(), nn.Linear(D, D))
        self.kind = nn.Embedding(5, D)
        self.blocks = nn.ModuleList(Block(config, config.kv_heads, spelling=i) for i in range(config.blocks))
        self.norm = RMSNorm(D)
        self.velocity = nn.Linear(D, config.action)
        self.latent = nn.Linear(D, D)

    def forward(
        self,
        frames: Tensor,
        joints: Tensor,
        taken: Tensor,
        step_valid: Tensor,
        language: Tensor,
        actions: Tensor,
        noise: Tensor,
        flow_time: Tensor,
        slot: Tensor,
        kind: Tensor,
        step: Tensor,
        valid: Tensor,
        last: Tensor,
        ask: Tensor,
    ) -> dict[str, Tensor]:
        """Run the policy on a packed batch (see `packing.pack` for the index tensors).

        Args:
            frames: (B, F, 3, image, image). joints: (B, F, J). taken: (B, F, A), the actions taken.
            step_valid: (B, F) bool, False where a trajectory has fewer steps.
            language: (B, W) word ids.
            actions: (B, K, A), what the expert did next. noise: (B, K, A). flow_time: (B,) in [0, 1].
            slot: (B, T) index of each packed token among the S sources; kind, step: (B, T); valid: (B, T) bool.
            last: (B, F) index among the T tokens of each step's last token, 0 where there is none; ask: (B, K) of the
                proposed actions' tokens.

        Returns:
            `action` (B, K, A): velocity of the flow at `flow_time`; its target `action_target`.
            `next_latent` (B, F, D): prediction of the next step's mean patch token; its target `latent_target`, cut
            off from the gradient, and `latent_valid` (B, F) bool, True where a next step exists.
        """
        patches_BFPD = self.video(frames, step_valid)
        x_BTD = self._pack(patches_BFPD, joints, taken, language, actions, noise, flow_time, slot)
        x_BTD = x_BTD + self.kind(kind)
        rotation = rotary_tables(step.unsqueeze(1), self.config.width // self.config.heads, x_BTD.dtype)
        allowed = horizon_mask(kind, step, valid, self.config.window, self.config.stride)
        for block in self.blocks:
            x_BTD = block(x_BTD, rotation, allowed)
        x_BTD = self.norm(x_BTD) * valid.unsqueeze(-1)
        seen_BFD = patches_BFPD.mean(dim=2).detach()
        return {
            "action": self.velocity(take(x_BTD, ask)),
            "action_target": actions - noise,
            "next_latent": self.latent(take(x_BTD, last)),
            "latent_target": torch.roll(seen_BFD, shifts=-1, dims=1),
            "latent_valid": step_valid & functional.pad(step_valid[:, 1:], (0, 1), value=False),
        }

    def _pack(
        self,
        patches_BFPD: Tensor,
        joints: Tensor,
        taken: Tensor,
        language: Tensor,
        actions: Tensor,
        noise: Tensor,
        flow_time: Tensor,
        slot: Tensor,
    ) -> Tensor:
        """Embed every source, in the order words, steps, proposals, and pick the packed tokens: (B, T, D)."""
        words_BWD = self.words(language) + self.word_place
        per_step = (patches_BFPD, self.joints(joints).unsqueeze(2), self.taken(taken).unsqueeze(2))
        steps_BSD = torch.cat(per_step, dim=2).flatten(1, 2)
        time = flow_time[:, None, None]
        noisy = (1 - time) * noise + time * actions
        clock_BD = self.flow_time(
            torch.cat(rotary_tables(flow_time * 1000.0, words_BWD.shape[-1] // 2, noise.dtype), -1)
        )
        proposed_BKD = self.proposed(noisy) + self.proposed_place + clock_BD.unsqueeze(1)
        sources_BSD = torch.cat((words_BWD, steps_BSD, proposed_BKD), dim=1)
        return take(sources_BSD, slot)


def world_policy_loss(output: dict[str, Tensor]) -> Tensor:
    """Flow matching error plus latent prediction error over the steps that have a next one; a scalar."""
    flow = functional.mse_loss(output["action"], output["action_target"])
    weight = output["latent_valid"].unsqueeze(-1).to(output["next_latent"].dtype)
    squared = (output["next_latent"] - output["latent_target"]).pow(2) * weight
    latent = squared.sum() / (weight.sum() * squared.shape[-1]).clamp(min=1)
    return flow + latent
