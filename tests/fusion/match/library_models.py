"""Small models of transformers' own classes, random weights, attention written out (`attn_implementation="eager"`)."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

LAYERS, TOKENS = 2, 12

# Sizes under the names that the configurations use; each takes those that it knows.
_SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "embedding_size", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers", "num_decoder_layers"), LAYERS),
    **dict.fromkeys(("encoder_layers", "decoder_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("intermediate_size", "n_inner", "d_ff", "ffn_dim", "hidden_dim", "ffn_hidden_size"), 48),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 48),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 64),
    **dict.fromkeys(("num_key_value_heads", "num_experts_per_tok"), 2),
    **dict.fromkeys(("num_local_experts", "num_experts", "rotary_dim", "sliding_window", "window_size"), 4),
    **dict.fromkeys(("head_dim", "d_kv", "query_pre_attn_scalar"), 8),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    "attention_types": [[["global", "local"], 1]],
    "vocab_size": 96, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
    "use_cache": False, "image_size": 32, "patch_size": 8,
}  # fmt: skip
_DROPOUT = (
    *("attention_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop", "attention_probs_dropout_prob", "dropout"),
    *("hidden_dropout_prob", "dropout_rate", "activation_dropout", "hidden_dropout", "embed_dropout"),
    *("drop_path_rate", "embedding_dropout", "classifier_dropout"),
)

CAUSAL = (
    *("llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3_text", "phi", "phi3", "gpt_neox", "gpt_neo"),
    *("gptj", "falcon", "bloom", "mpt", "opt", "gpt2", "gpt_bigcode", "codegen", "starcoder2", "cohere", "cohere2"),
    *("olmo", "olmo2", "granite", "stablelm", "mixtral", "qwen2_moe", "glm", "glm4", "xglm", "biogpt", "persimmon"),
    *("nemotron", "helium", "smollm3", "gpt_oss"),
)
ENCODERS = (
    *("bert", "roberta", "electra", "distilbert", "albert", "deberta-v2", "mpnet", "modernbert", "xlm-roberta"),
    *("roformer", "nystromformer"),
)
TRANSLATORS = ("t5", "bart", "mbart", "pegasus", "marian", "blenderbot")
VISION = (
    *("vit", "deit", "beit", "dinov2", "siglip_vision_model", "clip_vision_model", "vit_mae", "ijepa"),
    *("data2vec-vision", "swin", "segformer"),
)
_SPECIAL = {
    "swin": {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4, "patch_size": 2},
    "segformer": {
        "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [16, 32], "num_attention_heads": [1, 2],
        "num_encoder_blocks": 2, "patch_sizes": [3, 3], "strides": [4, 2], "mlp_ratios": [2, 2],
    },
}  # fmt: skip


def build(kind: str, *, training: bool) -> nn.Module:
    """A model of `kind` (a `model_type` of transformers) with weights of seed 0 and no dropout."""
    import transformers

    config_class = transformers.CONFIG_MAPPING[kind]
    known = set(inspect.signature(config_class.__init__).parameters) | set(config_class.attribute_map)
    for base in config_class.__mro__:
        known |= set(getattr(base, "__annotations__", {}))
    wanted = {**_SIZES, **dict.fromkeys(_DROPOUT, 0.0), **_SPECIAL.get(kind, {})}
    given = {name: value for name, value in wanted.items() if name in known}
    for alias, name in config_class.attribute_map.items():
        if name in given:
            given.pop(alias, None)
    auto = transformers.AutoModelForCausalLM if kind in CAUSAL else transformers.AutoModel
    torch.manual_seed(0)
    model: nn.Module = auto.from_config(config_class(**given), attn_implementation="eager")
    return model.train(training)


class FirstOutput(nn.Module):
    """Calls a model with its main inputs by position and returns the first tensor of its result."""

    def __init__(self, model: nn.Module, kind: str) -> None:
        super().__init__()
        self.model = model
        self.translates = kind in TRANSLATORS

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        result = self.model(input_ids=x, decoder_input_ids=y, use_cache=False) if self.translates else self.model(x)
        first: Tensor = result[0]
        return first


def inputs(kind: str) -> tuple[Tensor, ...]:
    """Token ids or pixels, as the first arguments of the model."""
    if kind in VISION:
        return (torch.randn(2, 3, 32, 32),)
    ids = torch.randint(3, 96, (2, TOKENS))
    return (ids, ids[:, : TOKENS // 2]) if kind in TRANSLATORS else (ids,)
