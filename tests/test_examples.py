"""The examples of own code do what they say."""

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from openclaw_rl.app.rollout_function import Rollout
from openclaw_rl.cli import main
from openclaw_rl.engines.base import EngineUnavailable
from openclaw_rl.engines.custom_sampler import CustomSampler
from openclaw_rl.judge.judges.base import Case
from openclaw_rl.judge.judges.custom import CustomJudge
from openclaw_rl.learn.gate import read_items
from openclaw_rl.ledger.store import Ledger
from openclaw_rl.ledger.turns import load_turn, ready_turns
from openclaw_rl.losses.custom_loss import load_loss
from openclaw_rl.losses.policy import PolicyLoss
from openclaw_rl.methods.options import MethodOptions
from openclaw_rl.methods.registry import make_method
from openclaw_rl.types import (
    Priority,
    Question,
    SampledToken,
    SampleKind,
    SampleRequest,
    SamplingParams,
    Source,
    Verdict,
)
from support.fakes import ScriptedSampler
from support.harness import Bench, running

EXAMPLES = Path(__file__).parent.parent / "examples"
REQUEST = SampleRequest([1, 2, 3], SamplingParams(max_tokens=8))


async def test_the_judge_likes_short_answers_and_says_so() -> None:
    judge = CustomJudge(str(EXAMPLES / "custom_judge.py"), {}, timeout=5)
    both = frozenset(Question)
    short = await judge.judge(Case(1, "question", "an answer", (), ()), both)
    long = await judge.judge(Case(1, "question", "word " * 50, (), ()), both)
    assert (short.score, short.hints) == (1.0, ())
    assert (long.score, long.hints) == (-1.0, ("Answer in at most 40 words.",))


async def test_the_judge_with_several_hints_puts_a_wish_in_three_ways() -> None:
    judge = CustomJudge(str(EXAMPLES / "several_hints.py"), {}, timeout=60)
    both, long = frozenset(Question), "It is a long story. " * 20
    shorter = "Give a much shorter answer, in one or two sentences."
    for said, hints in (
        ("Shorter, please.", (shorter, "Shorter, please.", f"Shorter, please. {shorter}")),
        ("It was 1987, not 1986.", ("It was 1987, not 1986.",)),
    ):
        found = await judge.judge(Case(1, "When was it?", long, [{"role": "user", "content": said}], ()), both)
        assert (found.score, found.hints) == (-1.0, hints)
    content = await judge.judge(Case(1, "When?", long, [{"role": "user", "content": "Great, thanks!"}], ()), both)
    assert (content.score, content.hints) == (1.0, ())


def test_the_loss_reinforces_what_was_good() -> None:
    loss = load_loss(str(EXAMPLES / "custom_loss.py"), PolicyLoss())
    logprobs = torch.tensor([-1.0, -1.0], requires_grad=True)
    loss.per_token(logprobs, torch.tensor([-1.0, -1.0]), torch.tensor([1.0, -1.0])).loss.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-1.0, 1.0])


def test_the_method_learns_from_liked_answers_alone(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = f"{EXAMPLES / 'custom_method.py'}:LikedOnly"
    method = make_method(MethodOptions(method=path))
    assert method.questions == {Question.SCORE}
    assert method.sample_kind(Verdict(1.0, Source.LLM)) == (SampleKind.RL, "")
    assert method.sample_kind(Verdict(-1.0, Source.LLM)) == (None, "it was not liked")
    assert method.sample_kind(Verdict(0.0, Source.LLM)) == (None, "the judge is neutral")
    flags = ["--method", path, "--model-name", str(tiny_model), "--run-dir", str(tmp_path)]
    assert main(["serve", "--dry-run", *flags]) == 0
    assert "custom_method.py:LikedOnly" in capsys.readouterr().out


async def collect(sampler: CustomSampler, request: SampleRequest) -> list[SampledToken]:
    return [token async for tokens in sampler.sample(request) for token in tokens]


async def test_the_generation_draws_four_answers_and_gives_one() -> None:
    inner = ScriptedSampler(lambda request, index: [10 + index, 2])
    sampler = CustomSampler(inner, str(EXAMPLES / "custom_generate.py"))
    tokens = await collect(sampler, REQUEST)
    assert [request.n for request in inner.requests] == [4]
    assert [token.index for token in tokens] == [0, 0]
    assert tokens[-1].finish is not None
    await collect(sampler, SampleRequest([1], SamplingParams(max_tokens=4), priority=Priority.BACKGROUND))
    assert inner.requests[-1].n == 1, "background work is the engine's own"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("async def generate(request, sampler):\n    return 1 / 0\n", "own.py:2: ZeroDivisionError"),
        ("async def generate(request, sampler):\n    return 'text'\n", "did not return a list of SampledToken"),
        ("async def generate(request, sampler):\n    return []\n", "did not return a whole completion 0"),
    ],
)
async def test_a_generation_that_fails_is_an_error_with_its_place(tmp_path: Path, code: str, said: str) -> None:
    (tmp_path / "own.py").write_text(code)
    sampler = CustomSampler(ScriptedSampler(lambda request, index: [2]), str(tmp_path / "own.py"))
    with pytest.raises(EngineUnavailable, match=said):
        await collect(sampler, REQUEST)


