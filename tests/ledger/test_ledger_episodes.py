"""Episodes and groups in the ledger: when turns are held, judged, compared and taken by a step."""

import time
from fractions import Fraction

import pytest
from hypothesis import HealthCheck, example, given
from hypothesis import strategies as st

from openclaw_rl.ledger import deletion, episodes, groups, sessions, training, verdicts
from openclaw_rl.ledger.errors import AlreadyRewarded, TooLate
from openclaw_rl.types import (
    EpisodeMode,
    EpisodeState,
    GroupProgress,
    Hint,
    SampleKind,
    SessionKey,
    Source,
    State,
    Verdict,
)
from support.episodes import advantages, attempt, end, judge, let_groups_time_out, next_message, play
from support.methods import a_method
from support.properties import examples
from support.records import Book

METHOD = a_method("rl", baseline="group")
STEPS = a_method("rl", baseline="group", step_reward_coef=0.5)


def claim(book: Book, count: int) -> list[int]:
    claimed: list[int] = book.change(training.claim, count, 0, 8)
    return claimed


def reasons(book: Book, turns: list[int]) -> set[tuple[State, str]]:
    return {(book.state(turn), book.read(turn).reason) for turn in turns}


def test_rewards_of_an_uneven_group_are_compared_with_their_mean(book: Book) -> None:
    turns = [
        attempt(book, "g", name, reward, turns=count, size=4)
        for name, reward, count in (("a", 1.0, 1), ("b", 0.0, 5), ("c", 0.5, 2), ("d", None, 3))
    ]
    judge(book, METHOD)
    assert advantages(book, METHOD, [*turns[0], *turns[1]]) == [0.5] + [-0.5] * 5
    assert reasons(book, turns[2]) == {(State.DROPPED, "its reward is the mean of its group")}
    assert reasons(book, turns[3]) == {(State.DROPPED, "its episode failed")}


def test_a_constant_group_is_dropped_with_the_reason(book: Book) -> None:
    turns = [turn for name in "abc" for turn in attempt(book, "g", name, 0.1, turns=2, size=3)]
    judge(book, METHOD)
    assert reasons(book, turns) == {(State.DROPPED, "all attempts of its group got the same reward")}


def test_a_constant_group_whose_steps_differ_is_trained_on(book: Book) -> None:
    first = attempt(book, "g", "a", 1.0, turns=2, steps={0: 1.0, 1: 3.0})
    second = attempt(book, "g", "b", 1.0, turns=1, steps={0: 0.0})
    judge(book, STEPS)
    assert advantages(book, STEPS, [first[0], *second]) == [0.25, -0.25]
    assert reasons(book, first[1:]) == {(State.DROPPED, "all attempts of its group got the same reward")}, (
        "a step that only one attempt has a reward for counts 0"
    )


@pytest.mark.parametrize("reward", [1.0, 0.0])
def test_a_lone_survivor_is_dropped_with_the_reason(book: Book, reward: float) -> None:
    (turn,) = attempt(book, "g", "a", reward)
    attempt(book, "g", "b", None)
    judge(book, METHOD)
    assert reasons(book, [turn]) == {(State.DROPPED, "fewer than two attempts of its group were rewarded")}


def test_survivors_are_trained_on_when_the_group_has_timed_out(book: Book) -> None:
    turns = [*attempt(book, "g", "a", 1.0, size=4), *attempt(book, "g", "b", 0.0, size=4)]
    judge(book, METHOD)
    assert claim(book, 1) == []
    assert groups.waiting(book.db) == [GroupProgress("g", 2, 4)]
    let_groups_time_out(book, METHOD)
    assert groups.waiting(book.db) == []
    assert advantages(book, METHOD, turns) == [0.5, -0.5]
    (late,) = play(book, "c")
    assert end(book, "c", 1.0, group="g")
    assert reasons(book, [late]) == {(State.DROPPED, "its episode failed")}
    assert advantages(book, METHOD, turns) == [0.5, -0.5]
    assert claim(book, 1) == turns


def test_without_the_group_baseline_a_reward_is_a_score(book: Book) -> None:
    plain = a_method("rl")
    turns = [*attempt(book, "g", "a", 2.0), *attempt(book, "g", "b", 2.0)]
    judge(book, plain)
    assert advantages(book, plain, turns) == [2.0, 2.0]


def test_a_turn_outside_groups_keeps_its_reward(book: Book) -> None:
    (turn,) = play(book, "a")
    end(book, "a", -0.75)
    judge(book, METHOD)
    assert advantages(book, METHOD, [turn]) == [-0.75]


def test_a_hint_teaches_in_a_constant_group(book: Book) -> None:
    combine = a_method("combine", baseline="group")
    turns = [*attempt(book, "g", "a", 1.0), *attempt(book, "g", "b", 1.0)]
    for turn in turns:
        verdict = Verdict(1.0, Source.ENVIRONMENT, (Hint("look at the unit", [-0.1, -0.1]),))
        sample, _ = combine.sample_kind(verdict, book.read(turn).episode)
        assert sample is SampleKind.OPD_RL
        assert book.change(verdicts.record, turn, verdict, sample, "", 1)
    judge(book, combine)
    assert claim(book, 1) == turns
    assert combine.lesson(book.read(turns[0])).advantages == pytest.approx([0.4, 0.15])


