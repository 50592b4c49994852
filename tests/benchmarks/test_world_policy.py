"""The world-model policy does what its docstring says: packing, masks, causality, horizon, and it learns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.models.packing import draw_trajectories, pack
from benchmarks.models.world_policy import (
    ATTENTION_SPELLINGS,
    JOINTS,
    PATCH,
    PROPOSED,
    TAKEN,
    WORD,
    RMSNorm,
    WorldPolicy,
    WorldPolicyConfig,
    horizon_mask,
    world_policy_loss,
)
from tests.models.mini import MINI_WORLD_POLICY, POLICY

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS = 44  # 6 steps of 6 tokens, 4 words, 4 proposed actions


@pytest.fixture
def model() -> WorldPolicy:
    built = MINI_WORLD_POLICY.build()
    assert isinstance(built, WorldPolicy)
    return built


def changed(batch: dict[str, Tensor], name: str, index: Any) -> dict[str, Tensor]:
    """The batch with other values in `name[index]`."""
    copy = batch[name].clone()
    copy[index] = copy[index] + 1 if copy.is_floating_point() else (copy[index] + 1) % POLICY.vocabulary
    return {**batch, name: copy}


def test_the_full_size_is_meant_for_two_cores() -> None:
    config = WorldPolicyConfig()
    count = sum(parameter.numel() for parameter in WorldPolicy(config).parameters())
    assert 5e6 < count < 10e6
    for tokens in (64, 256, 1024):  # the benchmark's lengths are filled to the last token
        assert config.words + config.step_tokens * config.steps(tokens) + config.proposed == tokens


def test_packing_orders_tokens_and_marks_padding() -> None:
    packed = pack(POLICY, steps=[2, 1], words=[4, 2], tokens=20, max_steps=2)
    frame = [PATCH] * 4 + [JOINTS, TAKEN]
    assert packed["kind"][0].tolist() == [WORD] * 4 + frame * 2 + [PROPOSED] * 4
    assert packed["kind"][1, :12].tolist() == [WORD] * 2 + frame + [PROPOSED] * 4
    assert packed["step"][1, :12].tolist() == [0] * 8 + [1] * 4
    assert packed["slot"][1, :12].tolist() == [0, 1, *range(4, 10), *range(16, 20)]
    assert packed["valid"].sum(dim=1).tolist() == [20, 12]
    assert packed["last"].tolist() == [[9, 15], [7, 0]]
    assert packed["ask"][1].tolist() == [8, 9, 10, 11]
    assert packed["step_valid"].tolist() == [[True, True], [True, False]]


def test_packing_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="3 steps and 4 words need 26 tokens; there are 20"):
        pack(POLICY, steps=[3], words=[4], tokens=20, max_steps=3)


def test_horizon_mask_by_hand() -> None:
    # Tokens: a word, then steps 0..5, then padding. window 2, stride 3.
    kind = torch.tensor([[WORD, *[TAKEN] * 6, WORD]])
    step = torch.tensor([[0, 0, 1, 2, 3, 4, 5, 0]])
    valid = torch.tensor([[True] * 7 + [False]])
    rows = horizon_mask(kind, step, valid, window=2, stride=3)[0, 0].int().tolist()
    assert rows[6] == [1, 1, 0, 0, 1, 1, 1, 0]  # step 5 sees the word, steps 0 and 3 by stride, 4 and 5 by window
    assert rows[4] == [1, 1, 0, 1, 1, 0, 0, 0]
    assert rows[1] == [1, 1, 0, 0, 0, 0, 0, 0]
    assert rows[7][7] == 1  # padding sees itself: no row is empty


@pytest.mark.parametrize("attend", ATTENTION_SPELLINGS)
def test_each_spelling_of_attention_is_attention(attend: Any) -> None:
    q, k, v = torch.randn(3, 2, 4, 9, 8, dtype=torch.float64)
    allowed = torch.rand(2, 1, 9, 9) > 0.5
    allowed |= torch.eye(9, dtype=torch.bool)
    expected = functional.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
    torch.testing.assert_close(attend(q, k, v, allowed), expected)


def test_the_norm_is_rms_norm() -> None:
    norm = RMSNorm(16)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(3, 16)
    torch.testing.assert_close(norm(x), functional.rms_norm(x, (16,), norm.weight, 1e-6))
    assert norm.bfloat16()(x.bfloat16()).dtype == torch.bfloat16


def test_padding_changes_nothing(model: WorldPolicy) -> None:
    batch = draw_trajectories(POLICY, TOKENS, seed=3)
    batch |= pack(POLICY, steps=[6, 4], words=[4, 2], tokens=TOKENS, max_steps=6)
    output = model(**batch)
    for name, index in (("frames", (1, 5)), ("joints", (1, 4)), ("taken", (1, 4)), ("language", (1, 3))):
        other = model(**changed(batch, name, index))
        assert torch.equal(other["action"], output["action"])
        assert torch.equal(other["next_latent"][1, :4], output["next_latent"][1, :4])
        assert world_policy_loss(other) == world_policy_loss(output)
    assert not torch.equal(model(**changed(batch, "language", (1, 1)))["action"][1], output["action"][1])


def test_a_trajectory_is_the_same_alone_and_in_a_padded_batch(model: WorldPolicy) -> None:
    batch = draw_trajectories(POLICY, TOKENS, seed=3)
    batch |= pack(POLICY, steps=[6, 3], words=[4, 4], tokens=TOKENS, max_steps=6)
    alone = {name: value[1:] for name, value in batch.items()}
    alone |= {name: value[:, :3] for name, value in alone.items() if name in ("frames", "joints", "taken")}
    alone |= pack(POLICY, steps=[3], words=[4], tokens=26, max_steps=3)
    packed, single = model(**batch), model(**alone)
    torch.testing.assert_close(packed["action"][1:], single["action"])
    torch.testing.assert_close(packed["next_latent"][1:, :3], single["next_latent"])


@pytest.mark.parametrize("name", ["frames", "joints", "taken"])
def test_no_step_sees_the_future(model: WorldPolicy, name: str) -> None:
    batch = draw_trajectories(POLICY, TOKENS, seed=3)
    output, other = model(**batch), model(**changed(batch, name, (0, 4)))
    assert torch.equal(other["next_latent"][0, :4], output["next_latent"][0, :4])
    assert not torch.equal(other["next_latent"][0, 4], output["next_latent"][0, 4])
    assert not torch.equal(other["action"][0], output["action"][0])


def test_targets_are_flow_velocity_and_the_next_steps_latent(model: WorldPolicy) -> None:
    batch = draw_trajectories(POLICY, TOKENS, seed=3)
    batch |= pack(POLICY, steps=[6, 4], words=[4, 2], tokens=TOKENS, max_steps=6)
    output = model(**batch)
    seen = model.video(batch["frames"], batch["step_valid"]).mean(dim=2)
    assert torch.equal(output["action_target"], batch["actions"] - batch["noise"])
    assert torch.equal(output["latent_target"][:, :-1], seen[:, 1:])
    assert not output["latent_target"].requires_grad
    assert output["latent_valid"].tolist() == [[True] * 5 + [False], [True] * 3 + [False] * 3]


def test_hostile_trajectories_have_finite_gradients(model: WorldPolicy) -> None:
    batch = draw_trajectories(POLICY, TOKENS, seed=0, hostile=True)
    assert batch["valid"].sum(dim=1).tolist() == [44, 10]
    world_policy_loss(model(**batch)).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_it_learns(model: WorldPolicy) -> None:
    batch = draw_trajectories(POLICY, TOKENS, seed=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(25):
        optimizer.zero_grad()
        loss = world_policy_loss(model(**batch))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
