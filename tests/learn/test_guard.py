"""The guard: a policy that no longer answers plain questions is found and left, and others are not."""

import asyncio
import json
import math
import random
import zlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio

from openclaw_rl.engines.base import EngineStats, QueueFull, VersionGone
from openclaw_rl.evals.conversation import all_questions
from openclaw_rl.learn import guard as module
from openclaw_rl.learn.guard import BRIEF_ROUNDS, FILE, MAX_ROUNDS, Guard, GuardState, probability
from openclaw_rl.learn.plain_answers import (
    MAX_CONCURRENT,
    MAX_CONCURRENT_ALONE,
    MAX_OWN,
    PlainAnswers,
    PlainPrompt,
    own_prompts,
    plain_prompts,
)
from openclaw_rl.ledger.status import read_status
from openclaw_rl.rendering.chat import ChatRenderer
from openclaw_rl.types import Priority, SampleRequest, State, TurnKind
from support.fakes import ScriptedSampler, ScriptedStream
from support.judging import until
from support.learning_run import LearningRun, PickySampler, a_run, forever
from support.records import Book

ALWAYS = math.inf
GARBAGE = "xq " * 30


@pytest.fixture(scope="module")
def renderer(tiny_model: Path) -> ChatRenderer:
    return ChatRenderer(tiny_model)


class Answering(PickySampler):
    """Answers plain prompts as `says` tells, by the batches that its policy was trained on."""

    def __init__(self, renderer: ChatRenderer, says: Callable[[list[list[int]], PlainPrompt], str]) -> None:
        super().__init__()
        backend = renderer.tokenizer.backend
        prompts = {prompt.text: prompt for prompt in plain_prompts()}

        def script(request: SampleRequest, index: int) -> list[int]:
            shown = backend.decode(list(request.prompt_ids), skip_special_tokens=False)
            asked = shown.partition("user\n")[2].partition("<|im_end|>")[0]
            prompt = prompts.get(asked) or PlainPrompt("own", asked)
            answer = says(self.served[request.version or 0], prompt)
            return [*backend.encode(answer).ids[:100], next(iter(renderer.tokenizer.eos_ids))]

        self.script = script
        self.hold: asyncio.Event | None = None

    def sample(self, request: SampleRequest) -> ScriptedStream:
        if request.version not in self.served:
            raise VersionGone(f"Policy version {request.version} is not held.")
        self.requests.append(request)
        return ScriptedStream(self, request, request.version)

    async def score(self, request: Any) -> Any:
        if self.hold is not None:
            self.hold.set()
            await forever()
        return await super().score(request)


def sensible(_policy: list[list[int]], prompt: PlainPrompt) -> str:
    return prompt.reference or "That is a question that I can answer."


@pytest_asyncio.fixture
async def run(tmp_path: Path, renderer: ChatRenderer) -> AsyncIterator[LearningRun]:
    """Learning with a guard that has time after every step. Policies with a step on bad turns talk garbage."""
    async with a_run(tmp_path / "run", save_interval=20) as run:
        run.bad = set()  # type: ignore[attr-defined]

        def says(policy: list[list[int]], prompt: PlainPrompt) -> str:
            ruined = run.bad & {turn for batch in policy for turn in batch}  # type: ignore[attr-defined]
            return GARBAGE if ruined else sensible(policy, prompt)

        run.make_sampler = lambda: Answering(renderer, says)
        run.make_guard = lambda run: Guard(
            run.folder / FILE, run.sampler, renderer, registry=run.registry, share=ALWAYS
        )
        yield run


def watch(run: LearningRun) -> Guard:
    assert run.loop.guard is not None
    return run.loop.guard


async def examined(run: LearningRun) -> None:
    """Wait until the policy that serves was found good."""
    await run.until(lambda: (good := watch(run).state.good) is not None and good.version == run.loop.version)
    await run.rest()


def ruin(run: LearningRun) -> list[int]:
    """Judged turns of which a step makes a policy that talks garbage."""
    turns = run.judged(score=-1.0)
    run.bad |= set(turns)  # type: ignore[attr-defined]
    return turns


