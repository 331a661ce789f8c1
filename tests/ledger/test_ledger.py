"""The ledger gives back what it was given, moves turns only where they may go, and forgets for good."""

import asyncio
import json
import random
import sqlite3
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from openclaw_rl.cli import main
from openclaw_rl.ledger import episodes, packing, pages, schema, sessions, training, turns
from openclaw_rl.ledger.errors import CannotJudge, DamagedTurn, LedgerUnusable, NewerLedger, UnknownTurn
from openclaw_rl.ledger.packing import pack_ids
from openclaw_rl.ledger.schema import FILE, connect
from openclaw_rl.ledger.sessions import TRANSITIONS, IllegalTransition
from openclaw_rl.ledger.store import Ledger
from openclaw_rl.ledger.turns import add_feedback, find_ancestor, last_waiting, load_turn, set_next_state
from openclaw_rl.types import Continuation, Feedback, SamplingParams, SessionKey, State, TopTokens, Turn
from support.properties import examples
from support.records import Book, a_side_turn, a_turn

CAME = [{"role": "user", "content": "thank you"}]
LATER = [{"role": "user", "content": "something else"}]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Book]:
    """For properties: one ledger that fills up."""
    book = Book(tmp_path_factory.mktemp("run"))
    yield book
    book.close()


# What goes in comes out.

ids = st.lists(st.integers(0, 2**31 - 1), max_size=8)
texts = st.text(max_size=12)
a_message = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": texts | st.none()},
    optional={"name": texts, "tool_calls": st.lists(st.dictionaries(texts, texts, max_size=2), max_size=2)},
)
sampled = st.floats(width=32, allow_nan=False)


@st.composite
def any_turns(draw: st.DrawFn) -> Turn:
    response = draw(ids)
    k = draw(st.integers(0, 3))
    places = [range(k) for _ in response]
    likely = [[draw(st.integers(0, 2**31 - 1)) for _ in row] for row in places]
    numbers = [[draw(sampled) for _ in row] for row in places]
    top = TopTokens(np.array(likely, np.int32), np.array(numbers, np.float32)) if k and response else None
    return a_turn(
        session=draw(texts),
        owner=draw(texts),
        choice=draw(st.integers(0, 127)),
        kind_reason=draw(texts),
        version=draw(st.integers(0, 10**6)),
        messages=draw(st.lists(a_message, min_size=1, max_size=4)),
        message=draw(a_message),
        prompt_ids=draw(ids),
        response_ids=response,
        logprobs=[draw(sampled) for _ in response],
        top=top,
        sampling=SamplingParams(9, draw(sampled), seed=draw(st.integers(-(2**70), 2**70)), stop_token_ids={7, 3}),
        finish_reason=draw(st.sampled_from(["stop", "length", "tool_calls"])),
        continuation=draw(st.sampled_from(Continuation)),
    )


def tables(top: TopTokens | None) -> tuple[list[Any], list[Any]] | None:
    return top and (top.ids.tolist(), top.logprobs.tolist())


@examples(60)
@given(turn=any_turns())
@example(
    a_turn(
        messages=[{"role": "user", "content": "half a \ud83d character"}],
        message={"role": "assistant", "content": "and \udc00 the other"},
    )
)
def test_a_turn_is_read_back_exactly(shared: Book, turn: Turn) -> None:
    stored = shared.read(shared.capture(turn))
    assert stored.session == turn.session
    assert (stored.completion, stored.choice) == (turn.completion, turn.choice)
    assert (stored.kind, stored.kind_reason, stored.version) == (turn.kind, turn.kind_reason, turn.version)
    assert stored.messages == turn.messages
    assert stored.message == turn.message
    assert (stored.prompt_ids, stored.response_ids) == (turn.prompt_ids, turn.response_ids)
    assert stored.logprobs == turn.logprobs
    assert tables(stored.top) == tables(turn.top)
    assert stored.finish_reason == turn.finish_reason
    assert stored.continuation == turn.continuation
    assert stored.sampling["seed"] == turn.sampling.seed
    assert stored.sampling["temperature"] == turn.sampling.temperature
    assert stored.sampling["stop_token_ids"] == sorted(turn.sampling.stop_token_ids)
    assert (stored.state, stored.next_state, stored.feedback) == (State.AWAITING, None, [])


def test_half_characters_are_kept_in_next_states_and_feedback(book: Book) -> None:
    turn = a_turn()
    number = book.capture(turn)
    book.change(turns.set_next_state, number, [{"role": "user", "content": "a \ud83d b"}])
    book.change(turns.add_feedback, "me", turn.completion, 0, Feedback(1.0, "good"))
    stored = book.read(number)
    assert stored.next_state == [{"role": "user", "content": "a \ud83d b"}]
    assert stored.feedback == [Feedback(1.0, "good")]


