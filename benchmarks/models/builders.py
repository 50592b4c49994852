"""Turns each entry of `workloads.toml` into a model, inputs and a loss; imports a library only to build its model."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fusewright.workload import ADVERSARIAL_SEED, Inputs, Workload

Facts = Mapping[str, Any]
Dims = dict[str, dict[int, str]]
TOKENS: Dims = {"input_ids": {1: "tokens"}, "labels": {1: "tokens"}}

CLIP_VOCABULARY = 49408
CLIP_END = 49407
MEL_BINS, MEL_FRAMES = 80, 3000  # Whisper's encoder halves the frames: 1500 positions
T5_SHRINK = 4  # encoder tokens for each decoder token


def make(facts: Facts, *, dropout: bool) -> Workload:
    """The `Workload` of one entry."""
    library, _, kind = facts["source"].partition(".")
    if facts["source"].startswith("own:"):
        return _own(facts)
    if library == "timm":
        return _timm(facts, kind, dropout)
    if library == "diffusers":
        return _DIFFUSERS[kind](facts, dropout)
    return _transformers(facts, kind, dropout)


def _workload(
    facts: Facts,
    model: Callable[[], nn.Module],
    inputs: Callable[[int, int], Inputs],
    dims: Dims,
    loss: Callable[[Any], Tensor],
) -> Workload:
    return Workload(facts["name"], facts["family"], model, inputs, tuple(facts["lengths"]), dims, loss)


def _token_ids(batch: int, length: int, vocabulary: int, seed: int, low: int = 0) -> Tensor:
    """Random ids in [low, vocabulary); the hostile draw repeats the last id, so that every token is the same."""
    if seed == ADVERSARIAL_SEED:
        return torch.full((batch, length), vocabulary - 1)
    return torch.randint(low, vocabulary, (batch, length), generator=torch.Generator().manual_seed(seed))


def _normal(shape: tuple[int, ...], seed: int) -> Tensor:
    """Normal values; the hostile draw is 50 times as large and its first sample is all zeros."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    if seed == ADVERSARIAL_SEED:
        values *= 50
        values[0] = 0
    return values


# --- transformers -----------------------------------------------------------------------------------------------------


def _transformers(facts: Facts, kind: str, dropout: bool) -> Workload:
    def model() -> nn.Module:
        transformers = importlib.import_module("transformers")
        model_class = getattr(transformers, kind)
        config = _CONFIGS.get(kind, _plain_config)(model_class.config_class, facts["config"])
        if not dropout:
            _no_dropout(config)
        switch = {"attn_implementation": facts["attention"]} if "attention" in facts else {}
        made: nn.Module = model_class._from_config(config, **switch)
        return made

    inputs, dims = _INPUTS.get(kind, (_language_inputs, TOKENS))
    return _workload(facts, model, lambda length, seed: ((), inputs(facts, length, seed)), dims, _library_loss)


def _library_loss(output: Any) -> Tensor:
    loss: Tensor = output.loss
    return loss


# What a class needs beside the sizes: ids inside the vocabulary, and the token that starts T5's decoder.
_TOKEN_IDS: Mapping[str, dict[str, int]] = {
    "GPT2Config": {"bos_token_id": 0, "eos_token_id": 0},
    "T5Config": {"decoder_start_token_id": 0},
}


def _plain_config(config_class: Any, options: Facts) -> Any:
    return config_class(**options, **_TOKEN_IDS.get(config_class.__name__, {}))


def _clip_config(config_class: Any, options: Facts) -> Any:
    """Heads of 64 and MLPs four times as wide, as in CLIP's published sizes; both towers project to the text width."""
    text, vision = options["text_hidden"], options["vision_hidden"]
    return config_class(
        projection_dim=text,
        text_config={
            "hidden_size": text, "num_hidden_layers": options["text_layers"],
            "num_attention_heads": text // 64, "intermediate_size": 4 * text, "projection_dim": text,
        },
        vision_config={
            "hidden_size": vision, "num_hidden_layers": options["vision_layers"],
            "num_attention_heads": vision // 64, "intermediate_size": 4 * vision, "projection_dim": text,
            "patch_size": options["patch"], "image_size": options["image"],
        },
    )  # fmt: skip