async def test_a_ruined_policy_is_left_its_turns_are_set_aside_and_one_call_learns_from_them(run: LearningRun) -> None:
    await run.start()
    await examined(run)
    good = await run.make_steps(2)
    await examined(run)
    bad = ruin(run)
    await run.until(lambda: run.states(bad) == {State.DROPPED} and bool(watch(run).state.cautious))
    await run.rest()
    run.check()
    assert run.applied() == good
    assert run.outcomes() == ["applied", "applied", "rolled_back"]
    why = "the guard: sensible answers to plain prompts fell from 64 to 0 of 64"
    assert run.book.read(bad[0]).reason == why
    status = read_status(run.book.db, None, {}, guard=watch(run).state.as_json())
    assert [(batch.step, batch.turns, batch.reason) for batch in status.quarantined] == [(3, tuple(bad), why)]
    assert status.counts.dropped == {why: 2}
    told = status.as_json()["guard"]
    assert (told["last_good"], told["passed"], told["asked"], told["cautious"]) == (4, 0, 64, why)
    assert run.registry.get_sample_value("openclaw_guard_sensible") == 0.0
    # Bad scores alone make no step now; one good score among them does.
    worse = run.judged(2, score=-1.0)
    await asyncio.sleep(0.1)
    assert run.states(worse) == {State.JUDGED}
    assert "needs one with a good score among them, because the guard went back" in run.loop.status()
    (one,) = run.judged(1, score=1.0)
    await run.until(lambda: run.book.state(one) is State.APPLIED)
    assert run.applied()[-1] == [worse[0], one]
    await examined(run)
    assert not watch(run).is_cautious
    # What was set aside is not lost. That it ruins the policy is found again.
    assert await run.loop.relearn() == 2
    assert await run.loop.relearn() == 0
    await run.until(lambda: run.outcomes().count("rolled_back") == 1 and run.states(bad) == {State.DROPPED})
    await run.rest()
    run.bad.clear()  # type: ignore[attr-defined]
    assert await run.loop.relearn() >= 2
    await run.until(lambda: run.states(bad) == {State.APPLIED})
    await examined(run)
    run.check()


async def test_the_base_model_is_the_measure_also_after_a_kill(run: LearningRun) -> None:
    await run.start()
    await run.until(lambda: watch(run).state.start is not None)
    assert GuardState.read(run.folder / FILE).start == PlainAnswers(0)


async def test_a_policy_that_is_as_good_as_before_goes_on(run: LearningRun) -> None:
    await run.start()
    await asyncio.sleep(0.1)
    assert not run.sampler.requests, "before the first step there is nothing to compare"
    for _ in range(4):
        await run.make_steps(1)
        await examined(run)
    assert run.outcomes() == ["applied"] * 4
    assert watch(run).state.start is not None
    assert watch(run).state.start.version == 0
    metrics = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert [step.get("guard_sensible") for step in metrics] == [None, 1.0, 1.0, 1.0]
    # Of the checkpoints that were made for it, only the last two are left: the newest save cannot know that it is good.
    assert [checkpoint.version for checkpoint in run.checkpoints] == [3, 4]


async def test_a_restart_remembers_what_was_measured(run: LearningRun) -> None:
    await run.start()
    await run.make_steps(1)
    await examined(run)
    await run.loop.finish()
    await run.kill()
    await run.start()
    await run.until(lambda: run.resting())
    assert run.sampler.requests == []
    await run.make_steps(1)
    await examined(run)
    assert {request.version for request in run.sampler.requests} == {run.loop.version}


async def test_the_checkpoint_of_the_last_good_policy_outlives_others(tmp_path: Path, renderer: ChatRenderer) -> None:
    async with a_run(tmp_path / "run", save_interval=1, keep_checkpoints=1) as run:
        run.make_sampler = lambda: Answering(renderer, sensible)
        run.make_guard = lambda run: Guard(run.folder / FILE, run.sampler, renderer, share=0.0)
        await run.start()
        await run.make_steps(1)
        assert await run.loop.examine()
        await run.make_steps(4)
        assert [checkpoint.version for checkpoint in run.checkpoints] == [1, 5]
        assert await run.loop.examine()
        await run.make_steps(1)
        assert [checkpoint.version for checkpoint in run.checkpoints] == [5, 6]


async def test_killed_during_an_examination_the_next_start_examines_what_serves(run: LearningRun) -> None:
    await run.start()
    good = await run.make_steps(1)
    await examined(run)
    assert isinstance(run.sampler, Answering)
    run.sampler.hold = asyncio.Event()
    bad = ruin(run)
    await run.sampler.hold.wait()
    await run.kill()
    assert run.states(bad) == {State.APPLIED}
    await run.start()
    await run.until(lambda: run.states(bad) == {State.DROPPED} and bool(watch(run).state.cautious))
    await run.rest()
    run.check()
    assert run.applied() == good