def test_log_probs_are_stored_with_the_sampler_s_precision(book: Book) -> None:
    exact = [-0.10000000149011612, -1.1754943508222875e-38, -103.27893066406250]
    number = book.capture(a_turn(response_ids=[1, 2, 3], logprobs=exact))
    assert book.read(number).logprobs == exact


def test_the_choices_of_a_request_are_turns_of_their_own(book: Book) -> None:
    turns = [a_turn(completion="c", choice=i, response_ids=[i], logprobs=[-1.0], request_key=b"r") for i in range(3)]
    first = book.capture(*turns)
    stored = [book.read(number) for number in (first, first + 1, first + 2)]
    assert [(turn.choice, turn.response_ids, turn.state) for turn in stored] == [
        (i, [i], State.AWAITING) for i in range(3)
    ]


def test_a_completion_is_recorded_once(book: Book) -> None:
    turn = a_turn()
    book.capture(turn)
    with pytest.raises(sqlite3.IntegrityError):
        book.capture(turn)
    assert book.scalar("SELECT count(*) FROM turns") == 1


# What turns have in common is stored once.


@st.composite
def trees(draw: st.DrawFn) -> list[tuple[int | None, int, list[int], list[int]]]:
    """Turns as (the turn before it whose tokens it begins with, how many of them, what it adds, its response)."""
    lengths: list[int] = []
    nodes = []
    for number in range(draw(st.integers(1, 8))):
        base = draw(st.none() | st.integers(0, number - 1)) if number else None
        keep = draw(st.integers(0, lengths[base])) if base is not None else 0
        added, response = draw(ids), draw(ids)
        lengths.append(keep + len(added) + len(response))
        nodes.append((base, keep, added, response))
    return nodes


@examples(60)
@given(tree=trees())
def test_a_turn_stores_only_what_it_adds_to_another(shared: Book, tree: list) -> None:
    whole: list[list[int]] = []
    lengths: list[int] = []

    def record(db: sqlite3.Connection) -> list[int]:
        numbers: list[int] = []
        for base, keep, added, response in tree:
            prompt = [*(whole[base][:keep] if base is not None else []), *added]
            turn = a_turn(prompt_ids=prompt, response_ids=response, logprobs=[-1.0] * len(response))
            parent = numbers[base] if base is not None else None
            numbers += turns.capture(db, [turn], "test", parent, keep)
            whole.append([*prompt, *response])
            lengths.append(len(prompt))
        return numbers

    numbers = shared.change(record)
    for number, ids, length, (_base, _keep, added, response) in zip(numbers, whole, lengths, tree, strict=True):
        assert packing.sequence(shared.db, number) == (ids, length)
        assert shared.ledger.sequence(number) == ids
        assert shared.ledger.read(packing.responses, number)[0] == response
        stored = shared.read(number)
        assert (stored.prompt_ids, stored.response_ids) == (ids[:length], response)
        held = "SELECT length(added) + length(response) FROM turns WHERE number = ?"
        assert shared.scalar(held, number) == 4 * (len(added) + len(response))


async def test_sequences_are_right_whether_they_are_at_hand_or_not(book: Book) -> None:
    book.ledger._sequences.__init__(1200)  # two of them
    expected = {}
    base, before = None, []
    for step in range(6):
        prompt = [*before, 10 * step]
        turn = a_turn(prompt_ids=prompt, response_ids=[10 * step + 1])
        await book.ledger.capture([turn], "test", base, len(before))
        base = book.scalar("SELECT max(number) FROM turns")
        before = expected[base] = [*prompt, 10 * step + 1]
        assert book.ledger.sequence(base) == before
    for _ in range(2):
        assert {number: book.ledger.sequence(number) for number in expected} == expected