def _no_dropout(config: Any) -> None:
    """Set every rate of the configuration to 0: fields whose name holds `drop`, as `attn_pdrop`, `dropout_rate`."""
    for name, value in list(vars(config).items()):
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)


def _language_inputs(facts: Facts, length: int, seed: int) -> dict[str, Tensor]:
    vocabulary = facts["config"].get("vocab_size", 30522)  # BERT's own
    ids = _token_ids(facts["batch"], length, vocabulary, seed)
    return {"input_ids": ids, "labels": ids.clone()}


def _t5_inputs(facts: Facts, length: int, seed: int) -> dict[str, Any]:
    batch, vocabulary = facts["batch"], 32128
    ids = _token_ids(batch, length, vocabulary, seed, low=2)
    labels = _token_ids(batch, length // T5_SHRINK, vocabulary, seed + 1, low=2)
    return {"input_ids": ids, "labels": labels, "use_cache": False}


def _whisper_inputs(facts: Facts, length: int, seed: int) -> dict[str, Any]:
    batch = facts["batch"]
    sound = _normal((batch, MEL_BINS, MEL_FRAMES), seed)
    return {"input_features": sound, "labels": _token_ids(batch, length, 50256, seed), "use_cache": False}


def _clip_inputs(facts: Facts, length: int, seed: int) -> dict[str, Any]:
    batch, image = facts["batch"], facts["config"]["image"]
    ids = _token_ids(batch, length, CLIP_END - 1, seed)
    ids[:, -1] = CLIP_END  # the text is read out at its end token
    return {"input_ids": ids, "pixel_values": _normal((batch, 3, image, image), seed), "return_loss": True}


_CONFIGS: Mapping[str, Callable[[Any, Facts], Any]] = {"CLIPModel": _clip_config}
_INPUTS: Mapping[str, tuple[Callable[[Facts, int, int], dict[str, Any]], Dims]] = {
    "T5ForConditionalGeneration": (_t5_inputs, {"input_ids": {1: "tokens"}, "labels": {1: "target_tokens"}}),
    "WhisperForConditionalGeneration": (_whisper_inputs, {"labels": {1: "tokens"}}),
    "CLIPModel": (_clip_inputs, {"input_ids": {1: "tokens"}}),
}


# --- timm -------------------------------------------------------------------------------------------------------------

# Initial values, not structure: with timm's own, whole residual branches start at (nearly) zero, and an error in them
# would not show in any gradient.
_TIMM_INIT: Mapping[str, dict[str, Any]] = {
    "resnet50": {"zero_init_last": False},
    "convnext_atto": {"ls_init_value": 1.0},
}
# Swin is the one whose default trains with stochastic depth.
_TIMM_DROPOUT: Mapping[str, dict[str, Any]] = {"swin_tiny_patch4_window7_224": {"drop_path_rate": 0.0}}


def _timm(facts: Facts, kind: str, dropout: bool) -> Workload:
    def model() -> nn.Module:
        timm = importlib.import_module("timm")
        options = {**_TIMM_INIT.get(kind, {}), **({} if dropout else _TIMM_DROPOUT.get(kind, {}))}
        made: nn.Module = timm.create_model(kind, pretrained=False, **options)
        return made

    def inputs(batch: int, seed: int) -> Inputs:
        return (), {"x": _normal((batch, 3, 224, 224), seed)}

    return _workload(facts, model, inputs, {"x": {0: "batch"}}, _classification_loss)


def _classification_loss(logits: Tensor) -> Tensor:
    """Cross entropy against a fixed class for each position in the batch; logits (batch, classes)."""
    wanted = torch.arange(logits.shape[0], device=logits.device) * 37 % logits.shape[1]
    return functional.cross_entropy(logits, wanted)


# --- diffusers --------------------------------------------------------------------------------------------------------


def _unet(facts: Facts, dropout: bool) -> Workload:
    """No dropout in the library's default; text of 77 tokens, as CLIP's, is what it attends to."""
    config = facts["config"]

    def model() -> nn.Module:
        diffusers = importlib.import_module("diffusers")
        made: nn.Module = diffusers.UNet2DConditionModel(**config)
        return made

    def inputs(batch: int, seed: int) -> Inputs:
        size = config["sample_size"]
        return (), {
            "sample": _normal((batch, 4, size, size), seed),
            "timestep": _timesteps(batch, seed),
            "encoder_hidden_states": _normal((batch, 77, config["cross_attention_dim"]), seed + 1),
        }

    dims: Dims = {"sample": {0: "batch"}, "timestep": {0: "batch"}, "encoder_hidden_states": {0: "batch"}}
    return _workload(facts, model, inputs, dims, _denoising_loss)


def _dit(facts: Facts, dropout: bool) -> Workload:
    config = facts["config"]

    def model() -> nn.Module:
        diffusers = importlib.import_module("diffusers")
        made: nn.Module = diffusers.DiTTransformer2DModel(**config)
        if not dropout:
            for module in made.modules():
                if type(module).__name__ == "LabelEmbedding":  # drops whole labels, for classifier-free guidance
                    setattr(module, "dropout_prob", 0.0)  # noqa: B010 - torch types attributes of modules as modules
        return made

    def inputs(batch: int, seed: int) -> Inputs:
        size = config["sample_size"]
        return (), {
            "hidden_states": _normal((batch, 4, size, size), seed),
            "timestep": _timesteps(batch, seed),
            "class_labels": _token_ids(batch, 1, 1000, seed)[:, 0],
        }

    dims: Dims = {"hidden_states": {0: "batch"}, "timestep": {0: "batch"}, "class_labels": {0: "batch"}}
    return _workload(facts, model, inputs, dims, _denoising_loss)


def _timesteps(batch: int, seed: int) -> Tensor:
    return torch.randint(0, 1000, (batch,), generator=torch.Generator().manual_seed(seed))


def _denoising_loss(output: Any) -> Tensor:
    """Mean squared error to a constant 1: not 0, so that an output that starts at zero has a gradient too."""
    return functional.mse_loss(output.sample, torch.ones_like(output.sample))


_DIFFUSERS: Mapping[str, Callable[[Facts, bool], Workload]] = {
    "UNet2DConditionModel": _unet,
    "DiTTransformer2DModel": _dit,
}


# --- own models -------------------------------------------------------------------------------------------------------


def _own(facts: Facts) -> Workload:
    if facts["name"] == "mlp":
        return _mlp(facts)
    return _world_policy(facts)


def _mlp(facts: Facts) -> Workload:
    from benchmarks.models.mlp import Mlp

    def inputs(batch: int, seed: int) -> Inputs:
        return (), {"x": _normal((batch, 256), seed)}

    return _workload(facts, Mlp, inputs, {"x": {0: "batch"}}, lambda logits: logits.square().mean())


def _world_policy(facts: Facts) -> Workload:
    from benchmarks.models.packing import draw_trajectories
    from benchmarks.models.world_policy import WorldPolicy, WorldPolicyConfig, world_policy_loss

    def inputs(tokens: int, seed: int) -> Inputs:
        hostile = seed == ADVERSARIAL_SEED
        return (), draw_trajectories(WorldPolicyConfig(), tokens, seed, facts["batch"], hostile)

    return _workload(facts, WorldPolicy, inputs, WORLD_POLICY_DIMS, world_policy_loss)


WORLD_POLICY_DIMS: Dims = {
    **{name: {1: "tokens"} for name in ("slot", "kind", "step", "valid")},
    **{name: {1: "steps"} for name in ("frames", "joints", "taken", "step_valid", "last")},
}
