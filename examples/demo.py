"""Optimizes three real models, inference and a training step each, and shows speed-ups against torch.compile.

python examples/demo.py                 # language, convolution, multimodal; about ten minutes on two cores
python examples/demo.py --quick         # one cell a model, shorter timing
"""

import argparse
import pathlib
import sys

from rich.console import Console

from fusewright.report.bench import run_bench, table

JOBS = pathlib.Path(__file__).parent / "jobs"
CELLS = (  # job file, length: a middle one, where neither call overhead nor memory decides alone
    ("llama_eager.py", 1024),
    ("resnet50.py", 4),
    ("world_policy.py", 256),
)

BUDGET_S = 300.0  # a bound, not a plan: three fresh pairs of processes, the fewest that decide, take about one minute


def main() -> None:
    """Measure the cells one after the other and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="inference only")
    parser.add_argument("-o", "--output", type=pathlib.Path, help="append the rows to this JSON-lines file")
    options = parser.parse_args()
    modes = ["inference"] if options.quick else ["inference", "training"]
    console, progress = Console(), Console(stderr=True)
    progress.print(
        "Three models, compiled twice each (torch.compile and fusewright), then timed in turns in own processes."
    )
    rows = []
    for job, length in CELLS:
        rows += run_bench(
            str(JOBS / job),
            only=[],
            modes=modes,
            lengths=[length],
            budget_s=BUDGET_S,
            most_pairs=3,
            output=options.output,
            resume=False,
            console=progress,
            providers=("eager", "fusewright"),
        )
    console.print(table(rows))
    wrong = [row["cell"] for row in rows if row["provider"] == "fusewright" and row["accuracy"] is not True]
    if wrong:
        console.print(f"not accurate: {', '.join(wrong)}")
        sys.exit(1)


if __name__ == "__main__":
    main()
