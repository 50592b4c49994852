"""The registry holds the fixed workloads, and each of them runs and repeats itself bit by bit."""

from __future__ import annotations

import pathlib
import runpy
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import workloads
from benchmarks.workloads import WORKLOADS
from fusewright.errors import UnknownNameError
from fusewright.trees import bitwise_difference, bitwise_equal
from fusewright.workload import ADVERSARIAL_SEED, Workload, observe

pytestmark = pytest.mark.usefixtures("one_thread")

JOBS = sorted((pathlib.Path(__file__).parents[2] / "examples" / "jobs").glob("*.py"))

# The library freezes these.
WITHOUT_GRADIENT = {"whisper": {"model.encoder.embed_positions.weight"}}
DRAWS_AT_RANDOM = {"gpt2", "bert", "t5", "swin", "dit"}  # the libraries' defaults have dropout, or drop paths or labels


def test_the_registry_is_the_file() -> None:
    assert len(WORKLOADS) == 18
    families = {workload.family for workload in WORKLOADS.values()}
    assert families == {
        "language", "moe", "multimodal", "vision_transformer", "convolution", "diffusion", "recurrent", "small"
    }  # fmt: skip
    for name, facts in workloads.facts().items():
        workload = WORKLOADS[name]
        assert (workload.name, workload.family, workload.lengths) == (name, facts["family"], tuple(facts["lengths"]))
        assert (workload.dtype, workload.train) == (torch.float32, True)


def test_unknown_names_get_a_proposal() -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'resnet50'"):
        workloads.get("resnet-50")
    assert "resnet-50" not in WORKLOADS


def configuration(model: nn.Module, facts: dict[str, Any]) -> dict[str, Any]:
    """The built model's values for the fields that the file fixes."""
    wanted = facts.get("config", {})
    config: Any = model.config
    if facts["name"] == "clip":
        text, vision = config.text_config, config.vision_config
        return {
            "text_layers": text.num_hidden_layers, "text_hidden": text.hidden_size,
            "vision_layers": vision.num_hidden_layers, "vision_hidden": vision.hidden_size,
            "patch": vision.patch_size, "image": vision.image_size,
        }  # fmt: skip
    values = {name: getattr(config, name) for name in wanted}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


@pytest.mark.models
@pytest.mark.parametrize("name", list(WORKLOADS))
def test_workload_is_as_fixed_runs_and_repeats(name: str) -> None:
    facts, workload = workloads.facts()[name], WORKLOADS[name]
    model = workload.build()
    if "config" in facts:
        assert configuration(model, facts) == facts["config"]
    if "attention" in facts:
        assert model.config._attn_implementation == facts["attention"]
    workload.check(model)
    first = observe(workload, model, workload.lengths[0], training=True)
    again = observe(workload, workload.build(), workload.lengths[0], training=True)
    assert bitwise_difference(first, again) is None
    assert first["loss"].isfinite()
    idle = {n for n, gradient in first["gradients"].items() if gradient is None or not gradient.any()}
    assert idle == WITHOUT_GRADIENT.get(name, set())


@pytest.mark.models
@pytest.mark.parametrize("name", sorted(DRAWS_AT_RANDOM))
def test_without_dropout_the_seed_decides_nothing(name: str) -> None:
    def outputs(workload: Workload) -> list[Any]:
        model = workload.build()
        args, kwargs = workload.make_inputs(workload.lengths[0])
        found = []
        with torch.no_grad():
            for seed in (0, 1):
                torch.manual_seed(seed)
                found.append(model(*args, **kwargs))
        return found

    assert bitwise_equal(*outputs(workloads.get(name, dropout=False)))
    if name != "dit":  # with one label, the chance to draw a drop is one in ten
        assert not bitwise_equal(*outputs(workloads.get(name)))


@pytest.mark.models
@pytest.mark.parametrize("name", ["llama_eager", "t5", "vit", "unet", "world_policy"])
def test_draws_differ_and_the_hostile_one_is_finite(name: str) -> None:
    workload = workloads.get(name, dropout=False)
    draws = [workload.make_inputs(workload.lengths[0], seed) for seed in (0, 1, ADVERSARIAL_SEED)]
    assert not bitwise_equal(draws[0], draws[1])
    assert not bitwise_equal(draws[0], draws[2])
    assert bitwise_equal(draws[0], workload.make_inputs(workload.lengths[0], 0))
    seen = observe(workload, workload.build(), workload.lengths[0], ADVERSARIAL_SEED, training=True)
    assert seen["loss"].isfinite()
    assert all(g is None or bool(g.isfinite().all()) for g in seen["gradients"].values())


@pytest.mark.models
@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)
def test_example_jobs_hold_workloads_that_run(path: pathlib.Path) -> None:
    source = path.read_text()
    assert "benchmarks" not in source  # a user copies the file alone
    (workload,) = runpy.run_path(str(path))["WORKLOADS"]
    assert isinstance(workload, Workload)
    model = workload.build()
    workload.check(model)
    assert observe(workload, model, workload.lengths[0], training=True)["loss"].isfinite()


def test_the_three_example_jobs_exist() -> None:
    assert {path.stem for path in JOBS} >= {"llama_eager", "resnet50", "world_policy"}
