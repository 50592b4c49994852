"""Linear layers of one input merge into one; what looks at memory gets contiguous memory; near misses stay."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fusewright.passes.frozen.merge_linears import MergeLinears
from fusewright.tools.pass_tester import Report
from tests.passes.frozen.frozen_pass import declines, rewrite

PASS = MergeLinears()
Body = Callable[[Sequence[nn.Linear], Tensor], object]


class Layers(nn.Module):
    """Linear layers of the given widths from 8 features, used as `body` says."""

    def __init__(self, widths: Sequence[int], body: Body, biases: Sequence[bool] | None = None) -> None:
        super().__init__()
        given = biases or [True] * len(widths)
        self.layers = nn.ModuleList(nn.Linear(8, w, bias=b) for w, b in zip(widths, given, strict=True))
        self.body = body

    def forward(self, x: Tensor) -> object:
        return self.body(list(self.layers), x)  # type: ignore[arg-type]


def merged(body: Body, widths: Sequence[int] = (8, 4, 4), biases: Sequence[bool] | None = None) -> Report:
    report = rewrite(PASS, Layers(widths, body, biases).eval(), [torch.randn(2, 5, 8)])
    assert report.rewrites == 1, report.declines
    assert report.after.code.count("linear(") == 1
    return report


def attention(layers: Sequence[nn.Linear], x: Tensor) -> Tensor:
    q, k, v = (layer(x).view(2, 5, -1, 4).transpose(1, 2) for layer in layers)
    k, v = (t.repeat_interleave(2, 1) for t in (k, v))
    return functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(2, 5, 8)


def gate_up(layers: Sequence[nn.Linear], x: Tensor) -> Tensor:
    gate, up = layers
    return functional.silu(gate(x)) * up(x)


@pytest.mark.parametrize("bias", [True, False])
def test_queries_keys_and_values(bias: bool) -> None:
    report = merged(attention, biases=[bias] * 3)
    assert "linear_1" not in report.after.code


def test_gate_and_up_stay_slices() -> None:
    report = merged(gate_up, widths=(7, 7))
    assert "contiguous" not in report.after.code


def test_one_weight_used_twice() -> None:
    report = merged(lambda layers, x: layers[0](x) * 2 - layers[0](x) * 3 + layers[1](x), widths=(4, 4))
    assert (report.before.code.count("linear("), report.after.code.count("linear(")) == (3, 1)


def test_half_precision() -> None:
    model = Layers((8, 8), gate_up).eval().bfloat16()
    assert rewrite(PASS, model, [torch.randn(2, 5, 8, dtype=torch.bfloat16)]).rewrites == 1


CONTIGUOUS: dict[str, Body] = {
    "returned": lambda layers, x: (layers[0](x), layers[1](x)),
    "a view is returned": lambda layers, x: (layers[0](x).transpose(0, 1), layers[1](x).view(2, -1)),
    "flattened": lambda layers, x: layers[0](x).view(2, -1) * layers[1](x).view(2, -1),
    "written to": lambda layers, x: layers[0](x).mul_(2.0) + layers[1](x).reshape(2, -1).add_(1.0).view(2, 5, 4),
    "strides are read": lambda layers, x: layers[0](x).as_strided((3, 4), (4, 1)) + layers[1](x).as_strided((4,), (1,)),
    "a reshape of a view": lambda layers, x: layers[0](x).view(2, 5, 2, 2).reshape(2, -1) * layers[1](x).reshape(2, 20),
}


@pytest.mark.parametrize("name", CONTIGUOUS)
def test_made_contiguous(name: str) -> None:
    report = merged(CONTIGUOUS[name], widths=(4, 4))
    assert report.after.code.count(".contiguous()") == 2


def test_fake_values_say_the_real_strides() -> None:
    def body(layers: Sequence[nn.Linear], x: Tensor) -> Tensor:
        return layers[0](x).view(2, 5, 2, 4).transpose(1, 2) @ layers[1](x).unsqueeze(1).transpose(2, 3)

    report = merged(body, widths=(8, 4))
    node = next(n for n in report.after.graph.nodes if n.op == "call_method" and n.target == "view")
    assert node.meta["example_value"].stride() == (60, 12, 4, 1)


def written_between(layers: Sequence[nn.Linear], x: Tensor) -> Tensor:
    x = x + 1
    first = layers[0](x)
    x.mul_(2.0)
    return first + layers[1](x)  # type: ignore[no-any-return]


def test_declines_an_input_that_changes() -> None:
    assert "written to between" in declines(PASS, Layers((4, 4), written_between).eval(), [torch.randn(2, 8)])


def test_a_weight_computed_between_the_layers_moves_up() -> None:
    """Shared by a later pair of another input too, which must leave it where it is."""

    def body(layers: Sequence[nn.Linear], x: Tensor) -> Tensor:
        first = layers[0](x)
        y = torch.tanh(first * 3)
        one = layers[0](y)
        weight = (layers[2].weight * 2).neg()
        return first * functional.linear(x, weight, layers[2].bias) + one * functional.linear(y, weight, layers[2].bias)

    report = rewrite(PASS, Layers((8, 8, 8), body).eval(), [torch.randn(2, 5, 8)])
    assert report.rewrites == 2, report.declines
    code = report.after.code
    assert code.index("neg") < code.index("linear(")


def test_a_pair_that_reads_a_merged_layer() -> None:
    def body(layers: Sequence[nn.Linear], x: Tensor) -> Tensor:
        one, two, three, four = layers
        y = one(x)
        return two(x) + three(y) * four(y)

    report = rewrite(PASS, Layers((8, 8, 8, 8), body).eval(), [torch.randn(2, 5, 8)])
    assert report.rewrites == 2, report.declines
    assert report.after.code.count("linear(") == 2


def computed_under_autocast(layers: Sequence[nn.Linear], x: Tensor) -> Tensor:
    first = layers[0](x)
    with torch.autocast("cpu", torch.bfloat16):
        weight = (layers[1].weight @ layers[2].weight).float()
    return first + functional.linear(x, weight, layers[1].bias)


def test_declines_a_weight_computed_under_autocast() -> None:
    assert "autocast" in declines(PASS, Layers((8, 8, 8), computed_under_autocast).eval(), [torch.randn(2, 8)])


def test_declines_a_bias_on_one_side_only() -> None:
    body: Body = lambda layers, x: layers[0](x) + layers[1](x)  # noqa: E731 - one expression
    assert "differ" in declines(PASS, Layers((4, 4), body, [True, False]).eval(), [torch.randn(2, 8)])


def test_declines_a_weight_made_from_data() -> None:
    body: Body = lambda layers, x: layers[0](x) + functional.linear(x, x[:4] * 2, layers[0].bias)  # noqa: E731
    assert "differ" in declines(PASS, Layers((4,), body).eval(), [torch.randn(4, 8)])


def test_leaves_layers_of_different_inputs() -> None:
    report = rewrite(PASS, Layers((4, 4), lambda ls, x: ls[0](x) + ls[1](x + 1)).eval(), [torch.randn(2, 8)])
    assert (report.rewrites, report.declines) == (0, [])


def test_declines_where_gradients_are_asked_for() -> None:
    assert "gradients are asked for" in declines(
        PASS, Layers((4, 4), gate_up).eval(), [torch.randn(2, 8)], training=True
    )


def test_llama() -> None:
    pytest.importorskip("transformers")
    from tests.models.mini import _llama

    model = _llama().eval()
    report = rewrite(PASS, model.model, [torch.randint(100, (2, 7))])
    assert report.rewrites == 2 * 2  # layers, each with attention and MLP
