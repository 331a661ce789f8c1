"""A discrete-event simulation: users who talk to samplers, a judge and one learner. No clock and no threads: the same
seed gives the same numbers.

Every turn is somewhere, in this order: it waits for a place in a sampler, is answered, awaits the user's next message,
waits for the judge, is judged, waits for a step, is in a step, and has been trained on. Or it has been dropped: it had
no signal, or its policy was too old.
"""

import heapq
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import fmean


class Place(StrEnum):
    """Where a turn is."""

    QUEUED = "queued"
    ANSWERED = "being answered"
    AWAITING = "awaiting the next message"
    TO_JUDGE = "waiting for the judge"
    JUDGED = "waiting for a step"
    TRAINED = "in a step"
    APPLIED = "trained on"
    WITHOUT_SIGNAL = "no signal"
    STALE = "too old"


@dataclass(frozen=True, slots=True)
class Fleet:
    """The parts and their speeds. The defaults are a 4B model on an H200, as docs/results/scale.md derives them."""

    users: int = 100
    samplers: int = 1
    minutes: float = 30.0
    seed: int = 0
    think_seconds: float = 30.0
    """From the end of an answer to the next message, on average."""
    prompt_tokens: int = 300
    """New in each request; the rest of the conversation is cached."""
    answer_tokens: int = 200
    signal_share: float = 0.5
    """Turns from which something can be learned."""
    places: int = 64
    """Sequences that a sampler computes at the same time."""
    step_ms: float = 3.92
    step_ms_per_sequence: float = 0.0514
    """A decoding step of b sequences takes step_ms + b * step_ms_per_sequence."""
    prefill_rate: float = 64_000.0
    judges: int = 8
    """Turns that are judged at the same time."""
    judge_seconds: float = 1.5
    batch_size: int = 16
    context_tokens: int = 1000
    """That the learner reads for one turn, its answer included."""
    learner_seconds: float = 0.12
    learner_rate: float = 32_600.0
    """A step of n tokens takes learner_seconds + n / learner_rate."""
    publish_seconds: float = 1.0
    max_staleness: int = 8


@dataclass(slots=True)
class SimulatedTurn:
    """One request and what became of it."""

    user: int
    asked: float
    version: int = 0
    started: float = 0.0
    place: Place = Place.QUEUED


@dataclass(slots=True)
class SimulatedSampler:
    """Continuous batching: all sequences advance at the same pace, which depends on how many there are."""

    fleet: Fleet
    running: list[tuple[float, int, SimulatedTurn]] = field(default_factory=list)
    """(the count of tokens at which it ends, a number to break ties, the turn)"""
    waiting: deque[SimulatedTurn] = field(default_factory=deque)
    tokens: float = 0.0
    """That each sequence has got since the start."""
    last: float = 0.0
    stalled_until: float = 0.0
    """While prompts are read, no tokens are drawn."""
    busy: float = 0.0
    """Places times seconds."""
    changes: int = 0

    @property
    def load(self) -> int:
        return len(self.running) + len(self.waiting)

    @property
    def seconds_per_token(self) -> float:
        return (self.fleet.step_ms + self.fleet.step_ms_per_sequence * len(self.running)) / 1000

    def advance(self, now: float) -> None:
        self.busy += len(self.running) * (now - self.last)
        drawing = max(0.0, now - max(self.last, min(self.stalled_until, now)))
        self.tokens += drawing / self.seconds_per_token
        self.last = now

    def begin(self, turn: SimulatedTurn, now: float, number: int) -> None:
        self.stalled_until = max(now, self.stalled_until) + self.fleet.prompt_tokens / self.fleet.prefill_rate
        heapq.heappush(self.running, (self.tokens + self.fleet.answer_tokens, number, turn))

    def next_end(self, now: float) -> float:
        """When the next answer is complete, if nothing changes."""
        return max(now, self.stalled_until) + max(0.0, self.running[0][0] - self.tokens) * self.seconds_per_token


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a simulation gave."""

    asked: int
    places: dict[Place, int]
    answers_a_minute: float
    samples_a_minute: float
    """Turns that were trained on."""
    mean_wait: float
    """Seconds in the queue."""
    longest_wait: float
    mean_staleness: float
    """Versions between a turn's policy and the one that learns from it."""
    max_staleness: int
    steps: int
    sampler_use: float
    """Share of the places that were taken, on average."""
    judge_use: float
    learner_use: float
    turns_a_sampler: tuple[int, ...]

    @property
    def bottleneck(self) -> str:
        """What saturates first: the busiest part, if it is busy nine tenths of the time."""
        use = {"samplers": self.sampler_use, "judge": self.judge_use, "learner": self.learner_use}
        part = max(use, key=lambda name: use[name])
        return part if use[part] >= 0.9 else "users"


