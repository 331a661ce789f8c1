"""Measures a step of the learner on one and two gloo ranks of this machine: seconds, bytes exchanged, memory of a rank.

    python benchmarks/rank_scaling.py

The shape is that of the embedded model with fewer layers, the weights are random, in float32. Strong scaling divides
one batch between the ranks; weak scaling gives every rank as much as one rank has. A rank has one thread, so that two
of them fit on two cores; one rank is also measured with two threads, which is the alternative. Run it on an otherwise
idle machine.
"""

import multiprocessing
import random
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from common import machine, sized, table
from measuring import best, resident
from ranks import TINY, TRAINED, options
from shapes import QWEN3_0_6B, random_decoder

from openclaw_rl.engines.local.process.worker_messages import RankPlace
from openclaw_rl.engines.local.training.policy_trainer import PolicyTrainer
from openclaw_rl.engines.local.training.rank_group import join
from openclaw_rl.engines.local.training.sharded import Sharding
from openclaw_rl.types import Span, TrainingSequence

LAYERS = 6
SHAPE = sized(
    replace(
        QWEN3_0_6B,
        vocab=49152,
        hidden=576,
        intermediate=1536,
        layers=LAYERS,
        heads=9,
        kv_heads=3,
        head_dim=64,
        rotary_layers=(True,) * LAYERS,
        head_norm=False,
    ),
    TINY,
)
#: Sequences and tokens of a batch, of which half are the response; and how many fit into a micro-batch.
SEQUENCES, LENGTH, IN_MICRO_BATCH = sized((8, 96, 2), (4, 24, 1))
#: Exchanges of tensors, and which of their arguments is the tensor that a rank gives.
EXCHANGES = {"all_reduce": 0, "all_gather_single": 1, "reduce_scatter_single": 1}
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to make a step."""

    rank: int
    """Of the adapter; 0 trains all weights."""
    ranks: int
    threads: int
    shards: bool = False
    batches: int = 1
    """How many times the batch a step has."""


@dataclass(frozen=True, slots=True)
class Measures:
    """Of one rank."""

    seconds: float
    given: int
    """Bytes that it gave to exchanges in one step."""
    resident: int


class Exchanged:
    """Counts the bytes that this process gives to exchanges from now on."""

    def __init__(self) -> None:
        self.bytes = 0
        for name, place in EXCHANGES.items():
            setattr(dist, name, self._counting(getattr(dist, name), place))

    def _counting(self, exchange: Any, place: int) -> Any:
        def counted(*tensors: Any, **given: Any) -> Any:
            self.bytes += tensors[place].nbytes
            return exchange(*tensors, **given)

        return counted


def batch(copies: int) -> list[TrainingSequence]:
    random.seed(0)
    span = Span(0, LENGTH // 2, LENGTH, [-10.0] * (LENGTH // 2), [1.0] * (LENGTH // 2))
    ids = [[random.randrange(SHAPE.vocab) for _ in range(LENGTH)] for _ in range(copies * SEQUENCES)]
    return [TrainingSequence(tokens, [span]) for tokens in ids]


def open_policy(variant: Variant, number: int, pipe: Connection) -> PolicyTrainer:
    device = torch.device("cpu")
    settings = replace(options(variant.rank, "cpu"), micro_batch_tokens=IN_MICRO_BATCH * LENGTH)
    decoder = random_decoder(SHAPE, torch.float32, device)
    if variant.ranks == 1:
        return PolicyTrainer(decoder, settings)
    ranks = join(RankPlace(number, variant.ranks, variant.shards), device, pipe)
    if not variant.shards:
        return PolicyTrainer(decoder, settings, ranks)
    sharding = Sharding(ranks)
    layers: Any = [sharding.layer(layer) for layer in decoder.layers]
    return PolicyTrainer(sharding.model(replace(decoder, layers=layers)), settings, ranks, sharding)


def work(variant: Variant, number: int, pipe: Connection) -> None:
    """One rank: make steps, and send what they took."""
    torch.set_num_threads(variant.threads)
    torch.manual_seed(0)
    exchanged, policy, sequences = Exchanged(), open_policy(variant, number, pipe), batch(variant.batches)

    def step() -> None:
        policy.forward_backward(sequences)
        policy.optim_step()

    step()
    before = exchanged.bytes
    step()
    given = exchanged.bytes - before
    (seconds,) = best(step)
    pipe.send(Measures(seconds, given, resident("VmRSS")))
    # The other rank may still be in the last exchange.
    pipe.recv()


def measure(variant: Variant) -> Measures:
    """The slowest and largest of the ranks."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for number in range(variant.ranks):
        ours, theirs = context.Pipe()
        process = context.Process(target=work, args=(variant, number, theirs), daemon=True)
        process.start()
        # If a rank dies, reading from it fails instead of waiting for ever.
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    if variant.ranks > 1:
        meeting = pipes[0].recv()
        for pipe in pipes[1:]:
            pipe.send(meeting)
    measured: list[Measures] = [pipe.recv() for pipe in pipes]
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send(None)
        process.join()
    return Measures(*(max(getattr(each, name) for each in measured) for name in ("seconds", "given", "resident")))


def rows_of(rank: int) -> list[tuple[object, ...]]:
    """One rank with one thread is what the others are compared with."""
    alone = measure(Variant(rank, 1, 1))
    rows: list[tuple[object, ...]] = []
    for ranks, threads, shards in ((1, 1, False), (1, 2, False), (2, 1, False), (2, 1, True)):
        strong = alone if (ranks, threads) == (1, 1) else measure(Variant(rank, ranks, threads, shards))
        weak = measure(Variant(rank, ranks, threads, shards, batches=2)) if ranks > 1 else None
        rows.append(
            (
                ranks,
                threads,
                "in parts" if shards else "copies",
                f"{strong.seconds:.3f}",
                f"{alone.seconds / strong.seconds:.2f}",
                f"{weak.seconds:.3f}" if weak else "",
                f"{100 * alone.seconds / weak.seconds:.0f}%" if weak else "",
                f"{strong.given / MIB:.1f}",
                f"{strong.resident / MIB:.0f}",
            )
        )
    return rows


def main() -> None:
    head = ("ranks", "threads each", "weights", "step s", "times as fast", "twice the batch: s", "weak efficiency")
    head = (*head, "MiB given", "MiB a rank")
    for name, rank in TRAINED.items():
        size = f"{SEQUENCES} × {LENGTH} tokens, {SHAPE.layers} layers of {SHAPE.hidden}"
        table(f"Measured: a step on {size}, training {name} ({machine()})", head, rows_of(rank))


if __name__ == "__main__":
    main()
