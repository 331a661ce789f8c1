"""Measures what FSDP2 costs the learner: one rank with and without sharded weights, on random weights of a real shape.

    python benchmarks/ranks.py                                     a few layers on the CPU, float32
    python benchmarks/ranks.py --device cuda --shape Qwen3-4B      bf16

A step is one pass over a batch and the update, for an adapter and for all weights. Where memory is free, sharded
weights are gathered once and stay whole during the pass; where it is short, each layer is gathered for each use. Both
are measured. Times are the best of nine after a warm-up, with each variant in a process of its own. Memory is the peak
of a step. What several ranks would hold is computed from the sizes. Run it on an otherwise idle machine.
"""

import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from common import argument_parser, machine, sized, table, verdict
from measuring import best, peak, resident
from shapes import QWEN3_0_6B, QWEN3_4B, random_decoder

from openclaw_rl.engines.local.model.decoder import Decoder, Shape
from openclaw_rl.engines.local.process.worker_messages import LearnerOptions, RankPlace
from openclaw_rl.engines.local.training.policy_trainer import PolicyTrainer
from openclaw_rl.engines.options import LINEAR_MODULES
from openclaw_rl.types import LossSettings, Span, TrainingSequence, TrainingSettings

SMALL = replace(QWEN3_0_6B, vocab=8192, layers=4, rotary_layers=(True,) * 4)
TINY = replace(
    SMALL, vocab=300, hidden=64, intermediate=96, layers=2, heads=4, kv_heads=2, head_dim=16, rotary_layers=(True,) * 2
)
SHAPES: dict[str, Shape] = {"small": sized(SMALL, TINY), "Qwen3-0.6B": QWEN3_0_6B, "Qwen3-4B": QWEN3_4B}
SEQUENCES, LENGTH, RESPONSE = sized((8, 1024, 128), (3, 24, 8))
TRAINED = {"an adapter of rank 16": 16, "all weights": 0}
#: How weights are held: not sharded, sharded and whole during a pass, or sharded and gathered for each use.
PLAIN, WHOLE, GATHERED = "plain", "whole", "gathered"
RANKS = (2, 4, 8)
#: A step with one rank may take so much longer than without FSDP2.
MOST_OVERHEAD = 1.05
GIB = 1 << 30


class NoServer:
    """Stands for the pipe to a server, which a rank alone does not need."""

    def send(self, report: object) -> None:
        pass


def batch(vocabulary: int) -> list[TrainingSequence]:
    random.seed(0)
    span = Span(0, LENGTH - RESPONSE, LENGTH, [-10.0] * RESPONSE, [1.0] * RESPONSE)
    return [TrainingSequence([random.randrange(vocabulary) for _ in range(LENGTH)], [span]) for _ in range(SEQUENCES)]


def options(rank: int, device: str) -> LearnerOptions:
    training = TrainingSettings(LossSettings(), 1, 1e-5, (0.9, 0.95), 0.0, 1.0, 100.0, 0)
    return LearnerOptions(
        model=Path(),
        device=device,
        dtype="auto",
        rank=rank,
        alpha=32.0,
        dropout=0.0,
        modules=LINEAR_MODULES,
        training=training,
        micro_batch_tokens=4096,
        offload=False,
        base_model="random",
    )


def trainer(decoder: Decoder, rank: int, device: torch.device, shards: bool) -> PolicyTrainer:
    settings = options(rank, str(device))
    if not shards:
        return PolicyTrainer(decoder, settings)
    from openclaw_rl.engines.local.training.rank_group import join
    from openclaw_rl.engines.local.training.sharded import Sharding

    ranks = join(RankPlace(0, 1, shards=True), device, NoServer())
    sharding = Sharding(ranks)
    layers: Any = [sharding.layer(layer) for layer in decoder.layers]
    return PolicyTrainer(sharding.model(replace(decoder, layers=layers)), settings, ranks, sharding)


def measure(shape: str, device_type: str, rank: int, held: str) -> None:
    """Print the measurements of one variant as JSON."""
    device = torch.device("cuda", 0) if device_type == "cuda" else torch.device("cpu")
    dtype = torch.bfloat16 if device_type == "cuda" else torch.float32
    policy = trainer(random_decoder(SHAPES[shape], dtype, device), rank, device, held != PLAIN)
    policy.trainer.may_stay_whole = held == WHOLE
    sequences = batch(SHAPES[shape].vocab)

    def step() -> None:
        policy.forward_backward(sequences)
        policy.optim_step()

    step()
    between = torch.cuda.memory_allocated() if device_type == "cuda" else resident("VmRSS")
    above = peak(step, device_type)
    seconds = min(best(step, step, step))
    parameters = sum(parameter.numel() for parameter in policy.weights.parameters())
    # In float32, for each trained weight: the weight, its gradient and two moments.
    measured = {
        "seconds": seconds,
        "peak": between + above,
        "base": policy.weight_bytes,
        "state": 16 * parameters,
    }
    print(json.dumps(measured))


def in_own_process(shape: str, device: str, rank: int, held: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--device", device, "--shape", shape, "--measure", str(rank), held]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    measured: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return measured


def show(shape: str, device: str) -> None:
    rows: list[tuple[object, ...]] = []
    shares: list[tuple[object, ...]] = []
    for name, rank in TRAINED.items():
        plain = in_own_process(shape, device, rank, PLAIN)
        for held in (WHOLE, GATHERED):
            sharded = in_own_process(shape, device, rank, held)
            ratio = sharded["seconds"] / plain["seconds"]
            times = (f"{plain['seconds']:.3f}", f"{sharded['seconds']:.3f}", f"{ratio:.3f}")
            peaks = (f"{plain['peak'] / GIB:.2f}", f"{sharded['peak'] / GIB:.2f}")
            memory = "free" if held == WHOLE else "short"
            rows.append((name, memory, *times, verdict(ratio, MOST_OVERHEAD, False), *peaks))
        # Every rank has the whole adapter.
        copied, divided = (plain["state"], plain["base"]) if rank else (0.0, plain["base"] + plain["state"])
        shares.append((name, *(f"{(copied + divided / ranks) / GIB:.2f}" for ranks in (1, *RANKS))))
    head = ("trained", "memory", "seconds", "with FSDP2", "ratio", "target", "peak GiB", "with FSDP2")
    table(f"One rank, a step on {SEQUENCES} × {LENGTH} tokens, shape {shape} on {device} ({machine()})", head, rows)
    head = ("trained", "1 rank", *(f"{ranks} ranks" for ranks in RANKS))
    table(
        "Computed: GiB of weights, gradients and optimiser state that a rank holds with --shard-weights", head, shares
    )


if __name__ == "__main__":
    parser = argument_parser(__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where (default: cpu)")
    parser.add_argument("--shape", choices=list(SHAPES), default="small", help="of the model (default: small)")
    parser.add_argument("--measure", nargs=2, metavar=("RANK", "HELD"), help="one variant, as JSON")
    args = parser.parse_args()
    if args.measure:
        measure(args.shape, args.device, int(args.measure[0]), args.measure[1])
    else:
        show(args.shape, args.device)
