"""An optimized module stays the module that it was: identity, state, hooks, copies, devices and modes."""

from __future__ import annotations

import copy
import gc
import io
import pathlib
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusewright
from fusewright.api import backend
from fusewright.errors import UserInputError
from tests.api.nets import WIDTH, Net, Tied, batch
from tests.runtime.dispatch_models import cheap

CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def pair(model: nn.Module, **options: Any) -> tuple[Any, nn.Module]:
    """The model, optimized, and an eager copy."""
    reference = copy.deepcopy(model)
    return cheap(model, **options), reference


def check_same(model: nn.Module, reference: nn.Module, *args: Tensor) -> None:
    """Compare the outputs of one call, and show that the optimized model's call was dispatched."""
    before = fusewright.explain(model).to_dict()
    torch.testing.assert_close(model(*args), reference(*args), **CLOSE)
    after = fusewright.explain(model).to_dict()
    assert after["calls"] == before["calls"] + 1
    assert after["dispatched"] > before["dispatched"]


def test_object_class_parameters_and_state_dict_keys_stay() -> None:
    model = Net()
    kind, parameters, keys = type(model), list(model.parameters()), list(model.state_dict())
    assert cheap(model) is model
    model(batch())
    assert type(model) is kind
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert list(model.state_dict()) == keys
    assert [name for name, _ in model.named_modules()] == ["", "first", "norm", "last"]


def test_to_train_eval_and_requires_grad_work_after_optimize() -> None:
    model, reference = pair(Net())
    check_same(model, reference, batch())
    for change in (
        lambda m: m.eval(),
        lambda m: m.double(),
        lambda m: m.to(torch.float32).train(),
        lambda m: m.requires_grad_(False),
        lambda m: m.first.requires_grad_(True),
    ):
        change(model)
        change(reference)
        check_same(model, reference, batch().to(model.first.weight.dtype))
    model(batch()).sum().backward()
    assert model.first.weight.grad is not None
    assert model.last.weight.grad is None


def test_float64_and_bfloat16_parameters_after_to() -> None:
    model, reference = pair(Net().eval())
    model.to(torch.bfloat16)
    reference.to(torch.bfloat16)
    torch.testing.assert_close(model(batch().bfloat16()), reference(batch().bfloat16()), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("where", ["", "first"])
@pytest.mark.parametrize("when", ["before", "after optimize", "after the first call"])
def test_hooks_run_wherever_and_whenever_they_are_added_and_stop_when_removed(where: str, when: str) -> None:
    model = Net().eval()
    reference = copy.deepcopy(model)

    def add(net: nn.Module) -> list[Any]:
        target = net.get_submodule(where)
        pre = target.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
        return [pre, target.register_forward_hook(lambda module, args, output: output + 1)]

    handles = add(reference)
    if when == "before":
        handles += add(model)
    cheap(model)
    if when == "after optimize":
        handles += add(model)
    if when == "after the first call":
        model(batch())
        handles += add(model)
    for seed in range(2):
        check_same(model, reference, batch(seed=seed))
    for handle in handles:
        handle.remove()
    check_same(model, reference, batch())


def test_backward_hooks_run() -> None:
    model, reference = pair(Net())
    seen: dict[nn.Module, list[float]] = {model: [], reference: []}
    for net in (model, reference):
        net.first.weight.register_hook(lambda grad, net=net: seen[net].append(float(grad.norm())))
        net(batch()).sum().backward()
    assert seen[model] == pytest.approx(seen[reference], rel=1e-4)


def test_a_deep_copy_is_optimized_apart_from_its_original() -> None:
    model, reference = pair(Net(), dims={"x": {0: "batch"}}, buckets={"batch": [8, 64]})
    model(batch())
    clone = copy.deepcopy(model)
    with torch.no_grad():
        clone.last.bias.add_(1)
    check_same(model, copy.deepcopy(reference).train(), batch())
    changed = copy.deepcopy(reference)
    with torch.no_grad():
        changed.last.bias.add_(1)
    check_same(clone, changed, batch())
    assert fusewright.explain(clone).to_dict()["calls"] == 1
    assert fusewright.explain(clone).to_dict()["buckets"][0]["range"] == "batch=2..8"
    assert fusewright.explain(clone).to_dict()["buckets"][0]["variant"] == "aot_eager"


def test_a_deep_copy_inside_another_module_is_optimized() -> None:
    model, reference = pair(Net().eval())
    outer = copy.deepcopy(nn.Sequential(model, nn.Identity()))
    check_same(outer[0], reference, batch())


def test_a_shallow_copy_says_that_it_is_not_optimized() -> None:
    model = cheap(Net())
    with pytest.raises(UserInputError, match="shallow copy"):
        fusewright.explain(copy.copy(model))


def test_pickle_gives_an_optimized_model_with_the_same_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEWRIGHT_VERIFY", "off")
    model = fusewright.optimize(Net().eval(), dims={"x": {0: "batch"}}, strict=True)
    again = pickle.loads(pickle.dumps(model))
    assert type(again) is Net
    handle, other = vars(model)["_fusewright"], vars(again)["_fusewright"]
    assert other.options == handle.options
    assert other.owner() is again
    assert again._compiled_call_impl is not None
    assert fusewright.explain(again).to_dict()["calls"] == 0
    assert pickle.loads(pickle.dumps(again)).state_dict().keys() == model.state_dict().keys()


def test_torch_save_and_load_of_the_whole_model() -> None:
    model = cheap(Net().eval())
    expected = model(batch())
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    with fusewright.disabled():
        torch.testing.assert_close(again(batch()), expected, **CLOSE)
    assert fusewright.explain(again).to_dict()["disabled_calls"] == 1


def test_a_checkpoint_written_by_one_loads_into_the_other(tmp_path: pathlib.Path) -> None:
    model, other = cheap(Net()), Net()
    model(batch()).sum().backward()
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    other.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))
    torch.testing.assert_close(other.eval()(batch()), model.eval()(batch()), **CLOSE)
    fresh = Net()
    expected = fresh.eval()(batch())
    for assign in (False, True):
        model.load_state_dict(copy.deepcopy(fresh.state_dict()), assign=assign)
        torch.testing.assert_close(model(batch()), expected, **CLOSE)


