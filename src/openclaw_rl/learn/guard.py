"""Watches over the policy while it learns: whether it still answers plain questions sensibly.

Every policy is asked the same prompts with the same random draws: everyday questions that we ship, and some of the
run's own first messages. Only sense counts: short answers, another language or a pirate's tone are not worse.
"""

import asyncio
import contextlib
import json
import logging
import math
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from prometheus_client import CollectorRegistry, Gauge

from openclaw_rl.aio import gather_or_cancel
from openclaw_rl.engines.base import EngineError, QueueFull, Sampler, VersionGone
from openclaw_rl.lab.statistics import probability_of_so_few
from openclaw_rl.learn.lineage import MAX_SHARE, Budget
from openclaw_rl.ledger.sessions import SET_ASIDE
from openclaw_rl.ledger.store import Ledger
from openclaw_rl.ledger.turns import conversation_starts, load_readable
from openclaw_rl.rendering.chat import ChatRenderer
from openclaw_rl.sense import check, is_other_language, repeats, words_of
from openclaw_rl.types import (
    BASE_VERSION,
    FinishReason,
    Priority,
    SampledToken,
    SampleRequest,
    SamplingParams,
    ScoreRequest,
)

log = logging.getLogger(__name__)

PROMPTS = Path(__file__).with_name("plain_prompts.jsonl")
#: The run's own first messages: how many are asked, how long they may be, and how many turns are looked at for them.
MAX_OWN, MAX_OWN_CHARACTERS, MAX_SEARCHED_TURNS = 8, 300, 50
#: A policy is asked again, with other draws, while its answers are this improbable for one that is as good as the
#: reference. It is worse if after the last round all answers are so improbable, and the share of sensible ones fell by
#: so much; after earlier rounds, if it is clear. Of policies that do not change, fewer than 1 in 50 are called worse
#: within 50 examinations; a fall from 0.97 to 0.79 is found by a single one in more than 9 of 10 cases
#: (tests/learn/test_guard.py).
SUSPICIOUS, WORSE, CLEARLY_WORSE, MIN_FALL, MAX_ROUNDS = 0.2, 0.0002, 1e-6, 0.08, 5
#: In the run directory: the references, the last examination, and what it led to.
FILE = "guard.json"
TEMPERATURE, MAX_TOKENS = 0.7, 96
PRACTISED = "practised-"
#: Prompts that are asked at the same time: few, because people's answers are sampled beside them.
MAX_CONCURRENT = 4
#: The gauges, besides the version that was examined.
NUMBERS = {
    "sensible": "Share of plain prompts that the policy answers sensibly.",
    "tokens": "Mean length of its answers in tokens.",
    "faulty": "Share of its answers that were cut off or repeat themselves.",
    "distance": "Mean log-prob of its answers' tokens, minus that under the base model.",
    "perplexity": "Perplexity of its answers under the base model.",
}

#: Their names in the reports of steps.
METRICS = tuple(f"guard_{name}" for name in NUMBERS)


@dataclass(frozen=True, slots=True)
class PlainPrompt:
    """A question that every policy is asked."""

    key: str
    """The same for the same question in every program."""
    text: str
    reference: str = ""
    """What an answer is about; empty if nobody knows, so that it may be about anything."""
    owner: str = ""

    def is_sensible(self, answer: str) -> bool:
        anything = not self.reference or is_other_language(answer)
        return check(answer, self.text, self.reference, translated=anything).ok

    def seed(self, draw: int) -> int:
        """Of the random numbers for one of its answers, whichever policy gives it."""
        return zlib.crc32(f"{self.key} {draw}".encode())


@cache
def plain_prompts() -> tuple[PlainPrompt, ...]:
    """The questions that we ship."""
    read = map(json.loads, PROMPTS.read_text("utf-8").splitlines())
    return tuple(PlainPrompt(f"plain-{zlib.crc32(one['text'].encode()):08x}", **one) for one in read)


def practised_prompt(text: str, owner: str) -> PlainPrompt:
    """A message of the kind that a note with a scope is for. Nobody knows what its answer is about."""
    return PlainPrompt(f"{PRACTISED}{zlib.crc32(text.encode()):08x}", text, owner=owner)


