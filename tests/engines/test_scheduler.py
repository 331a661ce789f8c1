"""Batching changes when a token is computed, never which; checked with a pretend model that reads its cache."""

from collections import Counter
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openclaw_rl.engines.local.sampling.page_pool import PAGE_SIZE, PagePool
from openclaw_rl.engines.local.sampling.scheduler import Scheduler, Sequence, Work, pages_for
from openclaw_rl.types import FinishReason, Priority, SamplingParams
from support.properties import examples

STOP_TOKEN = 4
#: Far more steps than any of these runs needs: to go beyond means to go round in circles.
PATIENCE = 3000

Key = tuple[int, int]


@dataclass(frozen=True)
class Request:
    """What a client asks for, when (in steps), and when it gives up."""

    prompt: tuple[int, ...]
    max_tokens: int = 4
    n: int = 1
    version: int = 0
    owner: str = ""
    priority: Priority = Priority.USER
    stops: bool = False
    """Whether a STOP_TOKEN ends it."""
    arrives: int = 0
    cancelled: int | None = None

    @property
    def pages(self) -> int:
        return pages_for(len(self.prompt) + self.max_tokens)


def next_token(tokens: Items[int], version: int, index: int) -> int:
    """What the pretend model says after these tokens; siblings draw differently."""
    return (hash((tuple(tokens), version)) + index) % (STOP_TOKEN + 1)


def alone(request: Request, index: int) -> list[int]:
    """What a request gets when it has the model for itself."""
    tokens = list(request.prompt)
    while len(tokens) < len(request.prompt) + request.max_tokens:
        tokens.append(next_token(tokens, request.version, index))
        if request.stops and tokens[-1] == STOP_TOKEN:
            break
    return tokens


@dataclass(frozen=True)
class Launched:
    """A step that the model has computed, and what it drew."""

    work: list[Work]
    drawing: list[Sequence]
    drawn: list[int]


