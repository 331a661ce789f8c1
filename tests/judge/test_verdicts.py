"""The ledger gives verdicts back as they were, keeps what an older one held, and forgets for good."""

import struct
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openclaw_rl.cli import main
from openclaw_rl.ledger import deletion, pages, sessions, training, verdicts
from openclaw_rl.ledger.turns import add_feedback, ready_turns, set_next_state
from openclaw_rl.types import Feedback, Hint, Question, SampleKind, SessionKey, Source, State, Verdict, Vote
from support.properties import examples
from support.records import Book, a_turn

CAME = [{"role": "user", "content": "thank you"}]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Book]:
    book = Book(tmp_path_factory.mktemp("run"))
    yield book
    book.close()


texts = st.text(max_size=12)
float32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
votes = st.builds(
    Vote,
    st.sampled_from(Question),
    st.none() | st.sampled_from([-1, 0, 1]) | st.floats(-1, 1),
    texts,
    texts,
    st.floats(0, 1e6),
    st.integers(0, 10**9),
)
hints = st.builds(Hint, texts, st.lists(float32, max_size=6), texts)
any_verdicts = st.builds(
    Verdict,
    st.none() | st.floats(-1, 1),
    st.none() | st.sampled_from(Source),
    st.lists(hints, max_size=3).map(tuple),
    st.lists(votes, max_size=4).map(tuple),
    texts,
    st.floats(0, 1e6),
)


@given(any_verdicts, st.none() | st.sampled_from(SampleKind))
@examples(60)
def test_a_verdict_is_read_back_exactly(shared: Book, verdict: Verdict, sample: SampleKind | None) -> None:
    turn = shared.put(State.READY)
    assert shared.change(verdicts.record, turn, verdict, sample, "because", 0)
    stored = shared.read(turn)
    assert (stored.verdict, stored.sample) == (verdict, sample)
    assert (stored.state, stored.reason) == ((State.JUDGED, "") if sample else (State.DROPPED, "because"))


def test_log_probs_of_a_teacher_are_stored_with_its_precision(book: Book) -> None:
    bits = [0x80000001, 0xBF800001, 0x80000000, 0xC2FFFFFF, 0xB3D6BF95]
    exact = [struct.unpack("<f", struct.pack("<I", bit))[0] for bit in bits]
    turn = book.put(State.READY)
    book.change(verdicts.record, turn, Verdict(hints=(Hint("a hint", exact),)), SampleKind.OPD, "", 0)
    stored = book.read(turn).verdict
    assert stored is not None
    assert [struct.unpack("<I", struct.pack("<f", value))[0] for value in stored.hints[0].logprobs] == bits


def test_half_characters_are_no_obstacle_to_a_verdict(book: Book) -> None:
    """A hint may be the user's own words, and JSON can escape half a character."""
    half = "a \ud83d b"
    turn = book.put(State.READY)
    verdict = Verdict(
        -1.0, Source.LLM, (Hint(half, [-0.5], ""),), (Vote(Question.HINT, 1, half, half),), f"llm: {half}", 1.0
    )
    assert book.change(verdicts.record, turn, verdict, SampleKind.OPD, half, 0)
    stored = book.read(turn).verdict
    assert stored is not None
    assert stored.votes == verdict.votes
    assert stored.hints[0].logprobs == [-0.5]
    assert book.state(turn) is State.JUDGED
    dropped = book.put(State.READY)
    assert book.change(verdicts.record, dropped, Verdict(reason=half), None, f"abstained: {half}", 0)
    assert book.state(dropped) is State.DROPPED


@pytest.mark.parametrize("state", [state for state in State if state is not State.READY])
def test_only_a_turn_that_is_ready_gets_a_verdict(book: Book, state: State) -> None:
    turn = book.put(state)
    assert not book.change(verdicts.record, turn, Verdict(1.0), SampleKind.RL, "", 0)
    assert (book.state(turn), book.read(turn).verdict) == (state, None)


def test_a_turn_that_was_forgotten_gets_none(book: Book) -> None:
    turn = book.put(State.READY, session="gone")
    (summary,) = pages.session_summaries(book.db, id="gone")
    book.change(deletion.delete_sessions, [summary.number])
    assert not book.change(verdicts.record, turn, Verdict(1.0), SampleKind.RL, "", 0)
    assert book.scalar("SELECT count(*) FROM verdicts") == 0


async def test_a_verdict_that_has_not_heard_everything_does_not_count(book: Book) -> None:
    turn = book.put(State.READY, completion="c")
    await book.ledger.write(add_feedback, "me", "c", 0, Feedback(-1.0))
    assert not await book.ledger.write(verdicts.record, turn, Verdict(1.0), SampleKind.RL, "", 0)
    assert book.read(turn).verdict is None
    assert await book.ledger.write(verdicts.record, turn, Verdict(-1.0), SampleKind.RL, "", 1)


