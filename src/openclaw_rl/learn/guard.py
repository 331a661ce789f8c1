"""Watches over the policy while it learns: whether it still answers plain prompts sensibly."""

import asyncio
import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Gauge

from openclaw_rl.engines.base import Sampler, VersionGone
from openclaw_rl.lab.statistics import probability_of_so_few
from openclaw_rl.learn.lineage import MAX_SHARE, Budget
from openclaw_rl.learn.plain_answers import PlainAnswers, PlainAsker, PlainPrompt, plain_prompts
from openclaw_rl.ledger.sessions import SET_ASIDE
from openclaw_rl.rendering.chat import ChatRenderer
from openclaw_rl.types import BASE_VERSION

log = logging.getLogger(__name__)

#: A policy is asked again, with other draws, while its answers are this improbable for one that is as good as the
#: reference. It is worse if after the last round all answers are so improbable, and the share of sensible ones fell by
#: so much; after earlier rounds, if it is clear. Of policies that do not change, fewer than 1 in 50 are called worse
#: within 50 examinations; a fall from 0.97 to 0.79 is found by a single one in more than 9 of 10 cases
#: (tests/learn/test_guard.py).
SUSPICIOUS, WORSE, CLEARLY_WORSE, MIN_FALL, MAX_ROUNDS = 0.2, 0.0002, 1e-6, 0.08, 5
#: Rounds of a brief examination, after which a policy that may be worse is not remembered as good.
BRIEF_ROUNDS = 2
#: In the run directory: the references, the last examination, and what it led to.
FILE = "guard.json"
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
        self.own = own
        self.also: Sequence[PlainPrompt] = ()
        """What is asked besides, while a practice may harm answers that plain prompts do not ask for."""
        self.state = GuardState.read(file)
        self._asker = PlainAsker(sampler, renderer)
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

    async def examine(self, version: int, *, brief: bool = False) -> tuple[PlainAnswers, str]:
        """How a policy answers, and why it is worse than the one at the start or the last good one; empty if it is not.

        A `brief` examination also names a policy that may be worse. Raises EngineError. The caller tells `accept` or
        `refuse`.
        """
        begun = time.monotonic()
        try:
            prompts = [*plain_prompts(), *self.also, *await asyncio.to_thread(self.own)]
            # A base model that cannot be asked later is asked everything now.
            is_last_chance = self.state.start is None and not self.keeps_base
            policy = await self._asker.ask(PlainAnswers(version), prompts, MAX_ROUNDS if is_last_chance else 1)
            return await self._compare(policy, prompts, BRIEF_ROUNDS if brief else MAX_ROUNDS)
        finally:
            self._budget.seen = time.monotonic()
            self._budget.add_cost(self._budget.seen - begun)

    @property
    def keeps_base(self) -> bool:
        """Whether the base model can be asked later."""
        return self.sampler.capabilities.keeps_base

    async def _compare(
        self, policy: PlainAnswers, prompts: Sequence[PlainPrompt], most: int
    ) -> tuple[PlainAnswers, str]:
        """Ask the policy and its references until the difference can be chance, cannot be, or for the last time."""
        state = self.state
        references = {one.version: one for one in (state.start, state.good) if one}
        why = ""
        for rounds in range(1, most + 1):
            policy = await self._asker.ask(policy, prompts, rounds)
            for version, reference in references.items():
                references[version] = await self._ask_again(reference, prompts, rounds)
            if not any(probability(reference, policy) < SUSPICIOUS for reference in references.values()):
                break
            # One round alone never decides, and before the last one it must be very clear.
            limit = WORSE if rounds == MAX_ROUNDS else CLEARLY_WORSE
            reasons = [why_worse(one, policy, limit) for one in references.values()] if rounds > 1 else []
            if why := next(filter(None, reasons), ""):
                break
        else:
            why = "" if most == MAX_ROUNDS else "it may be worse"
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
            return await self._asker.ask(known, prompts, rounds)
        except VersionGone:
            return known