ATTEMPTS = st.lists(
    st.tuples(
        st.none() | st.integers(-8, 8).map(lambda eighths: eighths / 8),
        st.lists(st.none() | st.integers(-8, 8).map(lambda eighths: eighths / 8), min_size=1, max_size=3),
    ),
    min_size=2,
    max_size=6,
)


@examples(40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(group=ATTEMPTS)
@example(group=[(1 / 8, [1 / 4]), (1 / 8, [1 / 8]), (1 / 4, [1 / 8])])  # outcome and step cancel each other
def test_advantages_are_those_of_a_plain_computation(
    book: Book, group: list[tuple[float | None, list[float | None]]]
) -> None:
    name = f"group {book.scalar('SELECT count(*) FROM groups')}"
    turns = [
        attempt(
            book,
            name,
            f"{name} {place}",
            reward,
            turns=len(steps),
            size=len(group),
            steps={} if reward is None else {i: step for i, step in enumerate(steps) if step is not None},
        )
        for place, (reward, steps) in enumerate(group)
    ]
    judge(book, STEPS)
    survivors = [(Fraction(reward), steps) for reward, steps in group if reward is not None]
    total = Fraction(0)
    for (reward, steps), numbers in zip(group, turns, strict=True):
        for place, number in enumerate(numbers):
            expected = Fraction(0)
            if reward is not None:
                expected = Fraction(reward) - sum(r for r, _ in survivors) / len(survivors)
                same = [s[place] for _, s in survivors if place < len(s) and s[place] is not None]
                if steps[place] is not None and len(same) > 1:
                    expected += (Fraction(steps[place]) - sum(map(Fraction, same)) / len(same)) / 2
            turn = book.read(number)
            if expected:
                assert advantages(book, STEPS, [number])[0] == pytest.approx(float(expected), abs=1e-12)
                assert turn.state is State.JUDGED
            else:
                assert turn.state is State.DROPPED
                assert turn.reason
        if reward is not None:
            total += Fraction(reward) - sum(r for r, _ in survivors) / len(survivors)
    assert total == 0, "advantages of a group add up to nothing, each attempt counted once"


def test_a_step_takes_single_turns_and_whole_groups_the_longest_judged_first(book: Book) -> None:
    single = [book.put(State.READY, session=f"s{n}") for n in range(3)]
    for turn in single[:1]:
        assert book.change(verdicts.record, turn, Verdict(1.0, Source.LLM), "rl", "", 0)
    first = [t for n, r in (("a", 1.0), ("b", 0.0)) for t in attempt(book, "g", n, r, turns=2)]
    waiting = attempt(book, "h", "c", 1.0)
    judge_only(book)
    for turn in single[1:]:
        assert book.change(verdicts.record, turn, Verdict(1.0, Source.LLM), "rl", "", 0)
    assert groups.trainable(book.db) == 7
    assert book.ledger.read(groups.queue).to_train == 8
    assert claim(book, 2) == sorted([single[0], *first])
    assert claim(book, 9) == single[1:]
    attempt(book, "h", "d", 0.0)
    judge(book, METHOD)
    assert waiting[0] in claim(book, 1)


def judge_only(book: Book) -> None:
    """Judge the turns that have a reward; others stay ready."""
    rows = book.rows("SELECT t.number FROM turns t JOIN feedback f ON f.turn = t.number WHERE t.state = 'ready'")
    for (turn,) in rows:
        verdict = Verdict(book.read(turn).feedback[-1].score, Source.ENVIRONMENT)
        assert book.change(verdicts.record, turn, verdict, "rl", "", 1)
    book.change(episodes.settle_groups, 0.0, METHOD.why_untrained)


def test_a_released_group_is_taken_as_a_whole_again(book: Book) -> None:
    turns = [t for n, r in (("a", 1.0), ("b", 0.0)) for t in attempt(book, "g", n, r, turns=3)]
    judge(book, METHOD)
    assert claim(book, 1) == turns
    book.change(training.release_batches)
    assert claim(book, 1) == turns
    book.change(training.apply_step, 1, 1, turns)
    book.change(training.reconcile, 0, 0, ())
    assert book.change(training.claim_turns, turns) == turns


def test_an_abandoned_episode_has_failed_and_is_closed_with_the_reason(book: Book) -> None:
    turns = play(book, "a", turns=2)
    next_message(book, turns[0])
    assert book.change(episodes.abandon_idle, time.time() - 60) == 0
    assert book.change(episodes.abandon_idle, time.time() + 1) == 1
    assert reasons(book, turns) == {(State.DROPPED, "its episode failed")}
    episode = book.read(turns[0]).episode
    assert episode is not None
    assert episode.state is EpisodeState.FAILED
    assert episode.error.startswith("abandoned")
    with pytest.raises(TooLate, match="abandoned"):
        end(book, "a", 1.0)


def test_no_reading_of_sessions_touches_a_held_one(book: Book) -> None:
    turns = play(book, "a", turns=2)
    next_message(book, turns[0])
    book.change(sessions.close_session, SessionKey("me", "a"))
    assert book.change(verdicts.settle_sessions, True) == []
    assert reasons(book, turns) == {(State.AWAITING, "")}
    assert book.ledger.read(groups.queue).held == 2


def test_episodes_that_have_ended_are_looked_at_once_and_no_turn_of_them_is_raised(book: Book) -> None:
    (turn,) = play(book, "a")
    next_message(book, turn)
    end(book, "a", -1.0)
    assert not verdicts.any_unsettled(book.db), "it is judged first"
    book.change(verdicts.record, turn, Verdict(-1.0), SampleKind.RL, "", 1)
    assert verdicts.any_unsettled(book.db)
    assert book.change(verdicts.settle_sessions, True) == []
    assert not verdicts.any_unsettled(book.db)


def test_a_forgotten_attempt_leaves_a_group_of_the_others(book: Book) -> None:
    turns = {name: attempt(book, "g", name, reward, size=3) for name, reward in (("a", 1.0), ("b", 0.0), ("c", 5.0))}
    judge(book, METHOD)
    assert advantages(book, METHOD, turns["a"]) == [-1.0]
    session = book.scalar("SELECT number FROM sessions WHERE id = 'c'")
    assert book.change(deletion.delete_sessions, [session]) == turns["c"]
    assert advantages(book, METHOD, [*turns["a"], *turns["b"]]) == [0.5, -0.5], "settled again at once"
    assert claim(book, 1) == [*turns["a"], *turns["b"]]


def test_a_late_attempt_changes_no_mean(book: Book) -> None:
    first = attempt(book, "g", "a", 1.0, steps={0: 1.0})
    second = attempt(book, "g", "b", 1.0, steps={0: 0.0})
    attempt(book, "g", "c", 100.0, steps={0: 100.0})
    judge(book, STEPS)
    assert advantages(book, STEPS, [*first, *second]) == [0.25, -0.25]


def test_a_group_with_a_stale_turn_is_dropped_as_a_whole(book: Book) -> None:
    for step in range(1, 6):
        book.change(training.apply_step, step, step, ())
    turns = [*attempt(book, "g", "a", 1.0, version=1), *attempt(book, "g", "b", 0.0, version=5)]
    fresh = [*attempt(book, "h", "c", 1.0, version=5), *attempt(book, "h", "d", 0.0, version=5)]
    judge(book, METHOD)
    assert book.change(training.claim, 1, 5, 2) == fresh
    assert reasons(book, turns) == {(State.DROPPED, "stale: answered more than 2 policy versions ago")}


def test_a_turn_that_a_step_gives_back_waits_if_its_session_became_an_episode(book: Book) -> None:
    turn = book.put(State.JUDGED, session="a")
    book.move(turn, State.BATCHED)
    book.change(episodes.begin, SessionKey("me", "a"), "header X-Session-Id", EpisodeMode.TRAIN)
    book.change(training.release_batches)
    assert (book.state(turn), groups.trainable(book.db), claim(book, 1)) == (State.JUDGED, 0, [])


def test_one_request_for_an_evaluation_makes_an_episode_one(book: Book) -> None:
    turns = [*play(book, "a"), *play(book, "a", mode=EpisodeMode.EVAL), *play(book, "a")]
    end(book, "a", 1.0)
    assert reasons(book, turns) == {(State.DROPPED, "its episode is an evaluation")}


def test_a_group_that_waits_does_not_wait_for_a_forgotten_attempt(book: Book) -> None:
    attempt(book, "g", "a", 1.0, size=3)
    attempt(book, "g", "b", 0.0, size=3)
    book.change(deletion.delete_sessions, [book.scalar("SELECT number FROM sessions WHERE id = 'a'")])
    assert groups.waiting(book.db) == [GroupProgress("g", 1, 2)]
    book.change(deletion.delete_sessions, [book.scalar("SELECT number FROM sessions WHERE id = 'b'")])
    assert book.rows("SELECT * FROM groups") == []


def test_nothing_of_an_evaluation_is_judged_or_in_a_group(book: Book) -> None:
    turns = play(book, "a", mode=EpisodeMode.EVAL)
    end(book, "a", 1.0, group="g")
    assert reasons(book, turns) == {(State.DROPPED, "its episode is an evaluation")}
    assert book.rows("SELECT * FROM groups") == []


def test_a_session_that_was_trained_on_can_no_longer_be_rewarded(book: Book) -> None:
    turn = book.put(State.JUDGED, session="a")
    for state in (State.BATCHED, State.APPLIED):
        book.move(turn, state)
        with pytest.raises(TooLate, match="trained on"):
            end(book, "a", 1.0)


def test_another_reward_is_refused_and_the_same_one_is_not(book: Book) -> None:
    play(book, "a")
    end(book, "a", 1.0)
    end(book, "a", 1.0)
    with pytest.raises(AlreadyRewarded):
        end(book, "a", 1.5)