def test_messages_that_requests_begin_with_are_stored_once(book: Book) -> None:
    system, hello = {"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}
    said = {"role": "assistant", "content": "hi"}
    one = book.capture(a_turn(messages=[system, hello]))
    two = book.capture(a_turn(messages=[system, hello, said, hello]))
    other = book.capture(a_turn(messages=[hello]))
    assert book.scalar("SELECT count(*) FROM messages") == 5
    assert book.read(one).messages == [system, hello]
    assert book.read(two).messages == [system, hello, said, hello]
    assert book.read(other).messages == [hello]
    book.capture(a_turn("another", messages=[system, hello]))
    assert book.scalar("SELECT count(*) FROM messages") == 7


@pytest.mark.parametrize("count", [1, *(few + more for few in sessions.FEW_AND_MANY for more in (-1, 0)), 48])
def test_however_many_messages_a_turn_adds_to_its_base_each_is_stored_once(book: Book, count: int) -> None:
    first = [{"role": "user", "content": f"question {number}"} for number in range(20)]
    added = [{"role": "tool", "content": f"result {number}"} for number in range(count)]
    base = book.capture(a_turn(messages=first))
    for _ in range(2):
        turn = book.capture(a_turn(messages=[*first, *added], parent=base), base=base)
        assert book.read(turn).messages == [*first, *added]
        assert book.scalar("SELECT count(*) FROM messages") == 20 + count
    other = book.capture(a_turn(messages=added, parent=base), base=base)
    assert book.read(other).messages == added


def test_a_damaged_message_is_whole_again_once_the_client_has_sent_it_again(book: Book) -> None:
    said = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]
    turn = book.capture(a_turn(messages=said))
    book.change(lambda db: db.execute("UPDATE messages SET body = replace(body, 'hello', 'jello')"))
    with pytest.raises(DamagedTurn, match="a message has changed"):
        book.read(turn)
    book.capture(a_turn(messages=said))
    assert book.read(turn).messages == said


def test_a_long_session_grows_by_what_each_turn_adds(book: Book) -> None:
    chance = random.Random(1)
    tokens = [chance.randrange(50_000) for _ in range(12_000)]
    messages: list[dict[str, str]] = [{"role": "system", "content": chance.randbytes(24_000).hex()}]
    sizes, base = [], None
    for step in range(30):
        messages = [*messages, {"role": "user", "content": chance.randbytes(600).hex()}]
        answer = {"role": "assistant", "content": chance.randbytes(400).hex()}
        prompt = [*tokens, *(chance.randrange(50_000) for _ in range(300))]
        response = [chance.randrange(50_000) for _ in range(200)]
        turn = a_turn(
            messages=messages,
            message=answer,
            prompt_ids=prompt,
            response_ids=response,
            logprobs=[-chance.random()] * 200,
        )
        base = book.capture(turn, base=base, keep=len(tokens) if step else 0)
        messages, tokens = [*messages, answer], [*prompt, *response]
        book.change(lambda db: None)
        with connect(book.folder / FILE) as db:
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        sizes.append((book.folder / FILE).stat().st_size)
    middle, last = sizes[19] - sizes[9], sizes[29] - sizes[19]
    assert abs(last - middle) <= 0.2 * middle
    assert middle < 10 * 12_000
    assert book.read(base).prompt_ids == prompt
    assert book.read(base).messages == messages[:-1]


# States.


@pytest.mark.parametrize(("start", "end"), list(product(State, State)))
def test_a_turn_goes_only_where_the_table_says(book: Book, start: State, end: State) -> None:
    turn = book.put(start)
    before = book.everything()
    if end in TRANSITIONS[start]:
        book.change(sessions.move, turn, end, "because")
        assert (book.state(turn), book.read(turn).reason) == (end, "because")
    else:
        with pytest.raises(IllegalTransition, match=f"{start} and cannot become {end}"):
            book.change(sessions.move, turn, end, "because")
        assert book.everything() == before


def test_the_way_of_a_turn_that_is_learned_from(book: Book) -> None:
    turn = book.put(State.CAPTURED)
    book.move(turn, State.AWAITING, State.READY, State.JUDGED, State.BATCHED, State.APPLIED)
    assert book.state(turn) is State.APPLIED


def test_a_turn_that_is_not_there_cannot_be_moved_or_followed(book: Book) -> None:
    with pytest.raises(UnknownTurn):
        book.change(sessions.move, 99, State.READY)
    with pytest.raises(UnknownTurn):
        book.change(turns.set_next_state, 99, CAME)


@pytest.mark.parametrize("look", [packing.sequence, packing.responses, turns.request])
def test_looking_up_a_turn_that_was_forgotten_meanwhile_fails_as_the_ledger_fails(
    book: Book, look: Callable[[sqlite3.Connection, int], Any]
) -> None:
    """So that the request it was for is served without it."""
    with pytest.raises(UnknownTurn):
        book.ledger.read(look, 99)
    with pytest.raises(UnknownTurn):
        book.ledger.sequence(99)


def test_main_turns_wait_and_side_turns_are_dropped_with_the_reason(book: Book) -> None:
    assert book.state(book.capture(a_turn())) is State.AWAITING
    side = book.read(book.capture(a_side_turn()))
    assert (side.state, side.reason) == (State.DROPPED, "session title")


# What came next.


def test_the_first_next_state_counts(book: Book) -> None:
    turn = book.capture(a_turn())
    book.change(turns.set_next_state, turn, CAME)
    book.change(turns.set_next_state, turn, LATER)
    assert (book.state(turn), book.read(turn).next_state) == (State.READY, CAME)


