"""A job file: a small Llama with hand-written ("eager") attention, at three lengths, for `fusewright tune` and `check`.

A job file defines `WORKLOADS`, a list of `fusewright.Workload`. This one needs `pip install transformers`.
"""

from typing import Any

import torch
from torch import nn

from fusewright import Workload

VOCABULARY = 8192


def model() -> nn.Module:
    """Random weights: put `from_pretrained` here for your own. It is called under a fixed seed."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        intermediate_size=704,
        vocab_size=VOCABULARY,
        use_cache=False,
        attn_implementation="eager",
    )
    return LlamaForCausalLM(config)


def inputs(tokens: int, seed: int) -> tuple[tuple, dict]:
    """One batch of `tokens` tokens: (positional arguments, keyword arguments) of the model's forward."""
    ids = torch.randint(VOCABULARY, (1, tokens), generator=torch.Generator().manual_seed(seed))
    return (), {"input_ids": ids, "labels": ids.clone()}


def loss(output: Any) -> torch.Tensor:
    """The library computes the loss where it is given labels."""
    return output.loss


WORKLOADS = [
    Workload(
        name="llama_eager",
        family="language",
        model=model,
        inputs=inputs,
        lengths=(256, 1024, 2048),
        dims={"input_ids": {1: "tokens"}, "labels": {1: "tokens"}},  # the dims that change from call to call
        loss=loss,
    )
]
