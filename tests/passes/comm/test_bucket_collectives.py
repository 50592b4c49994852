"""What the bucketing pass merges, what it leaves alone and says so, and that no bit changes."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fusewright.config import Numerics
from fusewright.errors import UserInputError
from fusewright.passes.base import PassContext, tensor_of
from fusewright.passes.comm.bucket_collectives import BucketCollectives, BucketCollectivesAnyOrder
from fusewright.passes.comm.collectives import ALL_GATHER, REDUCE_SCATTER, WAIT
from fusewright.passes.comm.dependencies import StorageClasses
from tests.passes.comm.lockstep import calls, run_lockstep, same_bits

f = torch.ops._c10d_functional
Traced = Callable[..., Any]


def gather(x: torch.Tensor, ranks: int = 2, group: str = "dp") -> torch.Tensor:
    return f.wait_tensor(f.all_gather_into_tensor(x, ranks, group))


def reduce(x: torch.Tensor, ranks: int = 2, group: str = "dp", op: str = "sum") -> torch.Tensor:
    return f.wait_tensor(f.reduce_scatter_tensor(x, op, ranks, group))


def trace(
    fn: Traced, *shapes: Sequence[int], symbolic: bool = False, dtype: torch.dtype = torch.float32
) -> fx.GraphModule:
    mode = "symbolic" if symbolic else "fake"
    return make_fx(fn, tracing_mode=mode)(*(torch.empty(s, dtype=dtype) for s in shapes))


def inputs_like(gm: fx.GraphModule, ranks: int) -> list[list[torch.Tensor]]:
    made = []
    for rank in range(ranks):
        rng = torch.Generator().manual_seed(100 + rank)
        fakes = [tensor_of(n) for n in gm.graph.nodes if n.op == "placeholder"]
        made.append([torch.randn(list(t.shape), generator=rng).to(t.dtype) for t in fakes if t is not None])
    return made


def bucketed(gm: fx.GraphModule, ranks: int = 2, cap_bytes: int = 1 << 20) -> tuple[int, PassContext]:
    """Run the pass; check that bits stay, that the graph is legal, and that a second run finds nothing."""
    given = inputs_like(gm, ranks)
    before = run_lockstep(gm, given)
    ctx = PassContext()
    bucketing = (BucketCollectives if ranks == 2 else BucketCollectivesAnyOrder)(cap_bytes)
    made = bucketing.run(gm, ctx)
    gm.graph.lint()
    assert same_bits(before, run_lockstep(gm, given)), gm.code
    text = gm.code
    assert bucketing.run(gm, PassContext()) == 0
    assert gm.code == text
    return made, ctx


@pytest.mark.parametrize("ranks", [2, 3])
def test_gathers_of_uneven_sizes_become_one(ranks: int) -> None:
    def fn(a, b, c):
        return gather(a, ranks) * 2, gather(b.t().contiguous(), ranks), gather(c, ranks)

    gm = trace(fn, (3, 5), (4, 1), (0, 2))
    strides = [run_lockstep(gm, inputs_like(gm, ranks))[0][i].stride() for i in range(3)]
    assert bucketed(gm, ranks)[0] == 1
    assert (calls(gm, ALL_GATHER), calls(gm, WAIT)) == (1, 1)
    assert [t.stride() for t in run_lockstep(gm, inputs_like(gm, ranks))[0]] == strides


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_reductions_of_uneven_sizes_become_one(ranks: int, dtype: torch.dtype) -> None:
    def fn(a, b, c):
        return reduce(a + a, ranks), reduce(b, ranks) + 1, reduce(c.t(), ranks)

    gm = trace(fn, (ranks * 2, 5), (ranks,), (3, ranks * 4), dtype=dtype)
    assert bucketed(gm, ranks)[0] == 1
    assert (calls(gm, REDUCE_SCATTER), calls(gm, WAIT)) == (1, 1)


def test_results_own_their_memory() -> None:
    gm = trace(lambda a, b: (reduce(a), reduce(b)), (4, 3), (6,))
    bucketed(gm)
    first, second = run_lockstep(gm, inputs_like(gm, 2))[0]
    assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()
    assert (first.storage_offset(), second.storage_offset()) == (0, 0)


def test_layers_gather_early_and_reduce_late() -> None:
    """Compute between members stays where it is; casts of parameters move up, uses of reduced gradients down."""

    def fn(x, w, v):
        h = x @ gather(w.to(torch.bfloat16)).float()
        y = h @ gather(v.to(torch.bfloat16)).float()
        g = reduce(y) * 3
        return y, g, reduce(h @ h.t()) - 1

    gm = trace(fn, (4, 8), (4, 8), (4, 8))
    assert bucketed(gm)[0] == 2
    order = [n.target for n in gm.graph.nodes if n.target in (ALL_GATHER, REDUCE_SCATTER, torch.ops.aten.mm.default)]
    mm = torch.ops.aten.mm.default
    assert order == [ALL_GATHER, mm, mm, mm, REDUCE_SCATTER]


def test_cap_closes_a_bucket() -> None:
    gm = trace(lambda *ws: [gather(w) for w in ws], *[(4, 4)] * 5)
    made, ctx = bucketed(gm, cap_bytes=2 * 128)  # a gathered [8, 4] of float32 has 128 bytes
    assert (made, calls(gm, ALL_GATHER), ctx.declines) == (2, 3, [])


@pytest.mark.parametrize(
    "fn",
    [
        lambda a, b: (gather(a, group="dp"), gather(b, group="tp")),
        lambda a, b: (gather(a), gather(b.to(torch.bfloat16))),
        lambda a, b: (reduce(a), reduce(b, op="max")),
        lambda a, b: (gather(a), reduce(b)),
        lambda a, b: (f.wait_tensor(f.all_reduce(a, "sum", "dp")), f.wait_tensor(f.all_reduce(b, "sum", "dp"))),
    ],
    ids=["group", "dtype", "reduce_op", "kind", "all_reduce"],
)
def test_different_collectives_stay_apart(fn: Traced) -> None:
    gm = trace(fn, (4, 4), (4, 4))
    text = gm.code
    ctx = PassContext()
    assert BucketCollectives().run(gm, ctx) == 0
    assert (gm.code, ctx.declines) == (text, [])


def unwaited(a, b):
    started = f.all_gather_into_tensor(a, 2, "dp")
    return f.wait_tensor(started), gather(b), started.view(-1)


def dependent_gathers(a, b):
    whole = gather(a)
    return whole, gather(whole + 1), b


def dependent_reductions(a, b):
    part = reduce(a)
    return part, reduce(part * 2), b


def gather_needs_matmul(a, b):
    return gather(a), gather(a @ b)


def matmul_needs_reduction(a, b):
    part = reduce(a)
    return part @ b, reduce(b)


def written_before_gather(a, b):
    whole = gather(a)
    b.mul_(2)
    return whole, gather(b.view(-1))


def written_through_another_view(a, b):
    whole, flat = gather(a), b.view(-1)
    b.mul_(2)
    return whole, gather(flat)


def written_after_reduction(a, b):
    part = reduce(a)
    a.mul_(2)
    return part, reduce(b)


def written_while_followers_read(a, b):
    part = reduce(a)
    mixed = part + b[:2]
    b.mul_(2)
    return mixed, reduce(a)


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (unwaited, "uses it before a wait"),
        (dependent_gathers, "a member of the same bucket"),
        (dependent_reductions, "a result of the bucket of"),
        (gather_needs_matmul, "its input depends on mm"),
        (matmul_needs_reduction, "mm depends on wait_tensor"),
        (written_before_gather, "its input is written by mul_"),
        (written_through_another_view, "its input is written by mul_"),
        (written_after_reduction, "mul_ writes what the bucket of reduce_scatter_tensor still reads"),
        (written_while_followers_read, "mul_ writes what the bucket"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_declines_with_reason(fn: Traced, reason: str) -> None:
    gm = trace(fn, (4, 4), (4, 4))
    text = gm.code
    ctx = PassContext()
    assert BucketCollectives().run(gm, ctx) == 0
    assert gm.code == text
    assert [d.reason for d in ctx.declines if reason in d.reason], ctx.declines


def test_symbolic_sizes_are_declined() -> None:
    gm = trace(lambda a, b: (gather(a), gather(b)), (4, 4), (5, 4), symbolic=True)
    ctx = PassContext()
    assert BucketCollectives().run(gm, ctx) == 0
    assert [d.reason for d in ctx.declines] == ["a size is symbolic"] * 2


@pytest.mark.parametrize(
    ("dtype", "op", "made"), [(torch.float32, "sum", 0), (torch.int64, "sum", 1), (torch.float32, "max", 1)]
)
def test_sums_of_three_ranks_are_left_to_the_pass_that_may_reorder(dtype: torch.dtype, op: str, made: int) -> None:
    gm = trace(lambda a, b: (reduce(a, 3, op=op), reduce(b, 3, op=op)), (3, 2), (6,), dtype=dtype)
    ctx = PassContext()
    assert BucketCollectives().run(gm, ctx) == made
    assert len(ctx.declines) == (0 if made else 2)
    assert BucketCollectivesAnyOrder().run(gm, PassContext()) == 1 - made
    assert BucketCollectivesAnyOrder.numerics is Numerics.REASSOCIATED


@pytest.mark.parametrize("kind", [gather, reduce])
@pytest.mark.parametrize("barrier", ["p2p", "in_place", "assertion", "unknown_function"])
def test_nothing_is_merged_across_a_barrier(kind: Traced, barrier: str) -> None:
    gm = trace(lambda a, b: (kind(a), kind(b)), (4, 4), (4, 4))
    first_wait = next(n for n in gm.graph.nodes if n.target is WAIT)
    a = next(iter(gm.graph.nodes))
    with gm.graph.inserting_after(first_wait):
        if barrier == "p2p":
            gm.graph.call_function(torch.ops.c10d.send.default, ([a], None, 1, 0))
        elif barrier == "in_place":
            gm.graph.call_function(f.all_reduce_.default, (a, "sum", "dp"))
        elif barrier == "assertion":
            gm.graph.call_function(torch.ops.aten._assert_async.msg, (a, "no"))
        else:
            gm.graph.call_function(print, (a,))
    ctx = PassContext()
    assert BucketCollectives().run(gm, ctx) == 0
    assert ["whose effects are unknown" in d.reason for d in ctx.declines] == [True]


def test_a_wait_shares_memory_with_what_it_waits_for() -> None:
    gm = trace(lambda a: gather(a), (4, 4))
    _, start, wait, _ = gm.graph.nodes
    storage = StorageClasses(gm.graph)
    assert storage[start] == storage[wait]
    assert storage[start] != storage[next(iter(gm.graph.nodes))]


def test_a_write_elsewhere_is_no_obstacle() -> None:
    def fn(a, b, buffer):
        whole, part = gather(a), reduce(a)
        buffer.mul_(2)
        return whole, part, gather(b), reduce(b), buffer

    assert bucketed(trace(fn, (4, 4), (4, 4), (2,)))[0] == 2


def random_program(seed: int, ranks: int) -> Traced:
    """A function that mixes gathers, reductions, light and heavy operators, draws and writes at random."""

    def fn(*given: torch.Tensor) -> list[torch.Tensor]:
        rng = random.Random(seed)
        pool = list(given)
        for _ in range(rng.randint(8, 30)):
            x, y = rng.choice(pool), rng.choice(pool)
            what = rng.choice(["gather", "gather", "reduce", "reduce", "light", "light", "mm", "write", "view", "draw"])
            if what == "gather" and x.shape[0] <= 4 * ranks:
                pool.append(gather(x, ranks, rng.choice(["dp", "tp"])))
            elif what == "reduce" and x.shape[0] % ranks == 0 and x.shape[0]:
                pool.append(reduce(x, ranks, rng.choice(["dp", "dp", "tp"])))
            elif what == "light":
                pool.append(x * 0.5 + y[:1].sum())
            elif what == "mm":
                pool.append(torch.tanh(x @ x.t()) @ x)
            elif what == "write":
                x.mul_(0.5)
            elif what == "view":
                pool.append(x.view(x.shape)[1:] if x.shape[0] > 1 else x.view(x.shape))
            elif what == "draw":
                pool.append(x + torch.rand([3]))
        return pool

    return fn


@pytest.mark.parametrize("seed", range(60))
def test_random_programs_keep_their_bits(seed: int) -> None:
    ranks = 2 + seed % 2
    gm = trace(random_program(seed, ranks), (ranks * 2, 3), (ranks, 3), (1, 3), (ranks * 3, 3))
    before = calls(gm, ALL_GATHER) + calls(gm, REDUCE_SCATTER)
    made, _ = bucketed(gm, ranks, cap_bytes=[1 << 20, 300][seed % 4 == 0])
    fewer = before - calls(gm, ALL_GATHER) - calls(gm, REDUCE_SCATTER)
    assert fewer >= made
    assert (fewer > 0) == (made > 0)


def test_random_programs_do_get_buckets() -> None:
    made = 0
    for seed in range(20):
        gm = trace(random_program(seed, 2), (4, 3), (2, 3), (1, 3), (6, 3))
        made += BucketCollectives().run(gm, PassContext())
    assert made >= 10


def synthetic(nodes: int) -> fx.GraphModule:
    """A chain of layers, ten nodes each: gather a cast weight, use it, reduce what comes out."""
    graph = fx.Graph()
    mode = FakeTensorMode()
    with mode:
        w_val, x_val, half_val = torch.empty(2, 4), torch.empty(4, 4), torch.empty(2, 4, dtype=torch.bfloat16)
        whole_val = torch.empty(4, 4, dtype=torch.bfloat16)

    def emit(target: Any, args: tuple[Any, ...], val: torch.Tensor) -> fx.Node:
        node = graph.call_function(target, args)
        with mode:
            node.meta["val"] = torch.empty_like(val)
        return node

    aten = torch.ops.aten
    x, w = graph.placeholder("x"), graph.placeholder("w")
    x.meta["val"], w.meta["val"] = x_val, w_val
    parts = []
    while len(graph.nodes) < nodes:
        half = emit(aten.to.dtype, (w, torch.bfloat16), half_val)
        whole = emit(WAIT, (emit(ALL_GATHER, (half, 2, "dp"), whole_val),), whole_val)
        x = emit(aten.mm.default, (x, emit(aten.to.dtype, (whole, torch.float32), x_val)), x_val)
        x = emit(aten.relu.default, (x,), x_val)
        part = emit(WAIT, (emit(REDUCE_SCATTER, (x, "sum", 2, "dp"), w_val),), w_val)
        parts.append(emit(aten.mul.Tensor, (part, 0.5), w_val))
    graph.output((x, *parts))
    return fx.GraphModule(torch.nn.Module(), graph)


def seconds_for(nodes: int) -> float:
    """Processor time of the pass on a graph of `nodes`: other processes may share the cores."""
    gm = synthetic(nodes)
    start = time.process_time()
    made = BucketCollectives(cap_bytes=2048).run(gm, PassContext())
    elapsed_s = time.process_time() - start
    assert made > nodes / 250
    return elapsed_s


def test_time_grows_with_the_graph_and_not_with_its_square() -> None:
    small = min(seconds_for(1_000) for _ in range(2))
    large = seconds_for(5_000)
    assert large < 5 * small * 2.5, f"{small:.2f} s for 1,000 nodes, {large:.2f} s for 5,000"


def test_decisions_depend_on_the_graph_alone() -> None:
    codes = []
    for _ in range(2):
        gm = trace(random_program(3, 2), (4, 3), (2, 3), (1, 3), (6, 3))
        BucketCollectives().run(gm, PassContext())
        codes.append(gm.code)
    assert codes[0] == codes[1]


def test_options_are_checked_and_part_of_the_digest() -> None:
    with pytest.raises(UserInputError, match="cap_bytes=0"):
        BucketCollectives(cap_bytes=0)
    assert BucketCollectives(1).digest() != BucketCollectives(2).digest()
