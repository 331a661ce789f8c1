"""Arithmetic of docs/results/scale.md (`python benchmarks/scale.py`): steps on many GPUs, and what users ask for.

All of it is computed from numbers that were measured on one H200 for the shape of Qwen3-4B. Nothing here is measured.
"""

from common import argument_parser, machine, table

#: Parameters of the model, and of a LoRA adapter of rank 32 on all linear layers.
PARAMETERS, ADAPTER, LAYERS = 4.02e9, 66.1e6, 36
#: A step's fixed seconds, and tokens a second in it. Measured: 8 x 576 tokens in 0.259 s, 16 x 1,024 at 26.4k tokens/s.
FIXED_SECONDS, TRAINED_TOKENS = 0.118, 32_600.0
#: A decoding step: seconds, and seconds more for each sequence. Measured: 3.97, 4.73 and 7.21 ms for 1, 16 and 64.
DECODE_SECONDS, DECODE_SECONDS_EACH = 3.92e-3, 51.4e-6
PROMPT_TOKENS = 64_000.0  # a second; measured: 64 prompts of 512 tokens in 0.51 s
#: Assumed: GPUs in a machine, bytes a second that each sends inside it and between machines, delay of a call.
NODE, INSIDE, BETWEEN, DELAY = 8, 300e9, 40e9, 50e-6
BF16, FP32 = 2, 4
GPUS = (1, 2, 4, 8, 16, 32, 64)
#: A batch of 64 samples of 1,024 tokens, in micro-batches.
STEP_TOKENS, MICRO_BATCH = 64 * 1024, 4096
#: Assumed users: seconds between messages, tokens of a request and of its answer, share of turns with a signal.
THINK_SECONDS, REQUEST_TOKENS, ANSWER_TOKENS, SIGNALS = 30.0, 300, 200, 0.5
#: Sequences that a sampler computes at once, seconds for a judgement, tokens of a sample, seconds to publish a version.
PLACES, JUDGE_SECONDS, SAMPLE_TOKENS, PUBLISH_SECONDS = 64, 1.5, 1000, 1.0


def step_seconds(gpus: int, tokens: int, *, full: bool, sharded: bool) -> float:
    """A step of so many tokens. `full` trains all weights, `sharded` splits them over the GPUs (FSDP).

    Every GPU runs whole micro-batches, so a step has at least one on each: more GPUs than micro-batches do not help.
    """
    passes = max(1, -(-tokens // (MICRO_BATCH * gpus)))
    compute = passes * min(MICRO_BATCH, tokens) / TRAINED_TOKENS
    bandwidth = INSIDE if gpus <= NODE else BETWEEN
    share = (gpus - 1) / gpus
    # Gradients are summed in float32 for an adapter, and in bfloat16 for all weights.
    gradients = 2 * share * (PARAMETERS * BF16 if full else ADAPTER * FP32) / bandwidth
    # Sharded weights are gathered for the forward and the backward pass of each micro-batch, while others compute.
    weights = 2 * passes * share * PARAMETERS * BF16 / bandwidth if sharded else 0.0
    calls = (1 + 2 * passes * LAYERS * sharded) if gpus > 1 else 0
    return FIXED_SECONDS + compute + gradients + max(weights - compute, 0.0) + calls * DELAY


def memory_gib(gpus: int, *, full: bool, sharded: bool) -> float:
    """Weights, gradients and optimiser on each GPU; activations come on top."""
    split = gpus if sharded else 1
    trained = PARAMETERS / split if full else ADAPTER
    # Gradient, a float32 copy and two moments.
    return (PARAMETERS * BF16 / split + trained * (BF16 + 3 * FP32)) / 2**30


def step_rows(*, full: bool, sharded: bool) -> list[list[object]]:
    alone = step_seconds(1, STEP_TOKENS, full=full, sharded=False)
    rows: list[list[object]] = []
    for gpus in GPUS:
        strong = step_seconds(gpus, STEP_TOKENS, full=full, sharded=sharded)
        weak = step_seconds(gpus, STEP_TOKENS * gpus, full=full, sharded=sharded)
        efficiency = f"{100 * alone / (gpus * strong):.0f}%"
        held = f"{memory_gib(gpus, full=full, sharded=sharded):.1f}"
        rows.append([gpus, f"{strong:.2f}", efficiency, f"{100 * alone / weak:.0f}%", held])
    return rows


def user_row(users: int, batch: int) -> list[object]:
    """What so many users ask of each part, all parts keeping up."""
    in_sampler = REQUEST_TOKENS / PROMPT_TOKENS + ANSWER_TOKENS * (DECODE_SECONDS + PLACES * DECODE_SECONDS_EACH)
    turns = users / (THINK_SECONDS + in_sampler)
    samplers = turns * in_sampler / PLACES
    step = FIXED_SECONDS + batch * SAMPLE_TOKENS / TRAINED_TOKENS + PUBLISH_SECONDS
    versions = SIGNALS * turns / batch
    return [
        users,
        batch,
        f"{60 * turns:.0f}",
        f"{100 * samplers:.0f}%",
        f"{turns * JUDGE_SECONDS:.1f}",
        f"{100 * versions * step:.0f}%",
        f"{1 / versions:.0f}",
        f"{versions * (THINK_SECONDS + JUDGE_SECONDS + batch / (2 * SIGNALS * turns) + step):.1f}",
    ]


def main() -> None:
    print(machine())
    head = ["GPUs", "step s", "efficiency", "weak", "GiB without activations"]
    for title, full, sharded in (
        ("adapter of rank 32, weights on every GPU", False, False),
        ("adapter of rank 32, sharded weights", False, True),
        ("all weights, sharded", True, True),
    ):
        rows = step_rows(full=full, sharded=sharded)
        table(f"Qwen3-4B, {STEP_TOKENS} tokens a step: {title} (computed)", head, rows)
    head = ["users", "batch", "answers/min", "of one sampler", "judge's places", "of the learner", "s a version", "age"]
    rows = [user_row(users, batch) for users in (10, 100, 1000) for batch in (16, 128)]
    table("Users, samplers, judge and learner (computed)", head, rows)


if __name__ == "__main__":
    argument_parser(__doc__).parse_args()
    main()