class Simulation:
    """One run. `step` handles the next event; `turns` has every turn that was asked for."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet, self.now = fleet, 0.0
        self.turns: list[SimulatedTurn] = []
        self.samplers = [SimulatedSampler(fleet) for _ in range(fleet.samplers)]
        self.served = [0] * fleet.samplers
        # Each user has a stream of its own, so that other parts change nothing about what users do.
        self._users = [random.Random(fleet.seed * 1_000_003 + user) for user in range(fleet.users)]
        self._to_judge: deque[SimulatedTurn] = deque()
        self._judging = 0
        self._judged: deque[SimulatedTurn] = deque()
        self._version = 0
        self._learns = False
        self._waits: list[float] = []
        self._staleness: list[int] = []
        self._judge_busy = self._learner_busy = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = 0
        for user in range(fleet.users):
            self._at(self._users[user].uniform(0, fleet.think_seconds), lambda user=user: self._ask(user, None))

    def run(self) -> Outcome:
        end = self.fleet.minutes * 60
        while self._events and self._events[0][0] <= end:
            self.step()
        for sampler in self.samplers:
            sampler.advance(end)
        return self._outcome(end)

    def step(self) -> None:
        self.now, _, action = heapq.heappop(self._events)
        action()

    def _at(self, time: float, action: Callable[[], None]) -> None:
        self._numbers += 1
        heapq.heappush(self._events, (time, self._numbers, action))

    def _ask(self, user: int, before: SimulatedTurn | None) -> None:
        """A user sends a message, which is the next state of the turn before."""
        if before is not None:
            self._ready(before)
        turn = SimulatedTurn(user, self.now)
        self.turns.append(turn)
        index = min(range(len(self.samplers)), key=lambda place: self.samplers[place].load)
        self.served[index] += 1
        self.samplers[index].waiting.append(turn)
        self._fill(index)

    def _fill(self, index: int) -> None:
        """Give free places to those who wait, and say when the next answer is complete."""
        sampler = self.samplers[index]
        sampler.advance(self.now)
        while sampler.waiting and len(sampler.running) < self.fleet.places:
            turn = sampler.waiting.popleft()
            turn.place, turn.version, turn.started = Place.ANSWERED, self._version, self.now
            self._waits.append(self.now - turn.asked)
            self._numbers += 1
            sampler.begin(turn, self.now, self._numbers)
        sampler.changes += 1
        if sampler.running:
            change = sampler.changes
            self._at(sampler.next_end(self.now), lambda: self._complete(index, change))

    def _complete(self, index: int, change: int) -> None:
        sampler = self.samplers[index]
        if change != sampler.changes:
            return  # others came or went since
        sampler.advance(self.now)
        _, _, turn = heapq.heappop(sampler.running)
        turn.place = Place.AWAITING
        thinks = self._users[turn.user].expovariate(1 / self.fleet.think_seconds)
        self._at(self.now + thinks, lambda: self._ask(turn.user, turn))
        self._fill(index)

    def _ready(self, turn: SimulatedTurn) -> None:
        turn.place = Place.TO_JUDGE
        self._to_judge.append(turn)
        self._judge()

    def _judge(self) -> None:
        while self._to_judge and self._judging < self.fleet.judges:
            turn = self._to_judge.popleft()
            self._judging += 1
            self._judge_busy += self.fleet.judge_seconds
            self._at(self.now + self.fleet.judge_seconds, lambda turn=turn: self._decide(turn))

    def _decide(self, turn: SimulatedTurn) -> None:
        self._judging -= 1
        if self._users[turn.user].random() < self.fleet.signal_share:
            turn.place = Place.JUDGED
            self._judged.append(turn)
        else:
            turn.place = Place.WITHOUT_SIGNAL
        self._learn()
        self._judge()

    def _learn(self) -> None:
        """Begin a step if there are enough turns that are not too old."""
        fleet = self.fleet
        if self._learns or len(self._judged) < fleet.batch_size:
            return
        self._drop_stale()
        if len(self._judged) < fleet.batch_size:
            return
        batch = [self._judged.popleft() for _ in range(fleet.batch_size)]
        for turn in batch:
            turn.place = Place.TRAINED
            self._staleness.append(self._version - turn.version)
        self._learns = True
        seconds = fleet.learner_seconds + fleet.batch_size * fleet.context_tokens / fleet.learner_rate
        self._learner_busy += seconds + fleet.publish_seconds
        self._at(self.now + seconds + fleet.publish_seconds, lambda: self._publish(batch))

    def _drop_stale(self) -> None:
        fresh: deque[SimulatedTurn] = deque()
        for turn in self._judged:
            if self._version - turn.version > self.fleet.max_staleness:
                turn.place = Place.STALE
            else:
                fresh.append(turn)
        self._judged = fresh

    def _publish(self, batch: list[SimulatedTurn]) -> None:
        for turn in batch:
            turn.place = Place.APPLIED
        self._version += 1
        self._learns = False
        self._learn()

    def _outcome(self, end: float) -> Outcome:
        places = Counter(turn.place for turn in self.turns)
        unanswered = places[Place.QUEUED] + places[Place.ANSWERED]
        return Outcome(
            asked=len(self.turns),
            places={place: places[place] for place in Place},
            answers_a_minute=(len(self.turns) - unanswered) / self.fleet.minutes,
            samples_a_minute=places[Place.APPLIED] / self.fleet.minutes,
            mean_wait=fmean(self._waits) if self._waits else 0.0,
            longest_wait=max(self._waits, default=0.0),
            mean_staleness=fmean(self._staleness) if self._staleness else 0.0,
            max_staleness=max(self._staleness, default=0),
            steps=self._version,
            sampler_use=sum(sampler.busy for sampler in self.samplers) / (end * self.fleet.places * len(self.samplers)),
            judge_use=min(1.0, self._judge_busy / (end * self.fleet.judges)),
            learner_use=min(1.0, self._learner_busy / end),
            turns_a_sampler=tuple(self.served),
        )


def simulate(fleet: Fleet) -> Outcome:
    """Run a fleet to its end."""
    return Simulation(fleet).run()