async def test_killed_before_it_has_gone_back_the_next_start_goes_back(run: LearningRun) -> None:
    await run.start()
    good = await run.make_steps(2)
    await examined(run)
    reached = asyncio.Event()

    async def hang(_folder: Path) -> None:
        reached.set()
        await forever()

    run.learner.hooks["load"] = hang
    bad = ruin(run)
    await reached.wait()
    await run.kill()
    await run.start()
    await run.until(lambda: run.states(bad) == {State.DROPPED} and bool(watch(run).state.cautious))
    await run.rest()
    run.check()
    assert run.applied() == good
    assert len({request.version for request in run.sampler.requests}) <= 1, "it was examined before"


async def test_neither_a_rollback_nor_a_stop_waits_for_an_examination(run: LearningRun) -> None:
    await run.start()
    await run.make_steps(1)
    await examined(run)
    assert isinstance(run.sampler, Answering)
    for stop in (lambda: run.loop.roll_back(run.checkpoints[0]), run.loop.finish):
        run.sampler.hold = asyncio.Event()
        run.judged()
        await run.sampler.hold.wait()
        async with asyncio.timeout(20):
            await stop()
        run.sampler.hold = None


async def test_examinations_take_their_share_of_the_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    now, spent = 1000.0, 0.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    guard = Guard(tmp_path / FILE, ScriptedSampler(lambda *_: [1]), None)  # type: ignore[arg-type]

    async def ask(known: PlainAnswers, prompts: Sequence[PlainPrompt], rounds: int) -> PlainAnswers:
        nonlocal now, spent
        now, spent = now + 3.0, spent + 3.0
        return replace(known, sensible={"a": [True] * rounds})

    monkeypatch.setattr(guard, "_asker", SimpleNamespace(ask=ask))
    begun, version = now, 0
    while now < begun + 3600:
        if guard.is_due(version):
            policy, _ = await guard.examine(version)
            guard.accept(policy)
            assert not guard.is_due(version)
        now, version = now + 2.0, version + 1
    assert 0.8 * 0.05 * 3600 <= spent <= 0.05 * 3600 + 12.0


class Drawn(Guard):
    """Its policies answer each prompt sensibly with the chance that `rates` has for their version."""

    def __init__(self, folder: Path, rates: Callable[[int], float], draw: random.Random, held: set[int]) -> None:
        super().__init__(folder / FILE, ScriptedSampler(lambda *_: [1]), None)  # type: ignore[arg-type]
        self.rates, self.draw, self.held = rates, draw, held
        self._asker = SimpleNamespace(ask=self.ask)  # type: ignore[assignment]

    async def ask(self, known: PlainAnswers, prompts: Sequence[PlainPrompt], rounds: int) -> PlainAnswers:
        if known.version not in self.held and any(len(got) < rounds for got in known.sensible.values()):
            raise VersionGone("not held")
        if known.sensible and all(len(got) >= rounds for got in known.sensible.values()):
            return known
        rate = self.rates(known.version)
        got = {key: list(values) for key, values in known.sensible.items()}
        for number in range(len(plain_prompts()) + MAX_OWN):
            values = got.setdefault(str(number), [])
            values += [self.draw.random() < rate for _ in range(rounds - len(values))]
        return replace(known, sensible=got)

    async def is_worse_now(self, version: int) -> bool:
        self.held = {0, version}
        policy, why = await self.examine(version)
        self.state.start = self.state.start or policy
        if not why:
            self.state.good = policy
        return bool(why)


@pytest.mark.parametrize(("rate", "runs"), [(0.97, 50), pytest.param(0.97, 600, marks=pytest.mark.more)])
async def test_an_unchanged_policy_is_hardly_ever_called_worse(tmp_path: Path, rate: float, runs: int) -> None:
    draw = random.Random(5)
    wrong = 0
    for _ in range(runs):
        guard = Drawn(tmp_path, lambda _: rate, draw, set())
        wrong += any([await guard.is_worse_now(version) for version in range(51)])
    assert wrong <= 0.02 * runs


