"""Two ranks make the steps of one process, agree on every error, and continue from each other's checkpoints."""

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from openclaw_rl.engines.base import StepLost, StepRefused, StepStopped
from openclaw_rl.engines.local.model.decoder import load_decoder
from openclaw_rl.engines.local.training.packing import micro_batches
from openclaw_rl.engines.local.training.policy_trainer import PolicyTrainer
from openclaw_rl.engines.local.training.trainer import recomputed_layers
from openclaw_rl.types import LossSettings, TrainingSequence
from support.rank_pair import RankPair, Trained, Training, rank_pair, train
from support.tiny_models import save_tiny_model
from support.trainers import options
from support.training_sequences import ragged, sequence

pytestmark = pytest.mark.more

CPU = torch.device("cpu")
SHARDS = pytest.mark.parametrize("shards", [False, True], ids=["copies", "shards"])
#: Each rank with a copy of the weights, with a part of them that is whole during a pass, and with a part whose layers
#: are gathered for each use and computed twice.
HELD = pytest.mark.parametrize(
    "held", [{}, {"shards": True}, {"shards": True, "free": 0}], ids=["copies", "shards", "short"]
)
Held = dict[str, Any]
WEIGHTS = {True: "adapter_model.safetensors", False: "model.safetensors"}


@pytest.fixture(scope="module")
def pair() -> Iterator[RankPair]:
    with rank_pair() as pair:
        yield pair


@pytest.fixture(scope="module")
def tied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tied"), tied=True)


@pytest.fixture
def job(tiny_model: Path, tmp_path: Path) -> Training:
    """Five batches with alternatives to their tokens. The micro-batches of some cannot be divided by two."""
    batches = [[*ragged(seed), *ragged(seed + 10)][: 5 + seed] for seed in range(5)]
    assert {len(micro_batches(batch, 64, CPU)) % 2 for batch in batches} == {0, 1}
    return Training(options(model=tiny_model, max_kl=100), batches, tmp_path / "saved")


def changed(job: Training, **changes: Any) -> Training:
    """Options of the learner and of its training."""
    training = {name: changes.pop(name) for name in ("epochs", "loss", "learning_rate") if name in changes}
    given = replace(job.options, training=replace(job.options.training, **training), **changes)
    return replace(job, options=given)


def alone(job: Training, saved: Path) -> Trained:
    """The same training in one process that has enough memory."""
    decoder = load_decoder(job.options.model, torch.float32, CPU)
    return train(PolicyTrainer(decoder, job.options), replace(job, saved=saved, free=None))


def differences(one: Path, other: Path) -> dict[str, float]:
    """The largest difference in each file of tensors."""
    worst = {}
    for path in [path for path in one.iterdir() if path.suffix in (".safetensors", ".optimizer")]:
        ours, theirs = load_file(path), load_file(other / path.name)
        assert ours.keys() == theirs.keys()
        worst[path.name] = max((ours[name] - theirs[name]).abs().max().item() for name in ours)
    assert len(worst) == 2
    return worst


def train_alike(pair: RankPair, job: Training) -> Trained:
    """What the first rank measured, which the second one measured too."""
    first, second = pair.train(job)
    assert isinstance(first, Trained), first
    # They may have computed different numbers of layers twice.
    assert first == second._replace(recomputed=first.recomputed)
    return first


def equal_to_one_process(pair: RankPair, job: Training, tmp_path: Path) -> Trained:
    """Train with two ranks and with one process, and compare everything that is measured and saved."""
    expected = alone(job, tmp_path / "alone")
    first = train_alike(pair, job)
    for ours, theirs in zip(first.passes, expected.passes, strict=True):
        result, reference = ours[0], theirs[0]
        assert result.loss == pytest.approx(reference.loss, abs=1e-5)
        assert (result.tokens, result.response_tokens) == (reference.tokens, reference.response_tokens)
        assert result.clipped == reference.clipped
        assert result.kl_base == pytest.approx(reference.kl_base, abs=1e-4)
        assert ours[1] == pytest.approx(theirs[1], rel=1e-4)
        for found, wanted in ((result.logprobs, reference.logprobs), *zip(ours[2:], theirs[2:], strict=True)):
            assert len(found) == len(wanted)
            for spans in zip(found, wanted, strict=True):
                for one, other in zip(*spans, strict=True):
                    assert one == pytest.approx(other, abs=1e-4)
    assert max(differences(job.saved, tmp_path / "alone").values()) <= 1e-6
    assert (job.saved / "learner.json").read_bytes() == (tmp_path / "alone" / "learner.json").read_bytes()
    return first


