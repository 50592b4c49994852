"""What a `TrainStep` finds ready on disk, which passes it runs, and how it is switched off."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import Any, ClassVar

import pytest
import torch
from torch import fx, nn

from fusewright.capture.record import Record
from fusewright.errors import CacheFolderError, FallbackError, UnknownNameError, VerificationError
from fusewright.passes.base import Pass, PassContext, Stage
from fusewright.report.explain import explain_record
from fusewright.runtime.step_verify import StepBuilder
from fusewright.runtime.train_step import OFF, TrainStep
from tests.runtime.train_step.step_pair import Mlp, Pair, adam, adamw, sgd, square

ROOT = pathlib.Path(__file__).resolve().parents[3]


def child(tmp_path: pathlib.Path) -> dict[str, Any]:
    """Train in a process of its own, with both caches in `tmp_path`."""
    environment = os.environ | {
        "FUSEWRIGHT_CACHE_DIR": str(tmp_path / "fusewright"),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
        "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",  # takes longer than all the rest for one little graph
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-m", "tests.runtime.train_step.child"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_second_process_neither_compiles_nor_compares(tmp_path: pathlib.Path) -> None:
    cold, warm = child(tmp_path), child(tmp_path)
    assert (cold["aot"]["autograd_cache_miss"], cold["inductor"]["fxgraph_cache_miss"]) == (1, 1)
    assert (warm["aot"]["autograd_cache_hit"], warm["inductor"]["fxgraph_cache_hit"]) == (1, 1)
    for counts in (cold["aot"] | cold["inductor"], warm["aot"] | warm["inductor"]):
        assert not [name for name in counts if "bypass" in name]
    assert (cold["compared"], cold["compiled_calls"]) == (1, 1)
    assert (warm["compared"], warm["compiled_calls"]) == (0, 2)
    assert "verified earlier" in warm["verified"]
    assert cold["fallbacks"] == warm["fallbacks"] == []
    for name in ("losses", "weight"):
        assert warm[name] == pytest.approx(cold[name], rel=1e-5)


class Renamed(Mlp):
    pass


def test_a_verdict_holds_for_an_equal_step_only() -> None:
    Pair(Mlp(), sgd()).train(2)
    again = Pair(Mlp(), sgd())
    assert again.train(2)["compiled_calls"] == 2
    assert again.step.record.verdicts[0].what.endswith("(verified earlier)")
    for other in (
        Pair(Renamed(), sgd()),  # may be a wrapper that does what no trace sees
        Pair(Mlp(), sgd(momentum=0.5)),
        Pair(Mlp(), adam()),
        Pair(Mlp(), sgd(), clip=0.5),
        Pair(Mlp(), sgd(), lowering="aot_eager"),
        Pair(Mlp(dropout=0.5), sgd()),
    ):
        report = other.train(1)
        assert (report["compiled_calls"], report["graphs"][0]["verified"][-5:]) == (0, "agree")


def test_a_step_with_collectives_is_always_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    Pair(Mlp(), sgd()).train(1)
    monkeypatch.setattr("fusewright.runtime.step_verify.why_not_comparable", lambda gm: "collectives")
    assert Pair(Mlp(), sgd()).train(1)["compiled_calls"] == 0


@pytest.mark.parametrize("field", ["slots", "grad_outputs", "updated", "written", "assumed", "graph"])
def test_everything_that_a_verdict_stands_for_is_in_its_key(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[str] = []
    plan = StepBuilder.plan

    def watch(self: StepBuilder, step: Any, name: str, assumed: Any) -> Any:
        keys.append(plan(self, step, name, assumed).key)
        keys.append(plan(self, step, "another name", assumed).key)
        if field == "assumed":
            assumed = (*assumed, "more")
        elif field == "graph":
            node = next(n for n in step.graph_module.graph.nodes if n.target is torch.ops.aten.mul.Tensor)
            node.target = torch.ops.aten.add.Tensor
        elif field == "slots":
            step.slots = step.slots[::-1]
        elif field == "written":
            step.written = frozenset(list(step.written)[1:])
        else:
            setattr(step, field, (17,))
        keys.append(plan(self, step, name, assumed).key)
        raise RuntimeError("seen")

    monkeypatch.setattr(StepBuilder, "plan", watch)
    Pair(Mlp(), sgd(), strict=False).train(1)
    assert keys[0] == keys[1] != keys[2]


def test_a_bad_verdict_is_kept_too(monkeypatch: pytest.MonkeyPatch) -> None:
    lower = StepBuilder.lower

    def broken(self: StepBuilder, step: Any, plan: Any) -> Any:
        run = lower(self, step, plan)
        return lambda *tensors: [result + 1 for result in run(*tensors)]

    with monkeypatch.context() as patch:
        patch.setattr(StepBuilder, "lower", broken)
        for accumulate in (1, 2):
            report = Pair(Mlp(), sgd(), strict=False, accumulate=accumulate).train(2)
            assert {f["kind"] for f in report["fallbacks"]} == {"verification"}
    report = Pair(Mlp(), sgd(), strict=False).train(2)
    (fallback,) = report["fallbacks"]
    assert (report["compiled_calls"], fallback["kind"], fallback["count"]) == (0, "verification", 2)
    assert "verified earlier" in fallback["reason"]
    strict = Pair(Mlp(), sgd(), accumulate=2)
    for _ in range(2):
        with pytest.raises(VerificationError, match="verified earlier"):
            strict.step(torch.ones(5, 4))
        strict.eager(torch.ones(5, 4))
        strict.check()  # the eager step has been applied


def test_without_verification_no_verdict_is_read_or_written(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSEWRIGHT_VERIFY", "off")
    assert Pair(Mlp(), sgd()).train(2)["graphs"][0]["verified"] == "off"
    assert not list((tmp_path / "fusewright").rglob("*.json"))
    monkeypatch.setenv("FUSEWRIGHT_VERIFY", "always")
    assert Pair(Mlp(), sgd()).train(2)["compiled_calls"] == 1
    assert len(list((tmp_path / "fusewright").rglob("*.json"))) == 1


class Spell(Pass):
    """Spells out the default of ATen's `sub` in the joint graph."""

    name: ClassVar[str] = "spell_joint"
    stage: ClassVar[Stage] = Stage.JOINT

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> int:
        count = 0
        for node in gm.graph.nodes:
            if node.target is torch.ops.aten.sub.Tensor and not node.kwargs and ctx.allow(node):
                node.kwargs = {"alpha": 1}
                ctx.recognise("difference")
                count += 1
        return count