async def test_a_later_verdict_takes_the_place_of_an_earlier_one(book: Book) -> None:
    turn = book.put(State.READY, completion="c")
    first = Verdict(1.0, Source.LLM, (Hint("one hint"), Hint("another hint")), (Vote(Question.SCORE, 1),))
    await book.ledger.write(verdicts.record, turn, first, SampleKind.RL, "", 0)
    await book.ledger.write(add_feedback, "me", "c", 0, Feedback(-1.0))
    second = Verdict(-1.0, Source.EXPLICIT, (Hint("better", []),))
    await book.ledger.write(verdicts.record, turn, second, None, "for no reason", 1)
    stored = book.read(turn)
    assert (stored.verdict, stored.sample, stored.state) == (second, None, State.DROPPED)
    assert book.scalar("SELECT count(*) FROM verdicts") == book.scalar("SELECT count(*) FROM hints") == 1


def test_the_last_verdicts_come_newest_first(book: Book) -> None:
    for number in range(5):
        turn = book.put(State.READY)
        given_ = Verdict(number / 10 if number != 2 else None, None, (Hint("a"),) * (number % 2), reason=f"r{number}")
        book.change(verdicts.record, turn, given_, SampleKind.RL, "", 0)
    recent = book.ledger.read(verdicts.recent, 3)
    assert [(verdict.score, verdict.hints, verdict.reason) for verdict in recent] == [
        (0.4, 0, "r4"),
        (0.3, 1, "r3"),
        (None, 0, "r2"),
    ]


def test_the_longest_ready_come_first_and_no_more_than_are_wanted(book: Book) -> None:
    waiting = [book.put(State.AWAITING) for _ in range(5)]
    for turn in reversed(waiting):
        book.change(set_next_state, turn, CAME)
    assert book.ledger.read(ready_turns, (), 3) == waiting[:1:-1]
    assert book.ledger.read(ready_turns, {waiting[4], waiting[2]}, 2) == [waiting[3], waiting[1]]
    assert book.ledger.read(ready_turns, waiting, 2) == []


# forgetting


def test_what_is_forgotten_is_in_no_file_any_more(book: Book) -> None:
    secret, others = "a hint that nobody must see", "a hint of others"
    for session, words in (("mine", secret), ("other", others)):
        turn = book.put(State.READY, session=session)
        verdict = Verdict(
            -1.0,
            Source.LLM,
            (Hint(words, [-1.5], f"problem of {words}"),),
            (Vote(Question.HINT, 1, words, f"[HINT_START] {words}"),),
            f"reason of {words}",
        )
        book.change(verdicts.record, turn, verdict, SampleKind.OPD_RL, "", 0)
    assert secret.encode() in book.raw_bytes()
    assert main(["forget", "--session", "mine", "--run-dir", str(book.folder)]) == 0
    assert secret.encode() not in book.raw_bytes()
    assert others.encode() in book.raw_bytes()
    assert book.scalar("SELECT count(*) FROM verdicts") == book.scalar("SELECT count(*) FROM hints") == 1


def test_a_verdict_that_was_replaced_is_forgotten_with_its_session(book: Book) -> None:
    secret = "what was said of it at first"
    turn = book.put(State.READY, completion="c", session="mine")
    book.change(verdicts.record, turn, Verdict(1.0, hints=(Hint(secret),), reason=secret), SampleKind.RL, "", 0)
    book.change(add_feedback, "me", "c", 0, Feedback(-1.0))
    book.change(verdicts.record, turn, Verdict(-1.0), SampleKind.RL, "", 1)
    main(["forget", "--session", "mine", "--run-dir", str(book.folder)])
    assert secret.encode() not in book.raw_bytes()


# the end of sessions


def judged(book: Book, score: float | None, *values: float | None, session: str = "s", **given_: object) -> int:
    """A turn with its next state and a verdict: trained on if it has a score that is not 0."""
    turn = book.capture(a_turn(session, **given_))
    book.change(set_next_state, turn, CAME)
    verdict = Verdict(score, Source.LLM, votes=tuple(Vote(Question.SCORE, value) for value in values))
    book.change(verdicts.record, turn, verdict, SampleKind.RL if score else None, "the judge is neutral", 0)
    return turn


async def settled(book: Book, *, at_least_one: bool = True, session: str = "s") -> list[int]:
    await book.ledger.write(sessions.close_session, SessionKey("me", session))
    return await book.ledger.write(verdicts.settle_sessions, at_least_one=at_least_one)