@pytest.mark.parametrize("state", [State.READY, State.JUDGED, State.BATCHED, State.APPLIED])
def test_a_next_state_does_not_move_a_turn_that_is_past_waiting(book: Book, state: State) -> None:
    turn = book.put(state)
    book.change(turns.set_next_state, turn, CAME)
    assert (book.state(turn), book.read(turn).next_state) == (state, CAME)


def test_a_side_turn_never_gets_a_next_state(book: Book) -> None:
    turn = book.capture(a_side_turn())
    before = book.everything()
    book.change(turns.set_next_state, turn, CAME)
    assert book.everything() == before


async def test_a_late_next_state_revives_a_turn_whose_session_had_ended(book: Book) -> None:
    turn = book.capture(a_turn("s"))
    assert await book.ledger.write(sessions.close_session, SessionKey("me", "s")) is True
    dropped = book.read(turn)
    assert (dropped.state, dropped.reason) == (State.DROPPED, sessions.NO_NEXT_STATE)
    book.ledger.submit(set_next_state, turn, CAME).result(20)
    revived = book.read(turn)
    assert (revived.state, revived.reason, revived.next_state) == (State.READY, "", CAME)


def test_last_waiting_is_the_session_s_newest_main_turn_without_a_next_state(book: Book) -> None:
    key = SessionKey("me", "s")
    assert book.ledger.read(last_waiting, key) is None
    first = book.capture(a_turn("s"))
    second = book.capture(a_turn("s"))
    book.capture(a_side_turn("s"))
    book.capture(a_turn("other"))
    book.capture(a_turn("s", owner="you"))
    assert book.ledger.read(last_waiting, key) == second
    book.change(turns.set_next_state, second, CAME)
    assert book.ledger.read(last_waiting, key) == first


# Asking again.


def test_a_retry_supersedes_the_attempts_before_it(book: Book) -> None:
    attempts = [book.capture(a_turn(request_key=b"r")) for _ in range(3)]
    other = book.capture(a_turn(request_key=b"another"))
    assert [(book.state(turn), book.read(turn).reason) for turn in attempts] == [
        (State.DROPPED, sessions.SUPERSEDED),
        (State.DROPPED, sessions.SUPERSEDED),
        (State.AWAITING, ""),
    ]
    assert book.state(other) is State.AWAITING


def test_the_same_request_in_another_session_is_no_retry(book: Book) -> None:
    mine = book.capture(a_turn("s", request_key=b"r"))
    book.capture(a_turn("t", request_key=b"r"))
    book.capture(a_turn("s", owner="you", request_key=b"r"))
    assert book.state(mine) is State.AWAITING


@pytest.mark.parametrize("state", [s for s in State if s not in (State.AWAITING, State.DROPPED)])
def test_a_retry_changes_nothing_about_a_turn_that_no_longer_waits(book: Book, state: State) -> None:
    turn = book.put(state, request_key=b"r")
    book.capture(a_turn(request_key=b"r"))
    assert book.state(turn) is state


def test_a_side_turn_supersedes_no_main_turn(book: Book) -> None:
    main_turn = book.capture(a_turn(request_key=b"r"))
    book.capture(a_side_turn(request_key=b"r"))
    assert book.state(main_turn) is State.AWAITING


# Which turn a request goes on from.


def found(book: Book, *ends: bytes, session: str | None = None, claimed: set[int] | None = None) -> Any:
    depths = list(zip(range(2 * len(ends), 0, -2), ends, strict=True))
    return book.ledger.read(find_ancestor, "me", depths, session, claimed or set())


def test_the_turn_that_covers_most_of_a_request_is_found(book: Book) -> None:
    short = book.capture(a_turn("s", end_key=b"one"))
    long = book.capture(a_turn("s", end_key=b"two"))
    assert found(book, b"three", b"two", b"one") == turns.Ancestor(
        long, SessionKey("me", "s"), 4, turns.MainTurn(long, False)
    )
    assert found(book, b"x", b"one") == turns.Ancestor(short, SessionKey("me", "s"), 2, turns.MainTurn(short, False))
    assert found(book, b"x") is None
    assert found(book) is None


def test_another_owner_s_or_another_named_session_s_turns_are_not_found(book: Book) -> None:
    book.capture(a_turn("s", owner="you", end_key=b"one"))
    assert found(book, b"one") is None
    mine = book.capture(a_turn("t", end_key=b"one"))
    assert found(book, b"one", session="s") is None
    assert found(book, b"one", session="t").number == mine


def test_equal_conversations_are_gone_on_from_one_by_one(book: Book) -> None:
    equal = [book.capture(a_turn(name, end_key=b"one")) for name in ("s", "t")]
    first = found(book, b"one").number
    assert first == equal[1]
    # A request that goes on from it is being answered.
    assert found(book, b"one", claimed={first}).number == equal[0]
    book.change(turns.set_next_state, first, CAME)
    assert found(book, b"one").number == equal[0]
    book.change(turns.set_next_state, equal[0], CAME)
    assert found(book, b"one").number in equal