@dataclass
class Driver:
    """Plays worker and model: what it computes goes into `memory`, and what it draws comes from there."""

    pages: int
    max_sequences: int = 4
    prefill_tokens: int = 32
    runs_ahead: bool = False
    memory: dict[tuple[int, int], tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    """(page, offset) → the version and all tokens up to there, which is what keys and values depend on."""
    finished: dict[Key, list[int]] = field(default_factory=dict)
    order: list[Key] = field(default_factory=list)
    """Sequences in the order in which they first ran."""
    computed: Counter[Key] = field(default_factory=Counter)
    """How many tokens of each went through the model."""
    cached: dict[Key, int] = field(default_factory=dict)
    restarts: Counter[Key] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.pool = PagePool(self.pages)
        self.scheduler = Scheduler(self.pool, self.max_sequences, self.prefill_tokens)
        self._positions: dict[Sequence, int] = {}
        self._requests = 0
        self._steps = 0
        self.ahead: Launched | None = None
        self.launched_ahead = 0

    def add(self, request: Request) -> int:
        self._requests += 1
        params = SamplingParams(request.max_tokens, stop_token_ids=frozenset({STOP_TOKEN} if request.stops else ()))
        self.scheduler.add(
            Sequence(
                request=self._requests,
                index=index,
                tokens=list(request.prompt),
                params=params,
                version=request.version,
                slot=request.version,
                order=(int(request.priority), self._requests),
                owner=request.owner,
            )
            for index in range(request.n)
        )
        return self._requests

    def run(self) -> None:
        while not self.scheduler.idle:
            self.step()

    def step(self) -> None:
        self._steps += 1
        assert self._steps < PATIENCE, "no end in sight"
        launched, self.ahead = self.ahead, None
        if launched is None or not self.scheduler.still_running(launched.work):
            launched = self._launch(self.scheduler.plan(), [])
        self.scheduler.commit(self.scheduler.still_running(launched.work))
        if self.runs_ahead:
            before = list(self.scheduler.running)
            following = self.scheduler.plan_ahead(launched.work)
            assert self.scheduler.running == before, "nobody steps back for a step that is planned ahead"
            if following:
                self.launched_ahead += 1
                self.ahead = self._launch(following, launched.drawn)
        self._collect(launched)

    def _launch(self, work: list[Work], drawn: list[int]) -> "Launched":
        """The model computes at once, in the order of the launches; the scheduler sees what it drew later."""
        self._check(work)
        for item in work:
            self._compute(item, item.sequence.tokens + ([drawn[item.drawn_by]] if item.drawn_by >= 0 else []))
        drawing = [item for item in work if item.draws]
        return Launched(work, [item.sequence for item in drawing], [self._draw(item) for item in drawing])

    def _collect(self, launched: "Launched") -> None:
        staying = {item.sequence for item in self.scheduler.still_running(launched.work)}
        for sequence, token in zip(launched.drawing, launched.drawn, strict=True):
            if sequence in staying:
                self._hand_over(sequence, token)

    def _check(self, work: list[Work]) -> None:
        assert work, "sequences are there, but nothing to do"
        running = self.scheduler.running
        assert len(running) <= self.max_sequences
        assert len({item.sequence for item in work}) == len(work), "a sequence twice in one step"
        assert all(item.sequence in running for item in work)
        reading = [item.count for item in work if item.count > 1 or not item.draws]
        assert sum(reading) <= self.prefill_tokens
        counts = [item.count > 1 for item in work]
        assert counts == sorted(counts), "prompts come after the rows of one token"
        in_use = {page for sequence in running for page in sequence.pages}
        assert self.pool.available + len(in_use) == self.pages
        assert all(len(set(sequence.pages)) == len(sequence.pages) for sequence in running)

    def _compute(self, item: Work, tokens: list[int]) -> None:
        sequence, key = item.sequence, (item.sequence.request, item.sequence.index)
        expected = self._positions.get(sequence, 0)
        if item.start != expected:
            assert item.start % PAGE_SIZE == 0, "a sequence begins anew where known pages end"
        if item.start < expected:
            self.restarts[key] += 1
        if key not in self.order:
            self.order.append(key)
            self.cached[key] = item.start
        self._positions[sequence] = item.stop
        self.computed[key] += item.count
        for position in range(item.start, item.stop):
            place = (sequence.pages[position // PAGE_SIZE], position % PAGE_SIZE)
            self.memory[place] = (sequence.version, tuple(tokens[: position + 1]))

    def _draw(self, item: Work) -> int:
        """What comes next is read from the cache alone."""
        sequence, last = item.sequence, item.stop - 1
        _, tokens = self.memory[sequence.pages[last // PAGE_SIZE], last % PAGE_SIZE]
        assert tokens[: len(sequence.tokens)] == tuple(sequence.tokens)
        for position in range(item.stop):
            place = (sequence.pages[position // PAGE_SIZE], position % PAGE_SIZE)
            seen = (sequence.version, tokens[: position + 1])
            assert self.memory[place] == seen, "the page holds something else"
        return next_token(tokens, sequence.version, sequence.index)

    def _hand_over(self, sequence: Sequence, token: int) -> None:
        finish = sequence.append(token)
        if finish is not None:
            stopped = sequence.tokens[-1] in sequence.params.stop_token_ids
            assert finish == (FinishReason.STOP if stopped else FinishReason.LENGTH)
            self.scheduler.finish(sequence)
            self.finished[sequence.request, sequence.index] = sequence.tokens

    def play(self, requests: Items[Request]) -> dict[int, Request]:
        """Let requests come and go at their times; returns them by the number they got."""
        numbers: dict[int, Request] = {}
        waiting = sorted(requests, key=lambda request: request.arrives)
        clock = 0
        while waiting or not self.scheduler.idle:
            while waiting and waiting[0].arrives <= clock:
                request = waiting.pop(0)
                numbers[self.add(request)] = request
            for number, request in numbers.items():
                if request.cancelled == clock:
                    self.scheduler.cancel(number)
            if not self.scheduler.idle:
                self.step()
            clock += 1
        return numbers


# Few different pages and tails, so that prompts often begin alike.
prompts = st.builds(
    lambda blocks, tail: tuple(token for block in blocks for token in [block] * PAGE_SIZE) + tuple(tail),
    st.lists(st.integers(0, 1), max_size=4),
    st.lists(st.integers(0, 1), min_size=1, max_size=PAGE_SIZE + 1),
)
requests = st.builds(
    Request,
    prompt=prompts,
    max_tokens=st.sampled_from((1, 3, 17, 40)),
    n=st.sampled_from((1, 1, 2, 4)),
    version=st.integers(0, 1),
    priority=st.sampled_from(Priority),
    stops=st.booleans(),
    arrives=st.integers(0, 12),
    cancelled=st.none() | st.integers(0, 30),
)


@pytest.mark.more
@given(
    st.lists(requests, min_size=1, max_size=6),
    st.integers(0, 20),
    st.integers(1, 6),
    st.sampled_from((1, 7, 16, 50)),
    st.booleans(),
)
@examples(400)
def test_every_sequence_gets_what_it_would_get_alone(
    asked: list[Request], spare_pages: int, max_sequences: int, prefill_tokens: int, runs_ahead: bool
) -> None:
    """The pool holds the longest request at least; `Driver` checks every step."""
    driver = Driver(max(request.pages for request in asked) + spare_pages, max_sequences, prefill_tokens, runs_ahead)
    numbers = driver.play(asked)
    for number, request in numbers.items():
        for index in range(request.n):
            tokens = driver.finished.get((number, index))
            if tokens is not None or request.cancelled is None:
                assert tokens == alone(request, index)
    assert driver.pool.available == driver.pages, "a page is still in use"


@given(st.lists(requests, min_size=2, max_size=5))
@examples(100)
def test_one_cancelled_sequence_leaves_its_siblings_alone(asked: list[Request]) -> None:
    driver = Driver(pages=100)
    numbers = [driver.add(request) for request in asked]
    driver.step()
    dropped = (numbers[0], asked[0].n - 1)
    finished = set(driver.finished)
    driver.scheduler.cancel(*dropped)
    driver.run()
    everyone = {(number, index) for number, r in zip(numbers, asked, strict=True) for index in range(r.n)}
    assert set(driver.finished) == everyone - ({dropped} - finished)


def prompt_of(length: int, start: int = 0) -> tuple[int, ...]:
    return tuple((start + n) % 97 for n in range(length))


def test_a_waiting_user_goes_before_background_that_came_earlier() -> None:
    driver = Driver(pages=50, max_sequences=1)
    first = driver.add(Request(prompt_of(8)))
    driver.step()
    background = driver.add(Request(prompt_of(8, 10), priority=Priority.BACKGROUND))
    users = [driver.add(Request(prompt_of(8, 20))), driver.add(Request(prompt_of(8, 30)))]
    driver.run()
    assert driver.order == [(number, 0) for number in (first, *users, background)]


@pytest.mark.parametrize("length", [24, 40])
def test_those_who_wait_for_the_same_prompt_keep_their_order(length: int) -> None:
    driver = Driver(pages=50, max_sequences=2, prefill_tokens=16)
    numbers = [driver.add(Request(prompt_of(length))) for _ in range(4)]
    driver.run()
    assert driver.order == [(number, 0) for number in numbers]


def test_background_gives_its_pages_to_a_user() -> None:
    """Together they need more pages than there are: the background sequence starts again, the user's does not."""
    driver = Driver(pages=6)
    asked = [Request(prompt_of(16, int(p)), max_tokens=60, priority=p) for p in (Priority.BACKGROUND, Priority.USER)]
    background, user = (driver.add(request) for request in asked)
    driver.run()
    assert driver.restarts[background, 0] > 0
    assert driver.restarts[user, 0] == 0
    assert [driver.finished[number, 0] for number in (background, user)] == [alone(r, 0) for r in asked]


def steps_until_finished(driver: Driver, number: int) -> int:
    steps = 0
    while (number, 0) not in driver.finished:
        driver.step()
        steps += 1
    return steps


def test_a_user_whose_prompt_does_not_fit_takes_the_pages_of_background() -> None:
    """Seven pages that are in use for long, fourteen that are needed, twenty in all."""
    driver = Driver(pages=20)
    answering = Request(prompt_of(100), max_tokens=150, priority=Priority.BACKGROUND)
    background = driver.add(answering)
    for _ in range(10):
        driver.step()
    user = driver.add(Request(prompt_of(220, 50), max_tokens=1))
    assert steps_until_finished(driver, user) == 7, "as many as reading 220 tokens takes, 32 in a step"
    driver.run()
    assert driver.restarts == {(background, 0): 1}
    assert driver.finished[background, 0] == alone(answering, 0)


def test_only_as_much_background_as_is_needed_steps_back_and_the_newest_first() -> None:
    driver = Driver(pages=20, max_sequences=8)
    older, newer = (
        driver.add(Request(prompt_of(60, start), max_tokens=50, priority=Priority.BACKGROUND)) for start in (0, 20)
    )
    for _ in range(5):
        driver.step()
    user = driver.add(Request(prompt_of(200, 50), max_tokens=1))
    assert steps_until_finished(driver, user) == 7
    driver.run()
    assert driver.restarts == {(newer, 0): 1}
    assert (older, 0) in driver.finished


def test_background_goes_on_where_its_pages_would_not_help() -> None:
    """The second user has to wait for the first in any case."""
    driver = Driver(pages=20)
    driver.add(Request(prompt_of(159), max_tokens=30))
    background = driver.add(Request(prompt_of(16, 40), max_tokens=60, priority=Priority.BACKGROUND))
    for _ in range(8):
        driver.step()
    driver.add(Request(prompt_of(200, 50), max_tokens=1))
    driver.run()
    assert driver.restarts[background, 0] == 0


def test_background_that_fills_the_batch_makes_place_for_all_users_at_once() -> None:
    driver = Driver(pages=50, max_sequences=2)
    for start in (0, 10):
        driver.add(Request(prompt_of(8, start), max_tokens=40, priority=Priority.BACKGROUND))
    driver.step()
    users = {(driver.add(Request(prompt_of(8, start), max_tokens=1)), 0) for start in (20, 30)}
    driver.step()
    assert users <= driver.finished.keys()


@pytest.mark.parametrize("others", [0, 8])
def test_users_prompts_are_read_as_if_there_were_no_background(others: int) -> None:
    driver = Driver(pages=200, max_sequences=16, prefill_tokens=32)
    for number in range(others):
        driver.add(Request(prompt_of(160, number + 1), max_tokens=2, priority=Priority.BACKGROUND))
    user = driver.add(Request(prompt_of(96), max_tokens=1))
    assert steps_until_finished(driver, user) == 3


def test_background_prompts_are_read_with_what_users_leave() -> None:
    driver = Driver(pages=60, prefill_tokens=32)
    driver.add(Request(prompt_of(100, 50), priority=Priority.BACKGROUND))
    driver.add(Request(prompt_of(8)))
    assert [(Priority(item.sequence.order[0]), item.count) for item in driver.scheduler.plan()] == [
        (Priority.USER, 8),
        (Priority.BACKGROUND, 24),
    ]


def test_background_prompts_are_read_in_small_pieces() -> None:
    driver = Driver(pages=60, prefill_tokens=64)
    driver.scheduler.background_tokens = 16
    for number in range(2):
        driver.add(Request(prompt_of(100, 50 * number + 50), priority=Priority.BACKGROUND))
    assert sum(item.count for item in driver.scheduler.plan()) == 16
    driver.add(Request(prompt_of(40)))
    assert [item.count for item in driver.scheduler.plan() if not item.sequence.priority] == [40]
    assert sum(item.count for item in driver.scheduler.plan()) == 56


@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize("other", [Priority.USER, Priority.BACKGROUND])
def test_work_for_idle_times_rests_while_there_is_other_work(other: Priority, runs_ahead: bool) -> None:
    driver = Driver(pages=60, runs_ahead=runs_ahead)
    resting = [
        driver.add(Request(prompt_of(8, 50 * number), max_tokens=9, priority=Priority.IDLE)) for number in (1, 2)
    ]
    for _ in range(3):
        driver.step()
    other_request = driver.add(Request(prompt_of(40, 200), max_tokens=4, priority=other))
    driver.step()
    before = {number: driver.computed[number, 0] for number in resting}
    steps_until_finished(driver, other_request)
    # A step that ran ahead when the other came may have ended since.
    assert all(driver.computed[number, 0] <= before[number] + runs_ahead for number in resting)
    driver.run()
    assert not driver.restarts, "it goes on where it was"
    assert {(number, 0) for number in resting} <= driver.finished.keys()


def test_a_user_does_not_wait_for_pages_that_background_is_computing() -> None:
    """Another user's prompt takes what there is to read, so those pages may be long in coming."""
    driver = Driver(pages=80, prefill_tokens=32)
    driver.add(Request(prompt_of(160), priority=Priority.BACKGROUND))
    driver.step()
    driver.add(Request(prompt_of(320, 50), max_tokens=1))
    user = driver.add(Request(prompt_of(96), max_tokens=1))
    assert steps_until_finished(driver, user) <= 4, "two pages were there, and half of each step reads the others"


def test_siblings_still_wait_for_each_other_when_background_computes_the_same_pages() -> None:
    driver = Driver(pages=80, prefill_tokens=32)
    driver.add(Request(prompt_of(160), priority=Priority.BACKGROUND))
    driver.step()
    user = driver.add(Request(prompt_of(96), max_tokens=1, n=3))
    driver.run()
    computed = [driver.computed[user, index] for index in range(3)]
    assert computed == [96 - 32, 16, 16], "two pages were there, and five are shared"


@given(st.integers(1, 100), st.integers(2, 6), st.sampled_from((16, 40, 200)))
@examples(50)
def test_siblings_compute_their_prompt_once(length: int, n: int, prefill_tokens: int) -> None:
    """Only the last token, and what shares a page with it, goes through the model for each of them."""
    driver = Driver(pages=60, max_sequences=n, prefill_tokens=prefill_tokens)
    driver.add(Request(prompt_of(length), max_tokens=1, n=n))
    driver.run()
    shared = (length - 1) // PAGE_SIZE * PAGE_SIZE
    assert driver.computed.total() == length + (n - 1) * (length - shared)


@given(st.integers(1, 60), st.integers(1, 40), st.integers(1, 40))
@examples(50)
def test_a_request_that_extends_an_earlier_one_computes_what_is_new(prompt: int, answer: int, addition: int) -> None:
    driver = Driver(pages=60, prefill_tokens=200)
    first = driver.add(Request(prompt_of(prompt), max_tokens=answer))
    driver.run()
    longer = (*driver.finished[first, 0], *prompt_of(addition, 50))
    second = driver.add(Request(longer, max_tokens=1))
    driver.run()
    # The last token of an answer was drawn, but nothing was ever computed from it.
    known = (prompt + answer - 1) // PAGE_SIZE * PAGE_SIZE
    assert driver.computed[second, 0] == len(longer) - known
    assert driver.cached[second, 0] == known


def test_nothing_is_shared_between_versions() -> None:
    driver = Driver(pages=60, prefill_tokens=200)
    for version in (0, 1):
        driver.add(Request(prompt_of(64), max_tokens=1, version=version))
        driver.run()
    assert driver.computed.total() == 2 * 64


def test_nothing_is_shared_between_owners() -> None:
    """Neither what was computed nor what is being computed: nobody waits for, or gains from, another's prompt."""
    driver = Driver(pages=60, prefill_tokens=200)
    requests = [driver.add(Request(prompt_of(64), max_tokens=1, owner=owner)) for owner in ("alice", "bob", "alice")]
    driver.step()
    assert [driver.computed[request, 0] for request in requests] == [64, 64, 0]
    driver.run()
    assert driver.computed[requests[2], 0] == 16
    later = driver.add(Request(prompt_of(64), max_tokens=1, owner="carol"))
    driver.run()
    assert driver.computed[later, 0] == 64


def test_a_sequence_knows_how_much_of_its_prompt_was_cached() -> None:
    driver = Driver(pages=60, prefill_tokens=200)
    driver.add(Request(prompt_of(40), max_tokens=1))
    driver.run()
    driver.add(Request(prompt_of(40), max_tokens=1))
    (item,) = driver.scheduler.plan()
    assert (item.sequence.cached, item.start, item.count) == (32, 32, 8)


def test_a_long_prompt_does_not_stop_those_who_generate() -> None:
    driver = Driver(pages=60, prefill_tokens=16)
    generating = driver.add(Request(prompt_of(8), max_tokens=10))
    driver.step()
    driver.add(Request(prompt_of(160, 50), max_tokens=1))
    for _ in range(9):
        assert (generating, 0) not in driver.finished
        driver.step()
    assert (generating, 0) in driver.finished


def test_rows_of_one_token_are_ordered_by_slot() -> None:
    driver = Driver(pages=60, prefill_tokens=200)
    for version in (2, 0, 1, 0):
        driver.add(Request(prompt_of(8, version), max_tokens=5, version=version))
    driver.step()
    assert [item.sequence.slot for item in driver.scheduler.plan()] == [0, 0, 1, 2]


@given(st.integers(2, 6), st.integers(0, 3))
@examples(30)
def test_a_pool_too_small_for_all_still_serves_all(n: int, spare_pages: int) -> None:
    request = Request(prompt_of(20), max_tokens=60, n=n)
    driver = Driver(pages=request.pages + spare_pages, max_sequences=n)
    number = driver.add(request)
    driver.run()
    assert driver.finished == {(number, index): alone(request, index) for index in range(n)}
    assert driver.pool.available == driver.pages
    assert driver.restarts, "there was room enough after all"


def test_nothing_runs_ahead_of_a_step_that_reads_a_prompt_or_that_others_wait_to_join() -> None:
    driver = Driver(pages=60, max_sequences=2, prefill_tokens=16, runs_ahead=True)
    driver.add(Request(prompt_of(40), max_tokens=20))
    ahead = []
    for _ in range(4):
        driver.step()
        ahead.append(driver.ahead is not None)
    assert ahead == [False, False, True, True], "two steps read, the third also draws"
    driver.add(Request(prompt_of(8, 50), max_tokens=20))
    driver.step()
    assert driver.ahead is None, "there is a place for the second"
    driver.step()
    assert driver.ahead is not None
    driver.add(Request(prompt_of(8, 70), max_tokens=20))
    driver.step()
    assert driver.ahead is not None, "the batch is full"


def test_what_runs_ahead_of_the_last_token_is_known_and_left_out() -> None:
    driver = Driver(pages=60, runs_ahead=True)
    for max_tokens in (1, 3, 5):
        driver.add(Request(prompt_of(8, max_tokens), max_tokens=max_tokens))
    rows = []
    while not driver.scheduler.idle:
        driver.step()
        rows.append(len(driver.ahead.work) if driver.ahead else 0)
    assert rows == [2, 2, 1, 1, 0]


def test_a_last_token_gives_its_place_to_those_who_wait_at_once() -> None:
    driver = Driver(pages=60, max_sequences=1, runs_ahead=True)
    driver.add(Request(prompt_of(8), max_tokens=3))
    second = driver.add(Request(prompt_of(8, 20), max_tokens=1))
    assert steps_until_finished(driver, second) == 4


def test_rows_that_turn_out_to_have_ended_are_dropped_and_their_pages_used_again() -> None:
    """With two pages, the next request has to use those to which the dropped row has written."""
    request = next(
        r
        for r in (Request(prompt_of(15, start), max_tokens=17, stops=True) for start in range(97))
        if len(alone(r, 0)) == 16
    )
    driver = Driver(pages=2, runs_ahead=True)
    first = driver.add(request)
    driver.step()
    assert driver.scheduler.idle
    assert driver.ahead is not None, "the row was computed before its end was known"
    second = driver.add(Request(prompt_of(20, 60), max_tokens=4))
    driver.run()
    assert driver.finished[first, 0] == alone(request, 0)
    assert len(driver.finished[second, 0]) == 24


def test_nobody_steps_back_for_a_step_that_is_planned_ahead() -> None:
    """Four pages, and the first needs a third of them: no step is ahead when the second gives its own up."""
    driver = Driver(pages=4, runs_ahead=True)
    asked = [Request(prompt_of(length, length), max_tokens=12) for length in (30, 18)]
    numbers = [driver.add(request) for request in asked]
    driver.run()
    assert driver.launched_ahead > 0
    assert driver.restarts == {(numbers[1], 0): 1}
    assert [driver.finished[number, 0] for number in numbers] == [alone(request, 0) for request in asked]