@pytest.mark.more
@pytest.mark.parametrize("rate", [0.5, 0.85])
async def test_that_holds_for_a_weak_model_too(tmp_path: Path, rate: float) -> None:
    await test_an_unchanged_policy_is_hardly_ever_called_worse(tmp_path, rate, 200)


@pytest.mark.parametrize("runs", [100, pytest.param(1000, marks=pytest.mark.more)])
async def test_a_fall_is_found_at_once(tmp_path: Path, runs: int) -> None:
    draw = random.Random(6)
    found = 0
    for _ in range(runs):
        guard = Drawn(tmp_path, lambda version: 0.97 if version < 2 else 0.79, draw, set())
        assert not await guard.is_worse_now(0)
        await guard.is_worse_now(1)
        found += await guard.is_worse_now(2)
    assert found >= 0.9 * runs


def test_with_one_answer_of_each_the_test_is_mc_nemars() -> None:
    before = PlainAnswers(0, {str(n): [n < 38] for n in range(40)})
    now = PlainAnswers(1, {str(n): [n < 31 or n == 39] for n in range(40)})
    # Seven fell and one rose: at most one of eight equal coins shows the other side.
    assert probability(before, now) == pytest.approx(9 / 256)
    assert probability(before, before) == 1.0
    assert probability(before, PlainAnswers(1, {"another": [False]})) == 1.0


def test_our_prompts_are_nobody_elses_and_their_references_answer_them() -> None:
    prompts = plain_prompts()
    assert len({prompt.key for prompt in prompts}) == len(prompts) == 32
    assert not {prompt.text for prompt in prompts} & {question.text for question in all_questions()}
    assert all(prompt.is_sensible(prompt.reference) for prompt in prompts)
    others = (*prompts[1:24], prompts[0], *prompts[:8])
    wrong = sum(prompt.is_sensible(other.reference) for prompt, other in zip(prompts, others, strict=True))
    assert wrong <= 4, "an answer to another question is not sensible"


@pytest.mark.parametrize(
    "answer",
    [
        "To travel.",
        "It lets ye cross borders, matey, arr!",
        "Ein Reisepass zeigt, wer jemand ist, und man braucht ihn an der Grenze.",
        "护照可以证明你是谁,你可以用它出国旅行。",
        "A passport is an identity document 🙂",
    ],
)
def test_short_foreign_and_odd_answers_are_sensible(answer: str) -> None:
    assert PlainPrompt("a", "What is a passport for?", plain_prompts()[0].reference).is_sensible(answer)


@pytest.mark.parametrize("answer", ["", GARBAGE, "!!!!!!", " ".join(["passport"] * 6), "Yes."])
def test_senseless_answers_are_not(answer: str) -> None:
    assert not plain_prompts()[0].is_sensible(answer)


async def test_every_policy_gets_the_same_draws_behind_users(run: LearningRun) -> None:
    await run.start()
    await run.make_steps(1)
    await examined(run)
    by_version: dict[int | None, list[tuple[Any, ...]]] = {}
    for request in run.sampler.requests:
        assert request.priority is Priority.BACKGROUND
        if request.params.max_tokens == 1:
            continue  # a conversation that is warmed
        assert request.params.temperature == 0.7
        by_version.setdefault(request.version, []).append((tuple(request.prompt_ids), request.params.seed))
    assert len(by_version) == 2
    first, second = by_version.values()
    assert sorted(first) == sorted(second)
    assert len({seed for _, seed in first}) == len(first)


@pytest.mark.parametrize(("others", "most"), [(0, MAX_CONCURRENT_ALONE), (1, MAX_CONCURRENT)])
async def test_a_full_queue_is_waited_for_and_few_prompts_are_asked_at_once_beside_others(
    tmp_path: Path, renderer: ChatRenderer, others: int, most: int
) -> None:
    refused = 0
    at_once = set()

    class Busy(Answering):
        def stats(self) -> EngineStats:
            return EngineStats(True, self.open + others, 0, 0)

        def sample(self, request: SampleRequest) -> ScriptedStream:
            nonlocal refused
            at_once.add(self.open + 1)
            refused += 1
            if refused < 4:
                raise QueueFull(7, retry_after=0)
            return super().sample(request)

    sampler = Busy(renderer, sensible)
    sampler.seconds_per_token = 0.0001
    guard = Guard(tmp_path / FILE, sampler, renderer)
    policy, why = await guard.examine(0)
    assert (policy.passed, policy.asked, why) == (32, 32, "")
    assert max(at_once) == most
    assert policy.numbers["distance"] == 0.0
    assert policy.numbers["perplexity"] == pytest.approx(math.exp(0.5), abs=0.001)


