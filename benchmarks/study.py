"""Measures what methods learn in an environment: `openclaw-rl rollout --measure` for each method and seed.

    python benchmarks/study.py [--methods rl,combine] [--seeds 3] [--at-once 1] [--out runs/study.jsonl]
        [--picture FILE] [-- FLAGS]

Each run has a server of its own and two threads. Flags after `--` are for `openclaw-rl rollout`, for example
`-- --minutes 6 --env-arg levels=[2]`; a further `--` in them begins the options of the server. Runs that are in the
file already are not repeated. The table at the end is for docs/results/environments.md.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean
from typing import Any

from common import MODEL, machine, sized, table

from openclaw_rl.dashboard.components import charts

FLAGS = (
    *("--own-server", "--parallel", sized("8", "2"), "--group", sized("8", "2"), "--tasks", sized("10000", "1")),
    *("--measure", sized("200", "2"), "--minutes", sized("6", "1"), "--max-tokens", sized("80", "8")),
)
THREADS = "2"
#: Points of a curve, of 64 episodes each, whose mean is drawn.
SMOOTHED_POINTS = 4
OUT = sized(Path("runs"), Path(tempfile.mkdtemp())) / "study.jsonl"

Run = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default=sized("rl,combine", "rl"))
    parser.add_argument("--seeds", type=int, default=sized(3, 1))
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--picture", type=Path, help="a PNG file with the curves of all runs")
    parser.add_argument("flags", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    done = {(run["method"], run["seed"]) for run in read(options.out)}
    wanted = [(method, seed) for method in options.methods.split(",") for seed in range(options.seeds)]
    with ThreadPoolExecutor(options.at_once) as pool:
        for method, seed in wanted:
            if (method, seed) not in done:
                pool.submit(run_one, method, seed, options.out, options.flags[1:])
    report(read(options.out))
    if options.picture:
        draw(read(options.out), options.picture)


def run_one(method: str, seed: int, out: Path, flags: Sequence[str]) -> None:
    """One run in a process of its own, which appends its line to the file."""
    model = ("--model-name", MODEL) if MODEL else ()
    # A run that was stopped has left a folder, which must not be continued.
    run_dir = out.with_name(f"{out.stem}-{method}-{seed}-{os.getpid()}")
    own = ("--method", method, "--seed", str(seed), "--json", str(out), "--run-dir", str(run_dir))
    command = [sys.executable, "-m", "openclaw_rl", "rollout", *FLAGS, *own, *model, *flags]
    subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": THREADS}, check=False)


def read(path: Path) -> list[Run]:
    """The runs that were measured to their end."""
    runs = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    return [run for run in runs if run.get("change")]


def report(runs: Sequence[Run]) -> None:
    rows = []
    for run in sorted(runs, key=lambda run: (run["method"], run["seed"])):
        change, training = run["change"], run["training"]
        rows.append(
            (
                run["method"],
                run["seed"],
                share(run["before"]["solved"]),
                share(run["after"]["solved"]),
                f"{100 * change['mean']:+.1f} ({100 * change['low']:+.1f} – {100 * change['high']:+.1f})",
                f"{change['p']:.2g}",
                sum(point["episodes"] for point in run["curve"][-1:]),
                run["after"]["policy_version"],
                f"{training['seconds'] / 60:.1f}",
            )
        )
    head = ("method", "seed", "before, %", "after, %", "change", "p", "episodes", "steps", "min")
    table(f"Held-out tasks solved, with 95 % intervals ({machine()})", head, rows)


def draw(runs: Sequence[Run], path: Path) -> None:
    """The solved share while training, a line for each run and a colour for each method."""
    figure = charts.new_figure(6.4, 3.6)
    axes = figure.subplots()
    charts.dress(axes, charts.plain(runs[0]["env"]), "training episodes", "tasks solved")
    axes.set_ylim(-0.02, 1.02)
    methods = sorted({run["method"] for run in runs})
    for run in sorted(runs, key=lambda run: (run["method"], run["seed"])):
        points = run["curve"]
        means = [mean([point["solved"] for point in points[: i + 1][-SMOOTHED_POINTS:]]) for i in range(len(points))]
        number = methods.index(run["method"])
        first = not any(line.get_label() == run["method"] for line in axes.lines)
        axes.plot(
            [point["episodes"] for point in points],
            means,
            color=charts.SERIES[number],
            label=run["method"] if first else "_",
        )
    charts.add_legend(figure, axes.get_legend_handles_labels()[0])
    charts.save_png(figure, path)


def share(solved: dict[str, float]) -> str:
    return f"{100 * solved['mean']:.1f} ({100 * solved['low']:.1f}–{100 * solved['high']:.1f})"


if __name__ == "__main__":
    main()