def test_a_superseded_attempt_with_the_same_words_is_not_gone_on_from(book: Book) -> None:
    """The client asked twice, got the same answer twice, went on, and asked that twice."""
    superseded = book.capture(a_turn(request_key=b"r", end_key=b"one"))
    kept = book.capture(a_turn(request_key=b"r", end_key=b"one"))
    assert found(book, b"one", session="s").number == kept
    book.change(turns.set_next_state, kept, CAME)
    assert found(book, b"one", session="s").number == kept
    assert book.state(superseded) is State.DROPPED


def test_a_side_turn_with_the_same_words_does_not_hide_the_main_turn(book: Book) -> None:
    main_turn = book.capture(a_turn(end_key=b"one"))
    book.capture(a_side_turn(end_key=b"one"))
    assert found(book, b"one", session="s").number == main_turn


# Explicit feedback.


async def test_feedback_is_attached_and_makes_a_turn_ready(book: Book) -> None:
    turn = a_turn()
    number = book.capture(turn)
    await book.ledger.write(add_feedback, "me", turn.completion, 0, Feedback(0.5, "nice"))
    await book.ledger.write(add_feedback, "me", turn.completion, 0, Feedback(-1.0))
    stored = book.read(number)
    assert (stored.state, stored.feedback) == (State.READY, [Feedback(0.5, "nice"), Feedback(-1.0)])


@pytest.mark.parametrize(
    ("owner", "completion", "choice"), [("me", "nothing", 0), ("me", "mine", 1), ("you", "mine", 0)]
)
async def test_feedback_on_what_is_not_there_or_not_yours(book: Book, owner: str, completion: str, choice: int) -> None:
    book.capture(a_turn(completion="mine"))
    before = book.everything()
    with pytest.raises(UnknownTurn, match=completion):
        await book.ledger.write(add_feedback, owner, completion, choice, Feedback(1.0))
    assert book.everything() == before


async def test_feedback_with_a_number_too_large_for_the_database_is_refused_and_the_ledger_goes_on(
    book: Book,
) -> None:
    book.capture(a_turn(completion="mine"))
    with pytest.raises(Exception):  # noqa: B017, PT011 - which one is told by the API's tests
        await asyncio.wait_for(book.ledger.write(add_feedback, "me", "mine", 2**70, Feedback(1.0)), 5)
    await asyncio.wait_for(book.ledger.write(add_feedback, "me", "mine", 0, Feedback(1.0)), 5)


async def test_a_side_turn_cannot_be_judged(book: Book) -> None:
    book.capture(a_side_turn(completion="c"))
    before = book.everything()
    with pytest.raises(CannotJudge, match="session title"):
        await book.ledger.write(add_feedback, "me", "c", 0, Feedback(1.0))
    assert book.everything() == before


@pytest.mark.parametrize("state", [State.BATCHED, State.APPLIED])
async def test_a_turn_that_is_trained_on_cannot_be_judged_any_more(book: Book, state: State) -> None:
    book.put(state, completion="c")
    before = book.everything()
    with pytest.raises(CannotJudge, match="already"):
        await book.ledger.write(add_feedback, "me", "c", 0, Feedback(1.0))
    assert book.everything() == before


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (State.DROPPED, State.READY),
        (State.JUDGED, State.READY),
        (State.READY, State.READY),
        # It still has no log-probs.
        (State.CAPTURED, State.CAPTURED),
    ],
)
async def test_feedback_brings_a_turn_back_to_be_judged(book: Book, before: State, after: State) -> None:
    turn = book.put(before, completion="c")
    await book.ledger.write(add_feedback, "me", "c", 0, Feedback(1.0))
    assert (book.state(turn), book.read(turn).feedback) == (after, [Feedback(1.0)])


# The end of a session.


async def test_closing_a_session_gives_up_what_waits_in_it(book: Book) -> None:
    waiting, ready = book.capture(a_turn("s")), book.capture(a_turn("s"))
    book.change(turns.set_next_state, ready, CAME)
    others = [book.capture(a_turn("t")), book.capture(a_turn("s", owner="you"))]
    assert await book.ledger.write(sessions.close_session, SessionKey("me", "s")) is True
    assert await book.ledger.write(sessions.close_session, SessionKey("me", "nothing")) is False
    assert [book.state(turn) for turn in (waiting, ready, *others)] == [
        State.DROPPED,
        State.READY,
        State.AWAITING,
        State.AWAITING,
    ]
    closed = {summary.key: summary.closed for summary in pages.session_summaries(book.db)}
    assert closed == {("me", "s"): True, ("me", "t"): False, ("you", "s"): False}