@HELD
@pytest.mark.parametrize("case", ["plain", "epochs", "divergence"])
def test_an_adapter_is_trained_as_by_one_process(
    pair: RankPair, job: Training, tmp_path: Path, case: str, held: Held
) -> None:
    changes: dict[str, Any] = {
        "plain": {},
        "epochs": {"epochs": 2, "dropout": 0.3},
        "divergence": {"loss": LossSettings(kl_coef=0.5)},
    }[case]
    job = replace(changed(job, **changes), **held)
    job = replace(job, batches=job.batches[:3]) if "free" in held else job
    assert bool(equal_to_one_process(pair, job, tmp_path).recomputed) == ("free" in held)


@HELD
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_all_weights_are_trained_as_by_one_process(
    pair: RankPair, job: Training, tied_model: Path, tmp_path: Path, held: Held, tied: bool
) -> None:
    job = changed(job, rank=0, model=tied_model if tied else job.options.model, learning_rate=1e-4)
    job = replace(job, batches=job.batches[:3]) if "free" in held else job
    whole = alone(job, tmp_path / "reference").weight_bytes
    trained = equal_to_one_process(pair, replace(job, **held), tmp_path)
    # The rows of a few small weights cannot be divided by two.
    assert trained.weight_bytes == (pytest.approx(whole / 2, rel=0.02) if held else whole)


@pytest.mark.parametrize("rank", [4, 0], ids=["lora", "all"])
def test_weights_that_fit_are_gathered_once_in_a_pass(pair: RankPair, job: Training, rank: int) -> None:
    layers = load_decoder(job.options.model, torch.float32, CPU).shape.layers
    job = replace(changed(job, rank=rank), shards=True, batches=job.batches[4:])
    (batch,) = job.batches
    rounds = -(-len(micro_batches(batch, 64, CPU)) // 2)
    assert rounds > 1
    free, short = pair.train(job)[0], pair.train(replace(job, free=0))[0]
    # A pass with gradients, and one each for the scores of the policy and of the base model.
    assert free.gathered == 3 * (layers + 1)
    assert free.recomputed == 0
    # Where memory is short, a layer is gathered for the forward pass and for the backward pass of each micro-batch.
    assert short.gathered >= 2 * rounds * layers
    assert short.recomputed == rounds * layers


def test_copies_that_compute_layers_twice_train_as_one_process(pair: RankPair, job: Training, tmp_path: Path) -> None:
    job = replace(job, batches=job.batches[:2], free=0)
    assert equal_to_one_process(pair, job, tmp_path).recomputed > 0


def test_ranks_share_the_memory_of_a_machine(pair: RankPair, job: Training) -> None:
    shape = load_decoder(job.options.model, torch.float32, CPU).shape
    (batch,) = job.batches[4:]
    tokens = max(len(part.ids) for part in micro_batches(batch, 64, CPU))
    fits = next(free for free in count(0, 1000) if not recomputed_layers(shape, tokens, 4, free, recorded=False))
    job = replace(job, batches=[batch])
    # One of them has the largest micro-batch.
    assert any(rank.recomputed for rank in pair.train(replace(job, free=2 * fits - 2000)))
    assert [rank.recomputed for rank in pair.train(replace(job, free=2 * fits))] == [0, 0]


@SHARDS
def test_ranks_differ_from_one_process_no_more_than_another_order_of_sums_does(
    pair: RankPair, job: Training, tmp_path: Path, shards: bool
) -> None:
    """AdamW divides by the size of gradients, so where they are small, a rounding error becomes a part of the learning
    rate. After five large steps on all weights, one process differs from itself by 1e-5 if its micro-batches have
    another size. The tests of 1e-6 therefore make small steps.
    """
    job = changed(job, rank=0, learning_rate=1e-3, loss=LossSettings(kl_coef=0.5))
    alone(job, tmp_path / "alone")
    orders = {tokens: changed(job, micro_batch_tokens=tokens) for tokens in (16, 32, 128)}
    for tokens, other in orders.items():
        alone(other, tmp_path / str(tokens))
    usual = max(differences(tmp_path / "alone", tmp_path / str(tokens))["model.safetensors"] for tokens in orders)
    assert isinstance(pair.train(replace(job, shards=shards))[0], Trained)
    assert differences(job.saved, tmp_path / "alone")["model.safetensors"] <= 3 * usual
    assert usual <= 1e-4


@SHARDS
@pytest.mark.parametrize("rank", [4, 0], ids=["lora", "all"])
def test_a_rank_without_a_micro_batch_takes_part(
    pair: RankPair, job: Training, tmp_path: Path, shards: bool, rank: int
) -> None:
    single: list[list[TrainingSequence]] = [[sequence(random.Random(n), 30, (20, 30))] for n in range(5)]
    job = replace(changed(job, rank=rank, learning_rate=1e-4), batches=single, shards=shards)
    equal_to_one_process(pair, job, tmp_path)


@HELD
@pytest.mark.parametrize("fault", ["short_in_forward", "short_in_backward"])
def test_a_rank_that_is_short_of_memory_has_all_try_smaller_micro_batches(
    pair: RankPair, job: Training, tmp_path: Path, fault: str, held: Held
) -> None:
    for rank in (4, 0) if held else (4,):
        batches = job.batches[2:3] if "free" in held else job.batches[2:4]
        given = replace(changed(job, rank=rank, learning_rate=1e-4), batches=batches)
        given = replace(given, **held, fault=fault, saved=tmp_path / f"saved-{rank}")
        train_alike(pair, given)
        small = changed(given, micro_batch_tokens=32)
        alone(small, tmp_path / f"alone-{rank}")
        assert max(differences(given.saved, tmp_path / f"alone-{rank}").values()) <= 1e-6


@pytest.mark.parametrize("rank", [4, 0], ids=["lora", "all"])
def test_weights_do_not_stay_whole_after_memory_ran_out(
    pair: RankPair, job: Training, tmp_path: Path, rank: int
) -> None:
    job = replace(changed(job, rank=rank, learning_rate=1e-4), batches=job.batches[2:3], shards=True)
    assert isinstance(pair.train(replace(job, fault="short_while_whole"))[0], Trained)
    alone(changed(job, micro_batch_tokens=32), tmp_path / "alone")
    assert max(differences(job.saved, tmp_path / "alone").values()) <= 1e-6


@HELD
@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        ("short_in_optimiser", StepLost, "does not fit into memory"),
        ("stopped", StepStopped, "stopped"),
        ("failing_loss", StepRefused, "no such thing"),
    ],
)
def test_an_error_of_one_rank_is_raised_by_all(
    pair: RankPair, job: Training, fault: str, kind: type[Exception], words: str, held: Held
) -> None:
    for error in pair.train(replace(job, fault=fault, **held)):
        assert type(error) is kind
        assert words in str(error)
    assert not job.saved.exists()
    # And the ranks still understand each other.
    train_alike(pair, replace(job, **held, batches=job.batches[:1]))