def test_shared_weights_stay_shared_and_get_one_gradient() -> None:
    model, reference = pair(Tied())
    ids = torch.arange(10).view(2, 5)
    check_same(model, reference, ids)
    for net in (model, reference):
        net(ids).logsumexp(-1).sum().backward()
    assert model.head.weight is model.embed.weight
    torch.testing.assert_close(model.embed.weight.grad, reference.embed.weight.grad, **CLOSE)
    clone = copy.deepcopy(model)
    assert clone.head.weight is clone.embed.weight


def test_weights_tied_after_the_first_call_are_seen() -> None:
    model = Tied()
    model.head.weight = nn.Parameter(model.embed.weight.detach().clone())
    model, reference = pair(model)
    ids = torch.arange(10).view(2, 5)
    check_same(model, reference, ids)
    for net in (model, reference):
        net.head.weight = net.embed.weight
        net.zero_grad()
        net(ids).logsumexp(-1).sum().backward()
    torch.testing.assert_close(model.embed.weight.grad, reference.embed.weight.grad, **CLOSE)


def test_a_submodule_replaced_after_the_first_call_is_used() -> None:
    model, reference = pair(Net().eval())
    check_same(model, reference, batch())
    torch.manual_seed(1)
    model.last = nn.Linear(WIDTH, 3)
    reference.last = copy.deepcopy(model.last)
    check_same(model, reference, batch())


def test_forward_called_directly_is_eager_and_not_counted() -> None:
    model, reference = pair(Net().eval())
    torch.testing.assert_close(model.forward(batch()), reference(batch()))
    assert fusewright.explain(model).to_dict()["calls"] == 0


def test_disabled_block_and_variable_run_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    model, reference = pair(Net().eval())
    with fusewright.disabled():
        torch.testing.assert_close(model(batch()), reference(batch()), rtol=0, atol=0)
    data = fusewright.explain(model).to_dict()
    assert (data["calls"], data["disabled_calls"], data["graphs"]) == (0, 1, 0)
    monkeypatch.setenv("FUSEWRIGHT_DISABLE", "1")
    plain = Net()
    assert fusewright.optimize(plain)._compiled_call_impl is None


def test_a_function_is_optimized_and_keeps_its_name_and_arguments() -> None:
    def scale(x: Tensor, *, by: float = 2.0) -> Tensor:
        """Scales."""
        return x * by

    fast = cheap(scale, dims={"x": {0: "rows"}}, buckets={"rows": [4, 16]})
    assert (fast.__name__, fast.__doc__) == ("scale", "Scales.")
    for rows in (3, 9, 12):
        torch.testing.assert_close(fast(batch(rows), by=3.0), batch(rows) * 3)
    data = fusewright.explain(fast).to_dict()
    assert data["dispatched"] == data["calls"] == 3
    assert [b["range"] for b in data["buckets"]] == ["rows=2..4", "rows=5..16"]


def test_optimizing_twice_replaces_the_options() -> None:
    model, reference = pair(Net().eval())
    cheap(model, dims={"x": {0: "batch"}})
    check_same(model, reference, batch())
    assert fusewright.explain(model).to_dict()["buckets"][0]["range"].startswith("batch>=2")


def test_optimized_submodules_become_part_of_an_optimized_model() -> None:
    model, reference = pair(nn.Sequential(Net(), nn.Linear(3, 3)).eval())
    cheap(model[0])
    check_same(model, reference, batch())
    data = fusewright.explain(model).to_dict()
    assert (data["graphs"], data["dispatched"], data["fallbacks"]) == (1, 1, [])


def test_functional_call_with_other_parameters() -> None:
    model, reference = pair(Net().eval())
    others = {name: value.detach() * 2 for name, value in model.named_parameters()}
    found, expected = (torch.func.functional_call(net, others, (batch(),)) for net in (model, reference))
    torch.testing.assert_close(found, expected, **CLOSE)
    check_same(model, reference, batch())


def test_an_optimized_model_and_its_weights_can_be_collected() -> None:
    model = cheap(Net().eval())
    model(batch())
    alive, weight = weakref.ref(model), weakref.ref(model.first.weight)
    del model
    gc.collect()
    assert alive() is None
    assert weight() is None


def test_plain_torch_compile_takes_the_backend() -> None:
    """By name it needs an installed package (tests/test_packaging.py)."""
    with torch.no_grad():
        function = torch.compile(lambda x: x * 2 + 1, backend=backend)
        torch.testing.assert_close(function(torch.ones(3)), torch.full((3,), 3.0))