class SpellLate(Spell):
    name: ClassVar[str] = "spell_post_grad"
    stage: ClassVar[Stage] = Stage.POST_GRAD

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> int:
        for node in gm.graph.nodes:
            ctx.declined(node, "post_grad saw it")
        return 0


class Failing(Spell):
    name: ClassVar[str] = "failing"

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> int:
        raise ValueError("no luck")


class Wrong(Spell):
    """Turns differences into sums."""

    name: ClassVar[str] = "wrong_joint"

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> int:
        found = [node for node in gm.graph.nodes if node.target is torch.ops.aten.sub.Tensor]
        for node in found:
            node.target = torch.ops.aten.add.Tensor
        return len(found)


class WrongLate(Wrong):
    name: ClassVar[str] = "wrong_post_grad"
    stage: ClassVar[Stage] = Stage.POST_GRAD


def little(*passes: Pass, **options: Any) -> Pair:
    """One linear layer, so that Inductor is quick; its only `sub` is the loss's."""
    return Pair(nn.Linear(4, 3), sgd(), lowering="inductor", passes=passes, **options)


def test_passes_of_the_aten_stages_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEWRIGHT_SKIP_PASSES", "skipped")
    skipped = type("Skipped", (Spell,), {"name": "skipped"})()
    pair = little(Failing(), Spell(), SpellLate(), skipped, strict=False)
    report = pair.train(2)
    assert report["rewrites"] == {"spell_joint": 1}
    assert pair.step.record.recognised == {"difference": 1}
    declined = {(row["pass"], row["reason"]) for row in report["declines"]}
    assert ("spell_post_grad", "post_grad saw it") in declined
    (fallback,) = report["fallbacks"]
    assert (fallback["kind"], fallback["where"]) == ("pass", "step0.joint")
    assert "no luck" in fallback["reason"]
    assert report["compiled_calls"] == 1


@pytest.mark.parametrize("one", [Wrong(), WrongLate()], ids=lambda one: one.name)
def test_a_wrong_pass_is_caught(one: Pass) -> None:
    report = little(one, strict=False).train(2)
    assert report["rewrites"] == {one.name: 1}
    assert [(f["kind"], f["count"]) for f in report["fallbacks"]] == [("verification", 2)]


def test_passes_are_placed_and_chosen_as_in_optimize() -> None:
    with pytest.raises(UnknownNameError, match="no_such_pass"):
        little(Spell(), before="no_such_pass")
    with pytest.raises(UnknownNameError, match="numerics"):
        little(numerics="sloppy")


def test_disabled_steps_are_the_eager_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(Mlp(), adamw(), accumulate=2)
    pair.train(3)
    monkeypatch.setattr(OFF, "depth", 1)
    report = pair.train(2)
    assert (report["calls"], report["disabled_calls"]) == (3, 2)
    monkeypatch.setattr(OFF, "depth", 0)
    assert pair.train(2)["calls"] == 5
    monkeypatch.setenv("FUSEWRIGHT_DISABLE", "1")
    report = Pair(Mlp(), adamw()).train(2)
    assert (report["graphs"], report["calls"], report["disabled_calls"]) == ([], 0, 2)


def test_the_record_is_what_explain_reads() -> None:
    pair = Pair(Mlp(), sgd())
    pair.train(3)
    pair.train(2, 6, 4)
    assert isinstance(pair.step.record, Record)
    found = explain_record(pair.step.record).to_dict()
    assert (found["calls"], found["dispatched"], found["graphs"], found["lowerings"]) == (5, 3, 2, 2)
    assert [(row["graph"], row["variant"], row["hits"]) for row in found["buckets"]] == [
        ("step0", "eager", 2),
        ("step1", "eager", 1),
    ]
    assert [row["ok"] for row in found["verified"]] == [True, True]
    assert set(found["seconds"]) == {"capture", "lower", "verify"}


def test_settings_come_from_the_environment(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEWRIGHT_STRICT", "1")
    model = Mlp()
    step = TrainStep(model, square, torch.optim.RMSprop(model.parameters()))
    with pytest.raises(FallbackError, match="RMSprop"):
        step(torch.ones(5, 4))
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FUSEWRIGHT_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(CacheFolderError):
        TrainStep(model, square, step.optimizer)
