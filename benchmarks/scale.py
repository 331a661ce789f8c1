"""How far this scales: a model of step times on many GPUs, and a simulation of many users. All of it is computed."""

import argparse
from dataclasses import replace

from common import machine, sized, table
from fleet import Fleet, Place, simulate
from scale_model import QWEN3_4B, memory, step_time

GPUS = (1, 2, 4, 8, 16, 32, 64)
#: A batch of 64 samples of 1,024 tokens.
STEP_TOKENS = 64 * 1024


def steps(full: bool, sharded: bool) -> list[list[object]]:
    rows: list[list[object]] = []
    alone = step_time(QWEN3_4B, 1, STEP_TOKENS, full=full, sharded=False).seconds
    for gpus in GPUS:
        strong = step_time(QWEN3_4B, gpus, STEP_TOKENS, full=full, sharded=sharded)
        weak = step_time(QWEN3_4B, gpus, STEP_TOKENS * gpus, full=full, sharded=sharded)
        held = memory(QWEN3_4B, gpus, full=full, sharded=sharded)
        rows.append(
            [
                gpus,
                f"{strong.seconds:.2f}",
                f"{100 * alone / (gpus * strong.seconds):.0f}%",
                f"{strong.communication:.3f}",
                f"{weak.seconds:.2f}",
                f"{100 * alone / weak.seconds:.0f}%",
                f"{held:.1f}",
            ]
        )
    return rows


def model_tables() -> None:
    head = ["GPUs", "step s", "efficiency", "of it network s", "weak: step s", "efficiency", "GiB without activations"]
    for title, full, sharded in (
        ("adapter of rank 32, weights on every GPU", False, False),
        ("adapter of rank 32, sharded weights", False, True),
        ("all weights, sharded", True, True),
    ):
        table(f"Qwen3-4B, {STEP_TOKENS} tokens a step: {title} (computed)", head, steps(full, sharded))


def simulation_tables(minutes: float) -> None:
    head = ["users", "samplers", "answers/min", "wait s", "longest", "samples/min", "staleness", "most", "too old"]
    head += ["samplers", "judge", "learner", "saturates"]
    for title, changes in (
        ("judge: 8 turns at once, 1.5 s each; a step of 16 turns", {}),
        ("judge: 64 turns at once; a step of 16 turns", {"judges": 64}),
        ("judge: 64 turns at once; a step of 128 turns", {"judges": 64, "batch_size": 128}),
    ):
        rows: list[list[object]] = []
        for users in sized((10, 100, 1000), (10,)):
            for samplers in sized((1, 2, 4), (1, 2)):
                fleet = replace(Fleet(users=users, samplers=samplers, minutes=minutes), **changes)
                got = simulate(fleet)
                use = [f"{100 * share:.0f}%" for share in (got.sampler_use, got.judge_use, got.learner_use)]
                rows.append(
                    [
                        users,
                        samplers,
                        f"{got.answers_a_minute:.0f}",
                        f"{got.mean_wait:.2f}",
                        f"{got.longest_wait:.1f}",
                        f"{got.samples_a_minute:.0f}",
                        f"{got.mean_staleness:.1f}",
                        got.max_staleness,
                        got.places[Place.STALE],
                        *use,
                        got.bottleneck,
                    ]
                )
        table(f"Simulated, {minutes:g} minutes; {title}", head, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=sized(30.0, 1.0), help="simulated minutes")
    options = parser.parse_args()
    print(machine())
    model_tables()
    simulation_tables(options.minutes)


if __name__ == "__main__":
    main()