async def test_a_session_can_end_with_its_turn_and_go_on_later(book: Book) -> None:
    await book.ledger.capture([a_turn("s")], "test", None, 0, done=True)
    (summary,) = pages.session_summaries(book.db)
    assert (summary.closed, summary.turns) == (True, 1)
    await book.ledger.capture([a_turn("s")], "test", None, 0)
    (summary,) = pages.session_summaries(book.db)
    assert (summary.closed, summary.turns) == (False, 2)
    assert [book.state(turn) for turn in turns.turn_numbers(book.db)] == [State.DROPPED, State.AWAITING]


async def test_only_silent_sessions_are_closed(book: Book, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("time.time", lambda: now)
    old = book.capture(a_turn("old"))
    now = 1050.0
    fresh = book.capture(a_turn("fresh"))
    now = 1090.0
    assert await book.ledger.write(episodes.close_idle, 60) == 1
    assert [book.state(turn) for turn in (old, fresh)] == [State.DROPPED, State.AWAITING]
    assert await book.ledger.write(episodes.close_idle, 60) == 0
    now = 2000.0
    assert await book.ledger.write(episodes.close_idle, 60) == 1
    assert book.state(fresh) is State.DROPPED


def test_equal_session_names_of_two_owners_are_two_sessions(book: Book) -> None:
    mine, yours = book.capture(a_turn("s")), book.capture(a_turn("s", owner="you"))
    assert {summary.key for summary in pages.session_summaries(book.db, id="s")} == {("me", "s"), ("you", "s")}
    assert list(turns.turn_numbers(book.db, SessionKey("me", "s"))) == [mine]
    assert list(turns.turn_numbers(book.db, SessionKey("you", "s"))) == [yours]


# Counting.


def test_counts_of_states_reasons_and_steps(book: Book) -> None:
    empty = turns.counts(book.db)
    assert (empty.total, empty.step, empty.version) == (0, 0, 0)
    for _ in range(2):
        book.capture(a_side_turn())
    book.put(State.READY)
    batched = book.put(State.BATCHED)
    book.change(training.apply_step, 3, 5, [batched])
    counts = turns.counts(book.db)
    assert counts.states == {**dict.fromkeys(State, 0), State.READY: 1, State.DROPPED: 2, State.APPLIED: 1}
    assert counts.dropped == {"session title": 2}
    assert (counts.step, counts.version, counts.total) == (3, 5, 4)


def test_an_update_with_a_turn_that_is_not_batched_is_not_recorded_at_all(book: Book) -> None:
    batched, judged = book.put(State.BATCHED), book.put(State.JUDGED)
    before = book.everything()
    with pytest.raises(IllegalTransition):
        book.change(training.apply_step, 1, 1, [batched, judged])
    assert book.everything() == before


# Forgetting.

MARK = "a-very-private-matter"


def forget(book: Book, *arguments: str) -> None:
    assert main(["forget", *arguments, "--run-dir", str(book.folder)]) == 0


def tell_a_secret(book: Book, session: str, owner: str = "me") -> int:
    """A turn whose every text has the mark in it."""
    turn = a_turn(
        session,
        owner,
        messages=[{"role": "user", "content": f"{MARK} asked"}],
        message={"role": "assistant", "content": f"{MARK} answered"},
        prompt_ids=[7001, 7002, 7003, 7004],
    )
    number = book.capture(turn)
    book.change(turns.set_next_state, number, [{"role": "user", "content": f"{MARK} came next"}])
    book.change(turns.add_feedback, owner, turn.completion, 0, Feedback(1.0, f"{MARK} was said of it"))
    return number


@pytest.mark.parametrize("beside_a_server", [True, False])
def test_what_is_forgotten_is_in_no_file_any_more(tmp_path: Path, beside_a_server: bool) -> None:
    book = Book(tmp_path)
    first = tell_a_secret(book, f"{MARK} session")
    book.capture(a_turn(f"{MARK} session", prompt_ids=[7001, 7002, 7003, 7004, 4, 5, 6]), base=first, keep=6)
    tokens = pack_ids([7001, 7002, 7003, 7004])
    assert MARK.encode() in book.raw_bytes()
    assert tokens in book.raw_bytes()
    if not beside_a_server:
        book.close()
    forget(book, "--session", f"{MARK} session")
    assert MARK.encode() not in book.raw_bytes()
    assert tokens not in book.raw_bytes()
    if beside_a_server:
        assert pages.session_summaries(book.db) == []
        book.capture(a_turn())
        book.close()
        assert MARK.encode() not in book.raw_bytes()


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_nothing_of_a_busy_session_stays_behind_in_pages_it_shared(book: Book, seed: int) -> None:
    chance = random.Random(seed)
    told: dict[str, list[dict[str, str]]] = {}

    def words(session: str, *lengths: int) -> str:
        return f"{MARK if session == 'gone' else 'an ordinary matter'} " * chance.choice(lengths)

    def talk(db: sqlite3.Connection) -> None:
        for _ in range(150):
            session = chance.choice(["one", "two", "gone"])
            asked = [*told.get(session, []), {"role": "user", "content": words(session, 1, 2, 20, 160, 800)}]
            answer = {"role": "assistant", "content": words(session, 1, 8, 120)}
            (turn,) = turns.capture(db, [a_turn(session, messages=asked, message=answer)], "test", None, 0)
            turns.set_next_state(db, turn, [{"role": "user", "content": words(session, 1, 12, 200)}])
            told[session] = [*asked, answer] if chance.random() < 0.8 else []

    for _ in range(4):
        book.change(talk)
    forget(book, "--session", "gone")
    assert book.raw_bytes().count(MARK.encode()) == 0


def test_forgetting_leaves_the_others_whole(book: Book) -> None:
    kept = [tell_a_secret(book, "kept"), tell_a_secret(book, "s", owner="you")]
    before = [book.read(turn) for turn in kept]
    for _ in range(2):
        tell_a_secret(book, "gone")
    forget(book, "--session", "gone")
    assert [book.read(turn) for turn in kept] == before
    assert book.rows("PRAGMA foreign_key_check") == []
    assert book.rows("PRAGMA integrity_check") == [("ok",)]
    assert book.scalar("SELECT count(*) FROM turns") == book.scalar("SELECT count(*) FROM feedback") == 2


def test_deleting_looks_for_references_by_index_and_not_in_the_whole_ledger(book: Book) -> None:
    """Otherwise forgetting one session of thousands would hold up the server for seconds."""
    for table in book.everything():
        indexes = book.rows(f"SELECT name FROM pragma_index_list('{table}')")
        first_columns = {
            column
            for (index,) in indexes
            for number, column in book.rows(f"SELECT seqno, name FROM pragma_index_info('{index}')")
            if number == 0
        }
        first_columns |= {name for (name,) in book.rows(f"SELECT name FROM pragma_table_info('{table}') WHERE pk = 1")}
        references = {name for (name,) in book.rows(f"SELECT \"from\" FROM pragma_foreign_key_list('{table}')")}
        assert references <= first_columns, table


def test_a_user_is_forgotten_with_all_sessions(book: Book) -> None:
    for name in ("s", "t"):
        tell_a_secret(book, name)
        book.capture(a_turn(name, owner="you"))
    forget(book, "--user", "me")
    assert {summary.key for summary in pages.session_summaries(book.db)} == {("you", "s"), ("you", "t")}
    assert MARK.encode() not in book.raw_bytes()


def applied(book: Book, step: int, session: str) -> int:
    turn = book.put(State.BATCHED, session=session)
    book.change(training.apply_step, step, step, [turn])
    return turn


def test_forgetting_names_the_steps_that_had_used_the_data(book: Book, capsys: pytest.CaptureFixture[str]) -> None:
    for step, session in ((1, "gone"), (2, "kept"), (3, "gone")):
        applied(book, step, session)
    forget(book, "--session", "gone")
    assert "steps that had used them: 1, 3." in capsys.readouterr().out
    assert turns.counts(book.db).step == 3


def test_steps_that_used_forgotten_turns_are_not_said_of_newer_ones(
    book: Book, capsys: pytest.CaptureFixture[str]
) -> None:
    applied(book, 1, "gone")
    forget(book, "--session", "gone")
    book.capture(a_turn("new"))
    capsys.readouterr()
    forget(book, "--session", "new")
    assert "steps that had used them: none." in capsys.readouterr().out


async def test_a_request_under_way_is_recorded_although_what_it_goes_on_from_was_forgotten(book: Book) -> None:
    before = book.capture(a_turn("s", prompt_ids=[1, 2], response_ids=[3, 4]))
    forget(book, "--session", "s")
    after = a_turn("s", prompt_ids=[1, 2, 3, 4, 5], parent=before, continuation=Continuation.EXTENDS)
    await book.ledger.capture([after], "test", before, 4)
    # A turn that stood on its own tokens could never be read.
    assert book.rows("SELECT number, base FROM turns WHERE base >= number") == []
    (number,) = turns.turn_numbers(book.db)
    assert book.read(number).prompt_ids == [1, 2, 3, 4, 5]


# The file.


def test_a_ledger_can_be_closed_and_opened_again(tmp_path: Path) -> None:
    book = Book(tmp_path)
    tell_a_secret(book, "s")
    before = book.everything()
    book.close()
    again = Book(tmp_path)
    assert again.everything() == before
    again.capture(a_turn())
    again.close()


async def test_threads_read_through_connections_of_their_own(book: Book) -> None:
    """Threads that share a connection can get each other's rows."""
    number = book.capture(a_turn())
    own, other = book.ledger._reader(), await asyncio.to_thread(book.ledger._reader)
    assert own is book.ledger._reader()
    assert own is not other
    assert await asyncio.to_thread(book.ledger.read, load_turn, number) == book.ledger.read(load_turn, number)


def test_a_new_file_has_the_version_of_its_program(tmp_path: Path) -> None:
    Ledger(tmp_path).close()
    with connect(tmp_path / FILE, readonly=True) as db:
        assert db.execute("PRAGMA user_version").fetchone()[0] == schema.VERSION
        assert db.execute("PRAGMA journal_mode").fetchone()[0] == "wal"


def test_an_older_ledger_is_refused_with_what_to_do_and_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    book = Book(tmp_path)
    book.capture(a_turn())
    before = book.everything()
    book.close()
    with connect(tmp_path / FILE) as db:
        db.execute(f"PRAGMA user_version = {schema.VERSION - 1}")
    with pytest.raises(LedgerUnusable, match=r"an older version.*export its sessions with that version"):
        Ledger(tmp_path)
    for command in (["status"], ["sessions"], ["export", str(tmp_path / "out.jsonl")]):
        assert main([*command, "--run-dir", str(tmp_path)]) == 2
        assert "openclaw-rl import" in " ".join(capsys.readouterr().err.split())
    with connect(tmp_path / FILE) as db:
        assert db.execute("PRAGMA user_version").fetchone()[0] == schema.VERSION - 1
        db.execute(f"PRAGMA user_version = {schema.VERSION}")
    again = Book(tmp_path)
    assert again.everything() == before
    again.close()


def test_a_newer_ledger_is_refused_with_a_sentence_and_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Ledger(tmp_path).close()
    with connect(tmp_path / FILE) as db:
        db.execute(f"PRAGMA user_version = {schema.VERSION + 1}")
    with pytest.raises(NewerLedger, match=f"version {schema.VERSION + 1}.*Update the program"):
        Ledger(tmp_path)
    assert main(["sessions", "--run-dir", str(tmp_path)]) == 2
    assert "Update the program" in capsys.readouterr().err
    with connect(tmp_path / FILE) as db:
        assert db.execute("PRAGMA user_version").fetchone()[0] == schema.VERSION + 1


def test_two_programs_may_create_a_ledger_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second links its file after the first has linked its own, which stays."""
    link = schema.os.link

    def after_another(source: Path, target: Path) -> None:
        monkeypatch.setattr(schema.os, "link", link)
        book = Book(tmp_path)
        book.capture(a_turn())
        book.close()
        link(source, target)

    monkeypatch.setattr(schema.os, "link", after_another)
    book = Book(tmp_path)
    assert book.scalar("SELECT count(*) FROM turns") == 1
    book.close()


def test_stored_turns_are_plain_json_in_the_file(book: Book) -> None:
    number = book.capture(a_turn(message={"role": "assistant", "content": "狐狸"}))
    (answer,) = book.rows(f"SELECT answer FROM turns WHERE number = {number}")[0]
    assert json.loads(answer)["content"] == "狐狸"
    assert "狐狸" in answer


def test_an_emptied_ledger_is_refused_with_what_to_do_and_not_begun_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Ledger(tmp_path).close()
    (tmp_path / FILE).write_bytes(b"")
    with pytest.raises(LedgerUnusable, match=r"is empty.*Restore it from a copy, or move the file away"):
        Ledger(tmp_path)
    assert main(["sessions", "--run-dir", str(tmp_path)]) == 2
    assert "Restore it from a copy" in " ".join(capsys.readouterr().err.split())
    assert (tmp_path / FILE).read_bytes() == b""
    (tmp_path / FILE).unlink()
    Ledger(tmp_path).close()


def test_a_crash_while_a_ledger_is_created_leaves_nothing_that_the_next_start_trips_over(tmp_path: Path) -> None:
    abandoned = tmp_path / f"{schema.UNFINISHED}x"
    abandoned.mkdir()
    (abandoned / FILE).write_bytes(b"")
    Ledger(tmp_path).close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [FILE]
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600


def test_a_ledger_that_cannot_be_written_is_refused_when_it_is_opened(tmp_path: Path) -> None:
    Ledger(tmp_path).close()
    # Without the file that readers and writers share, SQLite can only read.
    (tmp_path / f"{FILE}-shm").mkdir()
    with pytest.raises(LedgerUnusable, match="readonly"):
        Ledger(tmp_path)
