"""A step that is started before the tokens of the one before it are known changes no answer."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

from openclaw_rl.engines.local.model.decoder import load_decoder
from openclaw_rl.engines.local.process.sampler_worker import Worker
from openclaw_rl.engines.local.process.worker_messages import Add, Cancel, Command, LoadPolicy, WorkerOptions
from openclaw_rl.types import FinishReason, SampledToken, SampleRequest
from support.tiny_models import save_tiny_model
from support.workers import ids, on_every_device, request


def make_worker(model: Path, device: str, run_ahead: bool, lora_rank: int = 4) -> Worker:
    decoder = load_decoder(model, torch.float32, torch.device(device))
    return Worker(decoder, WorkerOptions(model, device, "float32", 8, None, 0.05, 4, lora_rank), run_ahead)


@dataclass
class Run:
    """What became of commands, each given before the step of its number."""

    answers: dict[int, list[SampledToken]] = field(default_factory=dict)
    ahead: list[int] = field(default_factory=list)
    """After each step: how many rows of the next one had been started."""

    @classmethod
    def of(cls, worker: Worker, commands: Sequence[tuple[int, Command]]) -> "Run":
        run = cls()
        while not worker.scheduler.idle or len(run.ahead) <= max(step for step, _ in commands):
            for step, command in commands:
                if step == len(run.ahead):
                    worker.obey(command)
            for id, tokens in worker.step().tokens.items():
                run.answers.setdefault(id, []).extend(tokens)
            run.ahead.append(len(worker.ahead.work) if worker.ahead else 0)
        assert worker.scheduler.pool.available == worker.scheduler.pool.pages, "a page is still in use"
        return run


def both(model: Path, device: str, commands: Sequence[tuple[int, Command]]) -> tuple[Run, Run]:
    """The same commands to a worker that waits for each step, and to one that runs ahead."""
    waiting, ahead = (Run.of(make_worker(model, device, run_ahead), commands) for run_ahead in (False, True))
    assert not any(waiting.ahead)
    return waiting, ahead


def jobs(count: int) -> list[SampleRequest]:
    """Prompts and answers of different lengths, which cross the ends of pages; greedy and sampled."""
    rng = random.Random(count)
    return [
        request(rng.choices(range(300), k=10 + 7 * i), temperature=i % 2 * 0.8, seed=i, max_tokens=30 - 5 * i)
        for i in range(count)
    ]


def adds(asked: Sequence[SampleRequest]) -> list[tuple[int, Command]]:
    return [(0, Add(number, job, 0)) for number, job in enumerate(asked)]


def assert_close(found: list[SampledToken], expected: list[SampledToken]) -> None:
    assert ids(found) == ids(expected)
    assert [t.logprob for t in found] == pytest.approx([t.logprob for t in expected], abs=1e-4)
    assert [t.finish for t in found] == [t.finish for t in expected]


@on_every_device
@pytest.mark.parametrize("count", [1, 5])
def test_answers_are_the_same_to_the_last_bit(tiny_model: Path, device: str, count: int) -> None:
    """The lengths of the answers are known, so each step has the same rows."""
    waiting, ahead = both(tiny_model, device, adds(jobs(count)))
    assert ahead.answers == waiting.answers
    assert len(ahead.ahead) == len(waiting.ahead)
    assert all(ahead.ahead[:-1])


@on_every_device
@pytest.mark.parametrize("count", [1, 5])
def test_ends_that_nobody_foresaw(tiny_model: Path, device: str, count: int) -> None:
    asked = jobs(count)
    whole = Run.of(make_worker(tiny_model, device, run_ahead=False), adds(asked)).answers
    for number, job in enumerate(asked[: count // 2 + 1]):
        stop = whole[number][3 + 2 * number].token_id
        asked[number] = replace(job, params=replace(job.params, stop_token_ids=frozenset([stop])))
    waiting, ahead = both(tiny_model, device, adds(asked))
    for number in range(count):
        assert_close(ahead.answers[number], waiting.answers[number])
    assert ahead.answers[0][-1].finish is FinishReason.STOP
    assert len(ahead.ahead) == len(waiting.ahead), "a step in which nobody is left is not waited for"


@on_every_device
def test_those_who_come_and_go_meanwhile(tiny_model: Path, adapters: list[Path], device: str) -> None:
    """A policy is loaded and a request for it comes while others run ahead, and one of these is cancelled."""
    one, two, three = jobs(3)
    commands: list[tuple[int, Command]] = [
        (0, LoadPolicy(1, 1, adapters[0])),
        (0, Add(1, one, 1, 1)),
        (0, Add(2, two, 0)),
        (6, LoadPolicy(2, 2, adapters[1])),
        (6, Add(3, three, 2, 2)),
        (9, Cancel(2)),
        (14, LoadPolicy(3, 3, adapters[2])),
        (14, Add(4, two, 3, 3)),
    ]
    waiting, ahead = both(tiny_model, device, commands)
    for number in (1, 3, 4):
        assert_close(ahead.answers[number], waiting.answers[number])
    assert ahead.ahead[5] == 2
    assert ahead.ahead[6] == 0, "the third request does not wait for a further step"
    assert ahead.ahead[8:10] == [3, 2]
    assert len(ahead.answers[2]) == 9, "a token that was drawn in vain reaches nobody"


@on_every_device
def test_rows_of_several_models(tiny_model: Path, tmp_path: Path, device: str) -> None:
    """The rows of a step are then computed in parts, one for each model."""
    other = save_tiny_model(tmp_path, seed=1)
    runs = []
    for run_ahead in (False, True):
        worker = make_worker(tiny_model, device, run_ahead, lora_rank=0)
        worker.obey(LoadPolicy(1, 1, other))
        while worker.loading:
            worker.load_on()
        runs.append(Run.of(worker, [(0, Add(n, job, n % 2, n % 2)) for n, job in enumerate(jobs(5))]))
    waiting, ahead = runs
    assert ahead.answers == waiting.answers
    assert all(ahead.ahead[:-1])


@on_every_device
def test_one_that_is_cancelled_alone_leaves_nothing_to_wait_for(tiny_model: Path, device: str) -> None:
    worker = make_worker(tiny_model, device, run_ahead=True)
    (job,) = jobs(1)
    worker.obey(Add(1, job, 0))
    worker.step()
    assert worker.ahead is not None
    worker.obey(Cancel(1))
    assert not worker.busy
    found = Run.of(worker, [(0, Add(2, job, 0))])
    assert found.answers == Run.of(make_worker(tiny_model, device, run_ahead=False), [(0, Add(2, job, 0))]).answers


@on_every_device
@pytest.mark.parametrize(
    "params", [{"top_p": 0.9}, {"top_k": 5}, {"top_logprobs": 2}, {"top_p": 0.8, "top_k": 9, "top_logprobs": 3}]
)
def test_draws_from_the_likeliest_tokens_run_ahead(tiny_model: Path, device: str, params: dict[str, float]) -> None:
    first, second = jobs(2)
    ranked = replace(second, params=replace(second.params, max_tokens=6, **params))
    waiting, ahead = both(tiny_model, device, [(0, Add(1, first, 0)), (0, Add(2, ranked, 0))])
    assert ahead.answers == waiting.answers
    assert [len(token.top) for token in ahead.answers[2]] == [params.get("top_logprobs", 0)] * 6
    assert all(ahead.ahead[:-1])
