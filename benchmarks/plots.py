"""Draws a figure from committed results.

python -m benchmarks.plots benchmarks/results/amd-epyc-2cores/pipeline.jsonl -o docs/pipeline.svg
"""

from __future__ import annotations

import argparse
import math
import pathlib

import matplotlib.pyplot as plt

from fusewright.bench.rows import Row, read_rows


def draw_pipeline(rows: list[Row], output: pathlib.Path) -> None:
    """CPU time of the pipeline over the nodes of the graph: a line a kind, beside n log n from its first point."""
    plt.rcParams["svg.hashsalt"] = "fusewright"  # the same picture gives the same file
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for kind in dict.fromkeys(row["kind"] for row in rows):
        mine = sorted((row["nodes"], row["cpu_seconds"]) for row in rows if row["kind"] == kind)
        nodes, seconds = zip(*mine, strict=True)
        (line,) = axes.plot(nodes, seconds, "o-", label=f"{kind} blocks, measured")
        unit = seconds[0] / (nodes[0] * math.log(nodes[0]))
        axes.plot(nodes, [unit * n * math.log(n) for n in nodes], "--", color=line.get_color(), label="n log n")
    axes.set(xscale="log", yscale="log", xlabel="nodes", ylabel="CPU seconds", title="forward passes, spec checks on")
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend()
    figure.savefig(output, metadata={"Date": None})


def main() -> None:
    """Draw the figure of a result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=pathlib.Path, help="rows of benchmarks.pipeline_scaling")
    parser.add_argument("-o", "--output", type=pathlib.Path, required=True, help="SVG or PNG file")
    options = parser.parse_args()
    if not options.results.is_file():
        parser.error(f"{options.results} is not there")
    rows = [row for row in read_rows(options.results) if "nodes" in row]
    if not rows:
        parser.error(f"{options.results} holds no rows of benchmarks.pipeline_scaling")
    try:
        draw_pipeline(rows, options.output)
    except (ValueError, OSError) as error:
        parser.error(f"{options.output}: {error}")
    print(options.output)


if __name__ == "__main__":
    main()