def test_a_policy_that_the_first_rank_cannot_write_is_refused_by_all(pair: RankPair, job: Training) -> None:
    job.saved.parent.joinpath("file").write_text("")
    first, second = pair.train(replace(job, saved=job.saved.parent / "file" / "saved"))
    assert isinstance(first, OSError)
    assert isinstance(second, StepRefused)


@SHARDS
@pytest.mark.parametrize("rank", [4, 0], ids=["lora", "all"])
def test_training_goes_on_exactly_from_a_checkpoint(
    pair: RankPair, job: Training, tmp_path: Path, shards: bool, rank: int
) -> None:
    job = replace(changed(job, rank=rank, dropout=0.2 if rank else 0.0), shards=shards, batches=job.batches[:3])
    half = replace(job, batches=job.batches[:2], saved=tmp_path / "half")
    rest = replace(job, batches=job.batches[2:], resumed=tmp_path / "half", saved=tmp_path / "rest")
    for part in (job, half, rest):
        assert isinstance(pair.train(part)[0], Trained)
    for name in (WEIGHTS[bool(rank)], "learner.optimizer", "learner.json"):
        assert (rest.saved / name).read_bytes() == (job.saved / name).read_bytes(), name


@SHARDS
@pytest.mark.parametrize("rank", [4, 0], ids=["lora", "all"])
def test_one_process_and_two_ranks_continue_from_each_other(
    pair: RankPair, job: Training, tmp_path: Path, shards: bool, rank: int
) -> None:
    job = replace(changed(job, rank=rank, learning_rate=1e-4), shards=shards, batches=job.batches[:3])
    alone(job, tmp_path / "alone")
    first = replace(job, batches=job.batches[:2])
    last = replace(job, batches=job.batches[2:])
    alone(first, tmp_path / "one")
    assert isinstance(pair.train(replace(last, resumed=tmp_path / "one", saved=tmp_path / "two"))[0], Trained)
    assert isinstance(pair.train(replace(first, saved=tmp_path / "half"))[0], Trained)
    alone(replace(last, resumed=tmp_path / "half"), tmp_path / "whole")
    for saved in ("two", "whole"):
        assert max(differences(tmp_path / saved, tmp_path / "alone").values()) <= 1e-6
    assert json.loads((tmp_path / "two" / "learner.json").read_text())["steps"] == 7


@SHARDS
def test_a_checkpoint_that_one_rank_cannot_read_is_refused_by_all(
    pair: RankPair, job: Training, tmp_path: Path, shards: bool
) -> None:
    job = replace(changed(job, rank=0), shards=shards, batches=job.batches[:1])
    alone(job, tmp_path / "one")
    for error in pair.train(replace(job, resumed=tmp_path / "one", fault="unreadable")):
        assert isinstance(error, StepRefused)
        assert "Permission denied" in str(error)
    for error in pair.train(replace(job, resumed=tmp_path / "nowhere")):
        assert isinstance(error, StepRefused)