def score(book: Book, turn: int) -> float | None:
    verdict = book.read(turn).verdict
    return verdict.score if verdict else None


async def test_the_turn_with_the_best_mean_vote_counts_as_good(book: Book) -> None:
    turns = [judged(book, 0, -1, 0, 1), judged(book, 0, 0, 1, None), judged(book, -1, -1, -1, 1)]
    assert await settled(book) == [turns[1]]
    chosen = book.read(turns[1])
    assert (chosen.state, chosen.reason, chosen.sample) == (State.JUDGED, "", SampleKind.RL)
    assert chosen.verdict is not None
    assert (chosen.verdict.score, chosen.verdict.reason) == (1.0, verdicts.AT_LEAST_ONE)
    assert [vote.value for vote in chosen.verdict.votes] == [0, 1, None], "what was voted is kept"
    assert (score(book, turns[0]), score(book, turns[2])) == (0, -1)
    assert book.state(turns[0]) is State.DROPPED


async def test_on_a_tie_the_later_turn_is_chosen(book: Book) -> None:
    turns = [judged(book, 0, 0, 0), judged(book, 0, 1, -1), judged(book, -1, -1)]
    assert await settled(book) == [turns[1]]


async def test_without_votes_the_score_is_the_merit(book: Book) -> None:
    turns = [judged(book, -0.25), judged(book, -1), judged(book, -0.5)]
    assert await settled(book) == [turns[0]]
    assert score(book, turns[0]) == 1.0


async def test_votes_on_the_hint_are_no_merit(book: Book) -> None:
    one, other = judged(book, 0, 0), judged(book, -1, -1)
    verdict = Verdict(-1, Source.LLM, votes=(Vote(Question.SCORE, -1), Vote(Question.HINT, 1), Vote(Question.HINT, 1)))
    book.change(verdicts.store, other, verdict, SampleKind.RL)
    assert await settled(book) == [one]


async def test_a_session_with_a_good_turn_stays_as_it_is(book: Book) -> None:
    judged(book, -1, -1), judged(book, 0.1), judged(book, 0, 0)
    before = book.rows("SELECT * FROM verdicts")
    assert await settled(book) == []
    assert book.rows("SELECT * FROM verdicts") == before


@pytest.mark.parametrize("state", [State.BATCHED, State.APPLIED])
async def test_a_good_turn_that_was_used_already_is_a_good_turn(book: Book, state: State) -> None:
    good = judged(book, 1, 1)
    judged(book, -1, -1)
    book.move(good, *([State.BATCHED, State.APPLIED][: 1 + (state is State.APPLIED)]))
    assert await settled(book) == []


@pytest.mark.parametrize("path", [(State.BATCHED,), (State.BATCHED, State.APPLIED)])
async def test_a_turn_that_was_used_already_is_never_chosen_nor_a_worse_one_in_its_place(
    book: Book, path: tuple[State, ...]
) -> None:
    used, left = judged(book, -0.5, 0, -1), judged(book, -1, -1)
    book.move(used, *path)
    assert await settled(book) == []
    assert (book.state(used), score(book, used)) == (path[-1], -0.5)
    assert (book.state(left), score(book, left)) == (State.JUDGED, -1)
    worse, better = judged(book, -1, -1, session="t"), judged(book, 0, 0, session="t")
    book.move(worse, *path)
    assert await settled(book, session="t") == [better]
    equal, one = judged(book, -1, -1, session="u"), judged(book, -1, -1, session="u")
    book.move(one, *path)
    assert await settled(book, session="u") == [equal]


def set_aside(book: Book, turn: int) -> None:
    """A step that would have had the turn was refused."""
    book.move(turn, State.BATCHED)
    book.change(training.quarantine, 1, [turn], "the loss is not finite")


async def test_a_good_turn_whose_step_was_refused_is_a_good_turn(book: Book) -> None:
    good, bad = judged(book, 1, 1, 1), judged(book, -1, -1)
    set_aside(book, good)
    assert await settled(book) == []
    assert (score(book, good), score(book, bad)) == (1, -1)


async def test_a_turn_whose_step_was_refused_is_never_chosen_nor_a_worse_one_in_its_place(book: Book) -> None:
    refused, worse = judged(book, -0.5, 0, -1), judged(book, -1, -1)
    set_aside(book, refused)
    assert await settled(book) == []
    assert (book.state(refused), score(book, worse)) == (State.DROPPED, -1)