async def test_when_others_begin_to_ask_most_answers_stop_at_once_and_come_later(
    tmp_path: Path, renderer: ChatRenderer
) -> None:
    others = 0

    class Shared(Answering):
        def stats(self) -> EngineStats:
            return EngineStats(True, self.open + others, 0, 0)

    sampler = Shared(renderer, sensible)
    guard = Guard(tmp_path / FILE, sampler, renderer)
    sampler.may_send = 0
    examining = asyncio.create_task(guard.examine(0))
    await until(lambda: sampler.open == MAX_CONCURRENT_ALONE)
    others = 1
    await until(lambda: sampler.open == MAX_CONCURRENT)
    await asyncio.sleep(0.1)
    assert sampler.open == MAX_CONCURRENT
    others = 0
    await until(lambda: sampler.open == MAX_CONCURRENT_ALONE)
    sampler.may_send = math.inf
    policy, why = await examining
    assert (policy.passed, policy.asked, why) == (32, 32, "")
    assert sampler.open == 0


async def test_without_a_base_model_beside_the_policy_it_measures_what_it_can(
    tmp_path: Path, renderer: ChatRenderer
) -> None:
    sampler = Answering(renderer, sensible)
    sampler.capabilities = replace(sampler.capabilities, keeps_base=False)
    sampler.served = {0: []}
    guard = Guard(tmp_path / FILE, sampler, renderer)
    start, _ = await guard.examine(0)
    # It is asked all that may be needed for later, as long as it is there.
    assert start.asked == 32 * MAX_ROUNDS
    guard.accept(start)
    sampler.served = {1: []}
    policy, why = await guard.examine(1)
    assert (policy.asked, why) == (32, "")
    assert "distance" not in policy.numbers


def test_some_prompts_are_the_runs_own_and_are_short_first_messages(book: Book) -> None:
    def ask(*messages: dict[str, Any], **given: Any) -> int:
        return book.put(State.READY, messages=list(messages), kind=TurnKind.MAIN, **given)

    user = {"role": "user", "content": "How are you?"}
    number = ask(user)
    ask(user)
    ask({"role": "system", "content": "Be brief."}, user)
    ask({"role": "user", "content": "x" * 1000})
    assert own_prompts(book.ledger) == [PlainPrompt(f"turn-{number}", "How are you?", owner="me")]
    for place in range(20):
        ask({"role": "user", "content": f"Question {place}"})
    assert len(own_prompts(book.ledger)) == MAX_OWN


@pytest.mark.parametrize("content", [None, "", "{", "[]", '{"start": 3}', '{"start": {"x": 1}}'])
def test_a_missing_or_damaged_file_is_a_new_beginning(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / FILE).write_text(content)
    assert GuardState.read(tmp_path / FILE) == GuardState()
    assert GuardState().as_json() is None


async def test_a_policy_that_only_forgets_to_write_code_is_worse(tmp_path: Path, renderer: ChatRenderer) -> None:
    def talks(policy: list[list[int]], prompt: PlainPrompt) -> str:
        answer = sensible(policy, prompt)
        return answer.replace("```", "") if policy else answer

    sampler = Answering(renderer, talks)
    sampler.served[1] = [[1]]
    guard = Guard(tmp_path / FILE, sampler, renderer)
    assert guard.begin(0)
    _policy, why = await guard.examine(1)
    assert why == "sensible answers to plain prompts fell from 64 to 48 of 64"


async def test_a_brief_examination_names_a_policy_that_may_be_worse(tmp_path: Path, renderer: ChatRenderer) -> None:
    def a_little_worse(policy: list[list[int]], prompt: PlainPrompt) -> str:
        return GARBAGE if policy and zlib.crc32(prompt.text.encode()) % 7 == 0 else sensible(policy, prompt)

    sampler = Answering(renderer, a_little_worse)
    sampler.served[1] = [[1]]
    guard = Guard(tmp_path / FILE, sampler, renderer)
    assert guard.begin(0)
    _policy, why = await guard.examine(1, brief=True)
    assert why == "it may be worse"
    policy, why = await guard.examine(1)
    assert why.startswith("sensible answers to plain prompts fell from ")
    assert policy.asked > BRIEF_ROUNDS * len(plain_prompts())