@pytest.fixture
def bench(tiny_model: Path, tmp_path: Path) -> Iterator[Bench]:
    ledger = Ledger(tmp_path)
    with running(Bench(tiny_model, ledger=ledger)) as bench:
        yield bench
    ledger.close()


def test_the_rollout_asks_and_rewards_through_the_api(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    rollout = Rollout(str(EXAMPLES / "custom_rollout.py"), {"seed": 0})
    monkeypatch.setitem(rollout.function.__globals__, "TASKS", 3)
    asyncio.run(rollout.run(f"{bench.url}/v1"))
    assert bench.service.capture is not None
    ledger = bench.service.capture.ledger
    turns = [ledger.read(load_turn, number) for number in ledger.read(ready_turns, (), 9)]
    assert [[(said.score, said.source) for said in turn.feedback] for turn in turns] == [
        [(-1.0, Source.ENVIRONMENT)] for _ in range(3)
    ]


@pytest.mark.parametrize("is_stopping", [True, False])
def test_a_rollout_that_fails_because_the_server_stops_has_no_traceback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_stopping: bool
) -> None:
    (tmp_path / "mine.py").write_text("async def rollout(base_url, config):\n    raise ConnectionError('refused')\n")
    with caplog.at_level("INFO"):
        asyncio.run(Rollout(str(tmp_path / "mine.py"), {}).run("http://127.0.0.1:9/v1", lambda: is_stopping))
    (record,) = [record for record in caplog.records if record.name == "openclaw_rl.app.rollout_function"]
    assert (record.exc_info is None) is is_stopping
    assert ("has ended with the server" in record.message) is is_stopping


def test_the_gate_can_be_read() -> None:
    items = read_items(EXAMPLES / "gate.jsonl")
    assert items[0].passes("It is Paris.")
    assert not items[0].passes("It is Rome.")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--custom-loss-function-path", "nowhere.py"), "--custom-loss-function-path: there is no file nowhere.py."),
        (("--custom-loss-function-path", "{}:other"), "has no other"),
        (("--custom-generate-function-path", "{}"), "--custom-generate-function-path: .* has no generate"),
        (("--rollout-function-path", "{}:compute_loss"), "is not an async function"),
        (("--gate", "nowhere.jsonl"), "--gate: there is no file nowhere.jsonl."),
        (("--gate", str(EXAMPLES)), "--gate: .* cannot be read: Is a directory."),
        (("--judge-rubric", "nowhere.md"), "--judge-rubric: there is no file nowhere.md."),
        (("--resume-from-ckpt", "nowhere"), "--resume-from-ckpt: .*nowhere is not a checkpoint"),
    ],
)
def test_own_files_that_cannot_be_used_are_said_before_anything_starts(
    tiny_model: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, str], said: str
) -> None:
    given = [flag.format(EXAMPLES / "custom_loss.py") for flag in flags]
    assert main(["serve", "--model-name", str(tiny_model), "--dry-run", *given]) == 2
    assert re.search(said, capsys.readouterr().err)


def test_the_examples_are_accepted(tiny_model: Path) -> None:
    flags = {"custom-loss-function-path": "custom_loss.py", "custom-generate-function-path": "custom_generate.py"}
    flags |= {"rollout-function-path": "custom_rollout.py", "custom-rm-path": "custom_judge.py", "gate": "gate.jsonl"}
    given = [part for name, file in flags.items() for part in (f"--{name}", str(EXAMPLES / file))]
    assert main(["serve", "--model-name", str(tiny_model), "--dry-run", *given]) == 0