async def test_a_turn_without_a_next_state_is_never_chosen(book: Book) -> None:
    last = book.capture(a_turn(completion="c"))
    await book.ledger.write(add_feedback, "me", "c", 0, Feedback(-0.1))
    await book.ledger.write(verdicts.record, last, Verdict(-0.1, Source.EXPLICIT), SampleKind.RL, "", 1)
    assert await settled(book) == []
    judged(book, -1, -1)
    assert await settled(book) == [], "the better one was said to be no good"
    other = judged(book, 0, 0)
    assert await settled(book) == [other]


async def test_a_turn_that_nobody_could_score_is_never_chosen(book: Book) -> None:
    judged(book, None, None)
    assert await settled(book) == []


async def test_a_session_without_turns_to_choose_from_is_settled_all_the_same(book: Book) -> None:
    book.capture(a_turn())
    assert await settled(book) == []
    assert not verdicts.any_unsettled(book.db)


async def test_a_session_that_has_not_ended_or_not_been_judged_waits(book: Book) -> None:
    first = judged(book, -1, -1)
    assert await book.ledger.write(verdicts.settle_sessions, at_least_one=True) == [], "it goes on"
    ready = book.put(State.READY)
    assert await settled(book) == [], "a turn is to be judged"
    await book.ledger.write(verdicts.record, ready, Verdict(-1.0), SampleKind.RL, "", 0)
    assert await book.ledger.write(verdicts.settle_sessions, at_least_one=True) == [first], (
        "the other one has no next state"
    )


async def test_a_session_is_settled_once(book: Book) -> None:
    turn = judged(book, 0, 0)
    assert await settled(book) == [turn]
    assert await settled(book) == []
    assert await book.ledger.write(verdicts.settle_sessions, at_least_one=True) == []


async def test_a_session_that_goes_on_after_its_end_has_one_good_turn_in_all(book: Book) -> None:
    first = judged(book, 0, 0)
    assert await settled(book) == [first]
    second = judged(book, 0, 1, 0)
    assert await settled(book) == [], "the first one counts as good"
    assert score(book, second) == 0


async def test_a_session_that_goes_on_before_it_had_a_good_turn_gets_one_at_its_next_end(book: Book) -> None:
    judged(book, None)
    assert await settled(book) == []
    second = judged(book, 0, 0)
    assert await settled(book) == [second]


async def said(book: Book, turn: int, completion: str, word: Feedback) -> None:
    """Somebody says something of a turn, and it is judged by that."""
    await book.ledger.write(add_feedback, "me", completion, 0, word)
    assert await book.ledger.write(verdicts.record, turn, Verdict(word.score, word.source), SampleKind.RL, "", 1)


@pytest.mark.parametrize("source", [Source.EXPLICIT, Source.ENVIRONMENT])
async def test_what_was_explicitly_called_bad_is_never_chosen(book: Book, source: Source) -> None:
    """Nothing beats what somebody said of this very turn, so it cannot count as good."""
    bad, other = judged(book, 0, 0, completion="c"), judged(book, 0, 0, -1)
    await said(book, bad, "c", Feedback(-0.75, source=source))
    assert await settled(book) == [other]
    alone = judged(book, -1, -1, completion="d", session="t")
    await said(book, alone, "d", Feedback(-0.5, source=source))
    assert await settled(book, session="t") == []


@pytest.mark.parametrize("source", [Source.EXPLICIT, Source.ENVIRONMENT])
@pytest.mark.parametrize("word", [0.0, -0.5])
async def test_where_the_best_turn_was_explicitly_called_no_good_no_worse_one_is_chosen(
    book: Book, source: Source, word: float
) -> None:
    best, worse = judged(book, -1, -1, completion="c"), judged(book, -1, -1, -1)
    await said(book, best, "c", Feedback(word, source=source))
    assert await settled(book) == []
    assert (score(book, best), score(book, worse)) == (word, -1)


async def test_a_word_that_takes_the_only_good_turn_away_makes_another_one_good(book: Book) -> None:
    """Feedback may come after the session has ended and been looked at."""
    other, best = judged(book, -1, -1), judged(book, 0, 0, completion="c")
    assert await settled(book) == [best]
    await said(book, best, "c", Feedback(-1.0))
    assert await book.ledger.write(verdicts.settle_sessions, at_least_one=True) == [other]
    assert (score(book, other), score(book, best)) == (1, -1)


async def test_sessions_do_not_mix(book: Book) -> None:
    judged(book, 1, 1, session="good")
    bad = judged(book, -1, -1, session="bad")
    assert await settled(book, session="good") == []
    assert await settled(book, session="bad") == [bad]


async def test_without_the_rule_sessions_are_settled_as_they_are(book: Book) -> None:
    turn = judged(book, -1, -1)
    assert await settled(book, at_least_one=False) == []
    assert score(book, turn) == -1
    assert not verdicts.any_unsettled(book.db)
