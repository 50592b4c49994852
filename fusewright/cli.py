"""The `fusewright` command: reads arguments, calls the part that does the work, draws progress and tables."""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from fusewright.errors import FusewrightError, UserInputError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Speeds up PyTorch training and inference steps; never silently wrong, never silently eager.",
)
INTERRUPTED = 130  # 128 + SIGINT, as shells have it
out = Console()
err = Console(stderr=True)

Job = Annotated[str, typer.Argument(help="Job file (.py with WORKLOADS) or module, e.g. examples/jobs/llama_eager.py")]
Only = Annotated[str, typer.Option(help="Comma-separated workload names")]
Modes = Annotated[str, typer.Option("--mode", help="inference, training, or both as 'inference,training'")]
Lengths = Annotated[str, typer.Option(help="Comma-separated lengths; default all of the workload's")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables")]


def _names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _lengths(text: str) -> list[int]:
    if strange := [part for part in _names(text) if not part.isdecimal()]:
        raise UserInputError(f"--length: {', '.join(strange)} is no number; give lengths such as 128,256.")
    return [int(part) for part in _names(text)]


@app.command(epilog="Example: fusewright explain examples/jobs/llama_eager.py --length 256 --mode training")
def explain(
    job: Job,
    only: Only = "",
    mode: Modes = "inference,training",
    length: Lengths = "",
    as_json: AsJson = False,
    strict: Annotated[bool, typer.Option(help="Stop with an error at the first fallback")] = False,
) -> None:
    """Run each workload once and say what was captured, rewritten, declined, verified, and what fell back."""
    from fusewright.report.inspect import explain_job

    for told in explain_job(job, _names(only), _names(mode), _lengths(length), strict=strict):
        if as_json:
            out.print_json(json.dumps(told.to_dict()))
        else:
            out.rule(told.title, align="left")
            out.print(told.explanation)


@app.command(epilog="Example: fusewright check examples/jobs/world_policy.py --mode training --length 64")
def check(
    job: Job, only: Only = "", mode: Modes = "inference,training", length: Lengths = "", as_json: AsJson = False
) -> None:
    """Compare optimized results with eager and float64 on your batch: outputs, gradients, buffers, parameters.

    Names the first layer that differs and the pass behind it. Exits with 1 where anything disagrees.
    """
    from fusewright.report.inspect import check_job

    bad = 0
    for found in check_job(job, _names(only), _names(mode), _lengths(length)):
        bad += not found.ok
        if as_json:
            print(json.dumps(found.to_dict()), flush=True)
        else:
            out.print(found)
    raise typer.Exit(1 if bad else 0)


@app.command(
    epilog="Examples: fusewright bench --only mlp,bert --mode inference | fusewright bench examples/jobs/resnet50.py | "
    "fusewright bench --compare old.jsonl new.jsonl"
)
def bench(
    job: Annotated[str, typer.Argument(help="Job file or module; default: the suite in a checkout")] = "",
    only: Only = "",
    mode: Modes = "inference,training",
    length: Lengths = "",
    budget: Annotated[
        float, typer.Option(min=1, help="Seconds for each cell's timing, start of its processes included")
    ] = 120.0,
    pairs: Annotated[int, typer.Option(min=3, help="Most fresh pairs of processes for each cell; 3 decide")] = 4,
    providers: Annotated[
        str, typer.Option(help="Who runs beside torch.compile, whose default always runs: see docs/index.md")
    ] = "eager,compile_best,onnxruntime,openvino,fusewright",
    output: Annotated[
        pathlib.Path | None, typer.Option("-o", "--output", help="JSON-lines file to append rows to")
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            help="Leave out cells that the output file holds; the suite's goes to benchmarks/results/MACHINE if unnamed"
        ),
    ] = False,
    compare: Annotated[
        tuple[pathlib.Path, pathlib.Path] | None,
        typer.Option(help="Measure nothing: say what changed from one result file to another"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure torch.compile, its rivals and fusewright, interleaved in own processes, with intervals and verdicts."""
    if compare is not None:
        _compare(*compare, as_json=as_json)
        return
    from fusewright.report.bench import run_bench

    rows = run_bench(
        job,
        only=_names(only),
        modes=_names(mode),
        lengths=_lengths(length),
        budget_s=budget,
        most_pairs=pairs,
        providers=_names(providers),
        output=output,
        resume=resume,
        console=err,
    )
    if as_json:
        for row in rows:
            print(json.dumps(row))
        return
    from fusewright.report.bench import table

    out.print(table(rows))


def _compare(before: pathlib.Path, after: pathlib.Path, *, as_json: bool) -> None:
    from fusewright.report.compare import compare_files

    found, cautions, drawn = compare_files(before, after)
    if not as_json:
        out.print(drawn)
        return
    for caution in cautions:
        err.print(caution)
    for change in found:
        print(json.dumps(change.to_dict()))


@app.command(
    epilog="Example: fusewright tune examples/jobs/llama_eager.py --only llama_eager --mode inference --length 256"
)
def tune(
    job: Job,
    only: Only = "",
    mode: Modes = "inference,training",
    length: Lengths = "",
    effort: Annotated[str, typer.Option(help="quick or full")] = "quick",
    store: Annotated[str, typer.Option(help="Store; default FUSEWRIGHT_STORE, else a file in the cache folder")] = "",
) -> None:
    """Measure variants per bucket, keep the fastest that is proven correct; Ctrl-C loses nothing, a rerun resumes."""
    from fusewright.report.tuning import run_tune

    run_tune(job, _names(only), _names(mode), _lengths(length), effort, store, console=out, progress=err)


store_app = typer.Typer(no_args_is_help=True, help="Look into the tuning store.")
app.add_typer(store_app, name="store")
StorePath = Annotated[str, typer.Option("--store", help="Store; default FUSEWRIGHT_STORE, else the cache folder's")]


@store_app.command("ls", epilog="Example: fusewright store ls")
def store_ls(store: StorePath = "", as_json: AsJson = False) -> None:
    """List decisions: key, bucket, winner, gain."""
    from fusewright.report.tuning import list_decisions

    list_decisions(store, out, as_json=as_json)


@store_app.command("why", epilog="Example: fusewright store why 3f2a9c")
def store_why(
    key: Annotated[str, typer.Argument(help="Key, or its first characters")],
    store: StorePath = "",
    as_json: AsJson = False,
) -> None:
    """Say why a variant won: every measurement of the key, losers and failures too."""
    from fusewright.report.tuning import explain_decision

    explain_decision(store, key, out, as_json=as_json)


@store_app.command("export", epilog="Example: fusewright store export winners.jsonl")
def store_export(
    path: Annotated[pathlib.Path, typer.Argument(help="JSON-lines file to write")], store: StorePath = ""
) -> None:
    """Write every row as JSON lines, for git or another machine."""
    from fusewright.report.tuning import open_store

    out.print(f"{open_store(store).export_jsonl(path)} rows written to {path}")


Reproducer = Annotated[str, typer.Argument(help="Folder that a `verification` fallback names in explain")]


AGREES = "agrees with eager here (frozen weights, passes of your own and CUDA graphs are not replayed)"


@app.command("bisect", epilog="Example: fusewright bisect ~/.cache/fusewright/reproducers/3f2a9c")
def bisect_reproducer(folder: Reproducer) -> None:
    """Name the pass and the rewrite after which a saved graph disagrees with eager; exits with 1 where one does."""
    from fusewright.report.faults import find_culprit, folder_of

    found = find_culprit(folder_of(folder), err)
    out.print(AGREES if found is None else str(found), markup=False)
    raise typer.Exit(0 if found is None else 1)


@app.command("minify", epilog="Example: fusewright minify ~/.cache/fusewright/reproducers/3f2a9c -o small")
def minify_reproducer(
    folder: Reproducer,
    output: Annotated[
        pathlib.Path | None, typer.Option("-o", "--output", help="Where to write; default: `minified` in the folder")
    ] = None,
) -> None:
    """Shrink a saved graph to a few nodes that still disagree with eager, as a reproducer; Ctrl-C keeps the best."""
    from fusewright.report.faults import folder_of, shrink

    whole = folder_of(folder)
    written, before, after = shrink(whole, output or whole / "minified", err)
    out.print(f"{before} nodes became {after}: python {written / 'run.py'}", markup=False, soft_wrap=True)


@app.command("add-pass", epilog="Example: fusewright add-pass fold_scale --group cleanup")
def add_pass(
    name: Annotated[str, typer.Argument(help="snake_case name of the new pass")],
    group: Annotated[str, typer.Option(help="Folder under passes/")] = "cleanup",
) -> None:
    """Scaffold a pass in a checkout: file, failing test, line in the order, row in the docs."""
    from fusewright.tools import scaffold

    for path in scaffold.add_pass(name, group, pathlib.Path.cwd()):
        out.print(f"wrote {path}")


def main(argv: list[str] | None = None) -> Any:
    """Run the command; errors that the user can mend are one line on stderr and exit code 2."""
    try:
        return app(argv)
    except FusewrightError as error:
        err.print(Text.assemble(("error: ", "bold red"), str(error)))
        sys.exit(2)
    except SystemExit as stop:
        if stop.code == INTERRUPTED:  # the parser turns Ctrl-C into this code and says nothing
            err.print("interrupted; everything that was finished is kept")
        raise
