"""How often a replacement is wrong: random graphs around attention, each compared with eager, outputs and gradients.

    python -m benchmarks.random_graphs --seeds 2000 --output benchmarks/results/MACHINE/random_graphs.jsonl
    python -m benchmarks.random_graphs --inductor --seeds 100

Without `--inductor` our attention pass rewrites the captured graph, unpriced, and both run as they are. With it, each
graph is compiled by `torch.compile` and by `fusewright.optimize` with first-call verification off, so that only the
proofs of the rewrites stand between a wrong pattern and the result; a wrong graph costs the exit code. Odd seeds are
inference. Results are judged by the accuracy rule of `fusewright.numerics` against float64.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from rich.progress import track
from torch import Tensor

import fusewright
from benchmarks.models.random_attention import Recipe, draw, inputs
from fusewright.bench.rows import append_rows, provenance
from fusewright.fusion.match.attention.fuse import FuseAttention
from fusewright.numerics import compare_trees
from fusewright.tools.pass_tester import PassTester

Outcome = Callable[[Recipe, int, bool], Counter[str]]


def results(call: Callable[..., Any], given: Iterable[Tensor], training: bool, *, wide: bool = False) -> dict[str, Any]:
    """Outputs of `call` and the gradients of q, k and v, by name; `wide`: in float64."""
    copies = [x.detach().double() if wide and x.is_floating_point() else x.detach().clone() for x in given]
    leaves = [x.requires_grad_(training) for x in copies[:3]]
    with torch.set_grad_enabled(training):
        outputs = call(*copies)
    found: dict[str, Any] = {"outputs": [x.detach() for x in outputs]}
    if training:
        generator = torch.Generator().manual_seed(1)
        cotangents = [torch.randn(x.shape, generator=generator).to(x) for x in outputs]
        found["gradients"] = torch.autograd.grad(outputs, leaves, cotangents, allow_unused=True)
    return found


def rewritten(recipe: Recipe, seed: int, training: bool) -> Counter[str]:
    """Our pass alone."""
    try:
        report = PassTester(FuseAttention()).check(
            recipe, inputs(recipe, seed), expect_rewrites=None, training=training
        )
    except AssertionError as error:
        print(f"seed {seed}: {str(error).splitlines()[0]}\n  {recipe}", file=sys.stderr)
        return Counter(wrong=1)
    return Counter(replaced=report.rewrites, **{f"declined: {d.reason}": 1 for d in report.declines[:1]})


def compiled(recipe: Recipe, seed: int, training: bool) -> Counter[str]:
    """The graph as Inductor lowers it, plainly and under ours."""
    given, counts = inputs(recipe, seed), Counter[str]()
    reference = results(recipe, given, training)

    def run(*args: Tensor) -> tuple[Tensor, ...]:
        return recipe(*args)

    def wide() -> dict[str, Any]:
        return results(recipe, given, training, wide=True)

    torch._dynamo.reset()
    ours = fusewright.optimize(run, verify="off", strict=True)
    for name, call in (("torch_wrong", torch.compile(run)), ("wrong", ours)):
        verdict = compare_trees(results(call, given, training), reference, wide, training=training)
        if not verdict.ok:
            counts[name] += 1
            print(f"seed {seed}: {name}: {verdict.reason}\n  {recipe}", file=sys.stderr)
    record = fusewright.explain(ours).to_dict()
    counts["replaced"] = record["rewrites"].get("fuse_attention", 0)
    counts["refused"] = sum(row["count"] for row in record["declines"] if row["pass"] == "inductor")
    return counts


def main() -> None:
    """Judge every seed; exit with 1 where one of ours is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=200, help="how many (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="the first one (default: %(default)s)")
    parser.add_argument("--inductor", action="store_true", help="compile each graph; takes seconds a graph")
    parser.add_argument("--output", type=pathlib.Path, help="JSON lines to append to")
    options = parser.parse_args()
    judge: Outcome = compiled if options.inductor else rewritten
    counts, start = Counter[str](), time.perf_counter()
    for seed in track(range(options.first, options.first + options.seeds), description="graphs"):
        counts += judge(draw(seed), seed, seed % 2 == 0)
    row: dict[str, Any] = {"kind": "inductor" if options.inductor else "rewritten", "seeds": options.seeds}
    row |= {"first": options.first, "wrong": counts["wrong"], "replaced": counts["replaced"]}
    row |= {"torch_wrong": counts["torch_wrong"], "refused": counts["refused"]} if options.inductor else {}
    row["seconds"] = round(time.perf_counter() - start, 1)
    reasons = Counter({key: count for key, count in counts.items() if key.startswith("declined")})
    for reason, count in reasons.most_common(12):
        print(f"{count:5d} {reason}", file=sys.stderr)
    print(json.dumps(row))
    if options.output is not None:
        append_rows(options.output, [row | provenance(torch.get_num_threads())])
    sys.exit(1 if counts["wrong"] else 0)


if __name__ == "__main__":
    main()