def own_prompts(ledger: Ledger, owner: str | None = None) -> list[PlainPrompt]:
    """The first messages of the run's first conversations, or of an owner's: short ones, without a system prompt and
    tools, each once."""
    found: dict[str, PlainPrompt] = {}
    for number in ledger.read(conversation_starts, MAX_SEARCHED_TURNS, owner):
        turn = ledger.read(load_readable, number)
        messages = turn.messages if turn else []
        text = messages[0].get("content") if len(messages) == 1 and messages[0].get("role") == "user" else None
        if turn and isinstance(text, str) and text.strip() and len(text) <= MAX_OWN_CHARACTERS:
            found.setdefault(text, PlainPrompt(f"turn-{number}", text, owner=turn.session.owner))
        if len(found) == MAX_OWN:
            break
    return list(found.values())


@dataclass(frozen=True, slots=True)
class PlainAnswers:
    """How a policy answered."""

    version: int
    sensible: Mapping[str, Sequence[bool]] = field(default_factory=dict)
    """For each prompt: whether its answers were sensible, one for each round."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """By the names in `NUMBERS`, of the first round."""
    created: float = 0.0

    @property
    def passed(self) -> int:
        return sum(map(sum, self.sensible.values()))

    @property
    def asked(self) -> int:
        return sum(map(len, self.sensible.values()))

    def without_practised(self) -> "PlainAnswers":
        return replace(self, sensible={key: got for key, got in self.sensible.items() if not key.startswith(PRACTISED)})

    def shared(self, other: "PlainAnswers") -> "PlainAnswers":
        """The same without the prompts that another policy was not asked."""
        return replace(self, sensible={key: got for key, got in self.sensible.items() if key in other.sensible})


def probability(reference: PlainAnswers, policy: PlainAnswers) -> float:
    """How probable so few sensible answers are for a policy that answers each prompt as well as the reference."""
    shared = [(reference.sensible.get(key, ()), got) for key, got in policy.sensible.items()]
    return probability_of_so_few(shared)


def why_worse(reference: PlainAnswers, policy: PlainAnswers, limit: float = WORSE) -> str:
    """Why a policy is worse than the reference; empty if it may be as good."""
    before, now = reference.shared(policy), policy.shared(reference)
    if probability(reference, policy) >= limit or before.passed / before.asked - now.passed / now.asked < MIN_FALL:
        return ""
    of = "" if before.asked == now.asked else f" of {before.asked}"
    return f"sensible answers to plain prompts fell from {before.passed}{of} to {now.passed} of {now.asked}"


@dataclass(slots=True)
class GuardState:
    """What the guard remembers: in memory and, for the next start, in the run directory."""

    start: PlainAnswers | None = None
    """The policy from which learning began: slow drift is seen too."""
    good: PlainAnswers | None = None
    """The last policy that was good. It has a checkpoint, or is the base model."""
    last: PlainAnswers | None = None
    """The last policy that was examined."""
    worse: str = ""
    """Why `last` is worse, until the policy before it serves again."""
    cautious: str = ""
    """Why steps need a good score among theirs: the guard went back, and no policy was good since."""

    @classmethod
    def read(cls, file: Path) -> "GuardState":
        """Empty if there is no file, or a damaged one."""
        try:
            given = json.loads(file.read_text("utf-8"))
            parts = {name: PlainAnswers(**given[name]) if given[name] else None for name in ("start", "good", "last")}
            return cls(**parts, worse=str(given["worse"]), cautious=str(given["cautious"]))
        except FileNotFoundError:
            return cls()
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            log.warning("%s cannot be read, so the guard begins anew: %s", file, error)
            return cls()

    def write(self, file: Path) -> None:
        new = file.with_suffix(".new")
        new.write_text(json.dumps(asdict(self)) + "\n", "utf-8")
        new.replace(file)

    def as_json(self) -> dict[str, Any] | None:
        """The last numbers, for people and programs; None before the first examination."""
        last, start = self.last, self.start
        if last is None or start is None or not last.asked:
            return None
        return {
            "policy_version": last.version,
            "examined": last.created,
            "passed": last.passed,
            "asked": last.asked,
            "at_start": {"passed": start.passed, "asked": start.asked},
            "last_good": self.good.version if self.good else None,
            **last.numbers,
            "in_words": self.in_words(),
            "worse": self.worse,
            "cautious": self.cautious,
        }

    def in_words(self) -> str:
        """What was found last, as sentences; empty before the first examination."""
        last, start = self.last, self.start
        if last is None or start is None or not last.asked:
            return ""
        distance = f", {last.numbers['distance']:.2f} from the base model" if "distance" in last.numbers else ""
        said = (
            f"policy {last.version} gave {last.passed} sensible answers to {last.asked} plain prompts (at the start: "
            f"{start.passed} of {start.asked}), {last.numbers.get('tokens', 0):.0f} tokens each{distance}."
        )
        if self.cautious:
            said += f" It went back ({self.cautious}); 'openclaw-rl relearn' learns from the turns since all the same."
        return said


class Guard:
    """Examines policies, and remembers the last good one.

    Guarantees:
    - Examinations take at most `share` of the time; only the first of a process is not counted in advance.
    - Nothing that a policy answers is stored or shown: only counts.
    - A prompt is asked as background work, so requests of users go first.
    - An examination that is cancelled or fails changes nothing.
    """

    def __init__(
        self,
        file: Path,
        sampler: Sampler,
        renderer: ChatRenderer,
        own: Callable[[], list[PlainPrompt]] = list,
        registry: CollectorRegistry | None = None,
        share: float = MAX_SHARE,
        budget: Budget | None = None,
    ) -> None:
        """`budget` is that of all guards of a server, which then take at most its share together."""
        self.file = file
        self.sampler = sampler
        self.renderer = renderer
        self.own = own
        self.also: Sequence[PlainPrompt] = ()
        """What is asked besides, while a practice may harm answers that plain prompts do not ask for."""
        self.state = GuardState.read(file)
        self._budget = budget or Budget(share)
        names = {**NUMBERS, "version": "The policy version that was examined last."} if registry else {}
        self._gauges = {name: Gauge(f"openclaw_guard_{name}", doc, registry=registry) for name, doc in names.items()}
        self._show()

    def is_due(self, version: int) -> bool:
        """Whether a policy should be examined now, or left: it has not been found good, and there is time for it."""
        now = time.monotonic()
        self._budget.add_time(now - self._budget.seen)
        self._budget.seen = now
        self.begin(version)
        good = self.state.good
        is_known = good is not None and good.version == version
        return not is_known and (self._budget.is_due or self.is_worse(version))

    def begin(self, version: int) -> bool:
        """Whether there is a policy to compare later ones with. The base model becomes it if it serves now."""
        if version == BASE_VERSION and self.state.start is None and self.keeps_base:
            # Only the first policy is compared with it, so it need not answer anything before.
            self.state.start = self.state.good = PlainAnswers(BASE_VERSION)
            self._save()
        return self.state.start is not None

    def is_worse(self, version: int) -> bool:
        """Whether this policy was found worse, and still serves."""
        last = self.state.last
        return bool(self.state.worse) and last is not None and last.version == version

    async def examine(self, version: int) -> tuple[PlainAnswers, str]:
        """How a policy answers, and why it is worse than the one at the start or the last good one; empty if it is not.

        Raises EngineError. The caller tells `accept` or `refuse`.
        """
        begun = time.monotonic()
        try:
            prompts = [*plain_prompts(), *self.also, *await asyncio.to_thread(self.own)]
            # A base model that cannot be asked later is asked everything now.
            is_last_chance = self.state.start is None and not self.keeps_base
            policy = await self._ask(PlainAnswers(version), prompts, MAX_ROUNDS if is_last_chance else 1)
            return await self._compare(policy, prompts)
        finally:
            self._budget.seen = time.monotonic()
            self._budget.add_cost(self._budget.seen - begun)

    @property
    def keeps_base(self) -> bool:
        return self.sampler.capabilities.keeps_base

    async def _compare(self, policy: PlainAnswers, prompts: Sequence[PlainPrompt]) -> tuple[PlainAnswers, str]:
        """Ask the policy and its references until the difference can be chance, cannot be, or for the last time."""
        state = self.state
        references = {one.version: one for one in (state.start, state.good) if one}
        why = ""
        for rounds in range(1, MAX_ROUNDS + 1):
            policy = await self._ask(policy, prompts, rounds)
            for version, reference in references.items():
                references[version] = await self._ask_again(reference, prompts, rounds)
            if not any(probability(reference, policy) < SUSPICIOUS for reference in references.values()):
                break
            # One round alone never decides, and before the last one it must be very clear.
            limit = WORSE if rounds == MAX_ROUNDS else CLEARLY_WORSE
            reasons = [why_worse(one, policy, limit) for one in references.values()] if rounds > 1 else []
            if why := next(filter(None, reasons), ""):
                break
        # What was asked because of a practice is no measure afterwards.
        state.start = references[state.start.version].without_practised() if state.start else None
        state.good = references[state.good.version].without_practised() if state.good else None
        return policy.without_practised(), why

    def accept(self, policy: PlainAnswers) -> None:
        """Remember a policy as the last good one. Its checkpoint exists."""
        state = self.state
        state.start = state.start or policy
        state.good = state.last = policy
        state.worse = state.cautious = ""
        self._save()
        log.info("The guard: %s", state.in_words())

    def refuse(self, policy: PlainAnswers, why: str) -> str:
        """Remember that a policy is worse, until `went_back` is called; the reason for the record."""
        self.state.last = policy
        self.state.worse = f"{SET_ASIDE}{why}"
        self._save()
        return self.state.worse

    def went_back(self, version: int, *, to_good: bool, cautious: bool = True) -> None:
        """An earlier policy serves as `version`; whether it is the last good one, which is then not examined again, and
        whether steps now need a good score."""
        state = self.state
        known = state.good if to_good else state.start
        state.good = replace(known, version=version) if known and to_good else known
        if state.last is not None and not state.last.asked:
            state.last = state.good
        state.cautious = state.worse if cautious else ""
        state.worse = ""
        self._save()

    def left_line(self, line: Sequence[int]) -> None:
        """Somebody rolled back to before the last good policy: that one is no measure any more."""
        state = self.state
        if state.good is not None and state.good.version not in (BASE_VERSION, *line):
            state.good = state.start
            state.worse = ""

    def dare(self) -> None:
        """Let steps be made without a good score again."""
        self.state.cautious = ""
        self._save()

    @property
    def last_good(self) -> int:
        """The version of the last good policy; the base model if none was."""
        good = self.state.good or self.state.start
        return good.version if good else BASE_VERSION

    @property
    def is_cautious(self) -> bool:
        """Whether a step needs a good score among those of its turns."""
        return bool(self.state.cautious)

    @property
    def numbers(self) -> dict[str, float]:
        """The last numbers, by their names in the reports of steps."""
        last = self.state.last
        return {f"guard_{name}": value for name, value in last.numbers.items()} if last else {}

    def _save(self) -> None:
        self._show()
        try:
            self.state.write(self.file)
        except OSError as error:
            log.warning("The guard's state was not written: %s", error)

    def _show(self) -> None:
        last = self.state.last
        shown = {**last.numbers, "version": float(last.version)} if last else {}
        for name in self._gauges.keys() & shown.keys():
            self._gauges[name].set(shown[name])

    async def _ask_again(self, known: PlainAnswers, prompts: Sequence[PlainPrompt], rounds: int) -> PlainAnswers:
        """Ask a reference what it was not asked yet, if the sampler still holds it."""
        if known.version == BASE_VERSION and not self.keeps_base:
            return known
        try:
            return await self._ask(known, prompts, rounds)
        except VersionGone:
            return known

    async def _ask(self, known: PlainAnswers, prompts: Sequence[PlainPrompt], rounds: int) -> PlainAnswers:
        """The same with so many answers to each prompt."""
        missing = [
            (prompt, draw) for prompt in prompts for draw in range(len(known.sensible.get(prompt.key, ())), rounds)
        ]
        if not missing:
            return known
        left = iter(missing)
        workers = min(MAX_CONCURRENT, self.sampler.limits.max_sequences, len(missing))
        answers = await gather_or_cancel([self._work(left, known.version) for _ in range(workers)])
        got = sorted((one for some in answers for one in some), key=lambda one: one.draw)
        sensible = {key: list(values) for key, values in known.sensible.items()}
        for answer in got:
            sensible.setdefault(answer.key, []).append(answer.sensible)
        numbers = known.numbers or summary([answer for answer in got if answer.draw == 0])
        return replace(known, sensible=sensible, numbers=numbers, created=known.created or time.time())

    async def _work(self, left: "Iterator[tuple[PlainPrompt, int]]", version: int) -> "list[GuardAnswer]":
        """Ask the prompts that this worker takes from the shared iterator."""
        answers = [await self._answer(prompt, draw, version) for prompt, draw in left]
        return [answer for answer in answers if answer]

    async def _answer(self, prompt: PlainPrompt, draw: int, version: int) -> "GuardAnswer | None":
        """A policy's answer; None if the prompt does not fit into the context."""
        ids = self.renderer.prompt(self.renderer.text([{"role": "user", "content": prompt.text}])).ids
        room = self.sampler.limits.max_context_tokens - len(ids)
        if room < 1:
            return None
        stops = self.renderer.tokenizer.eos_ids
        params = SamplingParams(min(MAX_TOKENS, room), TEMPERATURE, seed=prompt.seed(draw), stop_token_ids=stops)
        request = SampleRequest(ids, params, version=version, priority=Priority.BACKGROUND, owner=prompt.owner)
        tokens = await self._tokens(request)
        sampled = [token.token_id for token in tokens]
        text = str(self.renderer.tokenizer.backend.decode(sampled, skip_special_tokens=True))
        faulty = tokens[-1].finish is FinishReason.LENGTH or repeats(words_of(text))
        raw = self.sampler.capabilities.raw_logprobs
        own = [token.logprob for token in tokens] if raw else None
        base = await self._base_logprobs(request, sampled, own, version) if draw == 0 else None
        return GuardAnswer(prompt.key, draw, prompt.is_sensible(text), len(sampled), faulty, own, base)

    async def _tokens(self, request: SampleRequest) -> list[SampledToken]:
        """The tokens of an answer, once the queue has room for it."""
        while True:
            try:
                with contextlib.closing(self.sampler.sample(request)) as stream:
                    return [token async for tokens in stream for token in tokens]
            except QueueFull as error:
                await asyncio.sleep(error.retry_after)

    async def _base_logprobs(
        self, request: SampleRequest, sampled: Sequence[int], own: Sequence[float] | None, version: int
    ) -> Sequence[float] | None:
        """The log-probs of an answer under the base model, if it can be asked."""
        if version == BASE_VERSION:
            return own
        if not self.keeps_base:
            return None
        ids = [*request.prompt_ids, *sampled]
        try:
            return (await self.sampler.score(ScoreRequest(ids, len(sampled), owner=request.owner))).logprobs
        except EngineError as error:
            log.debug("The base model cannot score an answer: %s", error)
            return None


@dataclass(frozen=True, slots=True)
class GuardAnswer:
    """What is known about one answer, without its text."""

    key: str
    draw: int
    sensible: bool
    tokens: int
    faulty: bool
    own: Sequence[float] | None
    base: Sequence[float] | None


def summary(answers: Sequence[GuardAnswer]) -> dict[str, float]:
    """The numbers of a round."""
    if not answers:
        return {}
    base = [logprob for answer in answers for logprob in answer.base or ()]
    pairs = [(answer.own, answer.base) for answer in answers if answer.own and answer.base]
    gaps = [mine - theirs for own, others in pairs for mine, theirs in zip(own, others, strict=True)]
    numbers = {
        "sensible": fmean(answer.sensible for answer in answers),
        "tokens": fmean(answer.tokens for answer in answers),
        "faulty": fmean(answer.faulty for answer in answers),
        **({"distance": fmean(gaps)} if gaps else {}),
        **({"perplexity": math.exp(-fmean(base))} if base else {}),
    }
    return {name: round(value, 4) for name, value in numbers.items()}
