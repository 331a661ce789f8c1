"""Advantages: what each method makes of each kind of sample, and what it refuses to make anything of."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openclaw_rl.engines.base import SamplerCapabilities
from openclaw_rl.errors import UserError
from openclaw_rl.ledger import sessions, verdicts
from openclaw_rl.ledger.turns import set_next_state
from openclaw_rl.methods.base import Baseline, Method, NoSignal
from openclaw_rl.types import Hint, SampleKind, Source, State, StoredTurn, Verdict
from support.methods import a_method
from support.properties import examples
from support.records import Book

OLD = [-0.5, -0.25, -2.0]
TEACHER = [-0.25, -1.25, -0.5]
GAP = [0.25, -1.0, 1.5]
TAUGHT = Hint("Say it in one sentence.", TEACHER)
TWO_TOKENS = {"response_ids": [4, 5], "logprobs": [logprob + 1 for logprob in OLD[:2]]}
RL, OPD, BOTH = a_method("rl"), a_method("opd"), a_method("combine")


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Book]:
    book = Book(tmp_path_factory.mktemp("run"))
    yield book
    book.close()


def judged(book: Book, verdict: Verdict, sample: SampleKind, **given: object) -> StoredTurn:
    """A turn as the learner reads it from the ledger."""
    values = {"response_ids": [4, 5, 6], "logprobs": OLD, **given}
    number = book.put(State.READY, **values)
    assert book.change(verdicts.record, number, verdict, sample, "", 0)
    return book.read(number)


def advantages(turn: StoredTurn, method: Method, *given: Any) -> list[float]:
    return method.lesson(turn, *given).advantages


@pytest.mark.parametrize("score", [1.0, -1.0, 0.5])
def test_rl_gives_every_token_the_score(book: Book, score: float) -> None:
    turn = judged(book, Verdict(score, Source.LLM), SampleKind.RL)
    assert advantages(turn, a_method("rl")) == [score] * 3


def test_opd_is_the_teachers_logprob_less_the_one_recorded_while_sampling(book: Book) -> None:
    turn = judged(book, Verdict(hints=(TAUGHT,)), SampleKind.OPD)
    assert advantages(turn, a_method("opd")) == pytest.approx(GAP)


def test_a_hints_bookkeeping_score_is_not_added_to_its_advantage(book: Book) -> None:
    """Mistake 1: with opd the score of a turn is for monitoring, whatever it is."""
    for score in (1.0, -1.0):
        turn = judged(book, Verdict(score, Source.LLM, hints=(TAUGHT,)), SampleKind.OPD)
        assert advantages(turn, a_method("opd")) == pytest.approx(GAP)
        assert advantages(turn, a_method("combine")) == pytest.approx(GAP)


def test_combine_adds_both_terms_with_their_weights(book: Book) -> None:
    turn = judged(book, Verdict(-1.0, Source.LLM, hints=(TAUGHT,)), SampleKind.OPD_RL)
    assert advantages(turn, a_method("combine", w_opd=2.0, w_rl=0.5)) == pytest.approx([2 * gap - 0.5 for gap in GAP])
    assert advantages(turn, a_method("rl")) == [-1.0] * 3
    assert advantages(turn, a_method("opd")) == pytest.approx(GAP)


def test_combine_without_a_hint_has_the_reward_term_alone(book: Book) -> None:
    """Mistake 10: a sample that is trained on its score gets nothing from a hint, even if there is one."""
    for hints in ((), (TAUGHT,), (Hint("A hint that was never scored."),)):
        turn = judged(book, Verdict(1.0, Source.LLM, hints=hints), SampleKind.RL)
        assert advantages(turn, a_method("combine", w_rl=0.5)) == [0.5] * 3


def test_combine_without_a_score_has_the_distillation_term_alone(book: Book) -> None:
    turn = judged(book, Verdict(None, hints=(TAUGHT,)), SampleKind.OPD)
    assert advantages(turn, a_method("combine", w_opd=0.5)) == pytest.approx([gap / 2 for gap in GAP])


@pytest.mark.parametrize(
    "hints",
    [
        (),
        (Hint("Never scored."),),
        (Hint("The teacher could not.", (), "the teacher timed out"),),
        (Hint("Too short.", TEACHER[:2]),),
        (Hint("Too long.", [*TEACHER, -0.1]),),
    ],
)
@pytest.mark.parametrize("kind", [SampleKind.OPD, SampleKind.OPD_RL])
def test_without_the_teachers_word_on_every_token_there_is_no_signal(
    book: Book, hints: tuple[Hint, ...], kind: SampleKind
) -> None:
    """Mistake 2: nothing is padded; zeros would reinforce every token."""
    turn = judged(book, Verdict(1.0, Source.LLM, hints=hints), kind)
    with pytest.raises(NoSignal, match="teacher"):
        advantages(turn, BOTH)


def test_the_first_hint_that_the_teacher_scored_is_the_one_that_teaches(book: Book) -> None:
    hints = (Hint("Not scored.", (), "timed out"), TAUGHT, Hint("Another.", [-9.0, -9.0, -9.0]))
    turn = judged(book, Verdict(hints=hints), SampleKind.OPD)
    assert advantages(turn, OPD) == pytest.approx(GAP)


@pytest.mark.parametrize("logprobs", [[], OLD[:2]])
def test_a_turn_whose_own_logprobs_are_missing_is_not_trained_on(book: Book, logprobs: list[float]) -> None:
    """Imported turns have none until the policy has scored them."""
    scored = judged(book, Verdict(1.0, Source.LLM, hints=(TAUGHT,)), SampleKind.OPD_RL)
    turn = replace(scored, logprobs=logprobs)
    for method in (RL, OPD, BOTH):
        with pytest.raises(NoSignal, match="log-probs"):
            advantages(turn, method)


def test_a_signal_that_the_method_does_not_use_is_none(book: Book) -> None:
    scored = judged(book, Verdict(1.0, Source.LLM), SampleKind.RL)
    taught = judged(book, Verdict(hints=(TAUGHT,)), SampleKind.OPD)
    for turn, method in ((scored, OPD), (taught, RL)):
        with pytest.raises(NoSignal):
            advantages(turn, method)


def test_a_score_of_nothing_and_a_teacher_who_agrees_teach_nothing(book: Book) -> None:
    neutral = judged(book, Verdict(0.0, Source.LLM), SampleKind.RL)
    missing = judged(book, Verdict(None), SampleKind.RL)
    agreed = judged(book, Verdict(hints=(Hint("As it was.", OLD),)), SampleKind.OPD)
    for turn in (neutral, missing, agreed):
        with pytest.raises(NoSignal):
            advantages(turn, BOTH)


def test_a_sample_of_a_score_that_is_missing_is_not_trained_on_its_hint_alone(book: Book) -> None:
    turn = judged(book, Verdict(None, hints=(TAUGHT,)), SampleKind.OPD_RL)
    with pytest.raises(NoSignal, match="no score"):
        advantages(turn, BOTH)


def test_a_sample_without_a_verdict_is_not_trained_on(book: Book) -> None:
    turn = replace(judged(book, Verdict(1.0, Source.LLM, hints=(TAUGHT,)), SampleKind.OPD_RL), verdict=None)
    for method, reason in ((RL, "no score"), (OPD, "no teacher")):
        with pytest.raises(NoSignal, match=reason):
            advantages(turn, method)


@pytest.mark.parametrize("number", [-math.inf, math.inf, math.nan])
def test_a_limit_does_not_make_a_number_of_what_is_none(book: Book, number: float) -> None:
    turn = judged(book, Verdict(hints=(Hint("One token is impossible.", [-0.25, number, -0.5]),)), SampleKind.OPD)
    with pytest.raises(NoSignal, match="not finite"):
        advantages(turn, a_method("opd", opd_clip=2.0))


def test_the_teacher_is_asked_about_the_most_informative_hint_alone() -> None:
    request = OPD.teacher_request
    assert request is not None
    assert request.chosen([Hint("The most informative one, which is long."), Hint("Short.")]) == [
        "The most informative one, which is long."
    ]
    assert request.top == 0
    assert RL.teacher_request is None


@pytest.mark.parametrize("advice", ["", "start it with a higher limit"])
def test_a_sampler_that_records_too_few_tokens_is_refused(advice: str) -> None:
    method = a_method("topk-select", topk_k=4)
    method.check_sampler(SamplerCapabilities(frozenset(), max_top_logprobs=4, advice=advice))
    with pytest.raises(UserError, match="needs the 4 likeliest tokens") as caught:
        method.check_sampler(SamplerCapabilities(frozenset(), max_top_logprobs=3, advice=advice))
    assert str(caught.value).endswith(" Start it with a higher limit." if advice else "--sampler.")


def test_the_turn_chosen_for_a_session_without_a_good_one_has_a_gradient(tmp_path: Path) -> None:
    """Mistake 6: at-least-one is a reward of +1, not a mask."""
    book = Book(tmp_path)
    number = book.put(State.READY, response_ids=[4, 5, 6], logprobs=OLD)
    book.change(set_next_state, number, [{"role": "user", "content": "hm"}])
    book.change(verdicts.record, number, Verdict(0.0, Source.LLM), None, "the judge is neutral", 0)
    book.change(sessions.close_session, book.read(number).session)
    assert book.change(verdicts.settle_sessions, True) == [number]
    assert book.state(number) is State.JUDGED
    assert advantages(book.read(number), a_method("rl")) == [1.0] * 3
    book.close()


numbers = st.floats(width=32)
logprob_lists = st.lists(numbers, min_size=3, max_size=3) | st.lists(numbers, max_size=4)
hints = st.builds(Hint, st.just("Be brief."), logprob_lists)
any_verdict = st.builds(
    Verdict, st.none() | st.sampled_from([-1.0, 0.0, 1.0]), st.just(Source.LLM), st.lists(hints, max_size=2).map(tuple)
)


@given(any_verdict, st.sampled_from(SampleKind), st.sampled_from(["rl", "opd", "combine"]), logprob_lists)
@examples(100)
def test_whatever_was_recorded_gives_a_finite_number_for_each_token_or_no_signal(
    book: Book, verdict: Verdict, kind: SampleKind, method: str, logprobs: list[float]
) -> None:
    """One number that is not finite would take the whole batch down with it."""
    turn = replace(judged(book, verdict, kind), logprobs=logprobs)
    try:
        found = advantages(turn, a_method(method))
    except NoSignal:
        return
    assert len(found) == 3
    assert all(map(math.isfinite, found))
    assert any(found)


@pytest.mark.parametrize("method", ["rl", "opd", "combine"])
@given(verdict=any_verdict.filter(lambda v: all(len(hint.logprobs) in (0, 3) for hint in v.hints)))
@examples(60)
def test_what_the_judge_hands_on_as_a_sample_can_be_trained_on(book: Book, method: str, verdict: Verdict) -> None:
    """A sample that counts towards the batch and then has no gradient would be mistake 9."""
    kind, _reason = a_method(method).sample_kind(verdict)
    told = [*([verdict.score] if verdict.score else []), *(v for hint in verdict.hints for v in hint.logprobs)]
    if kind is None or not all(abs(value) < 1e3 and value not in OLD for value in told):
        return
    assert any(advantages(judged(book, verdict, kind), a_method(method)))


@pytest.mark.parametrize(("limit", "expected"), [(0.0, GAP), (1.0, [0.25, -1.0, 1.0]), (0.2, [0.2, -0.2, 0.2])])
def test_a_limit_holds_for_each_token_of_the_distillation_alone(
    book: Book, limit: float, expected: list[float]
) -> None:
    turn = judged(book, Verdict(1.0, Source.LLM, hints=(TAUGHT,)), SampleKind.OPD_RL)
    assert advantages(turn, a_method("opd", opd_clip=limit)) == pytest.approx(expected)
    assert advantages(turn, a_method("combine", opd_clip=limit)) == pytest.approx([gap + 1 for gap in expected])


def test_measured_from_the_batch_only_differences_count(book: Book) -> None:
    good = judged(book, Verdict(1.0, Source.LLM), SampleKind.RL)
    bad = judged(book, Verdict(-1.0, Source.LLM, hints=(TAUGHT,)), SampleKind.OPD_RL)
    worse = judged(book, Verdict(-1.0, Source.LLM), SampleKind.RL)
    hinted = judged(book, Verdict(hints=(Hint("Be brief, please.", OLD[:2]),)), SampleKind.OPD, **TWO_TOKENS)
    turns, method = [good, bad, worse, hinted], a_method("combine", baseline="batch", w_rl=0.5)
    found = [advantages(turn, method, method.baseline(turns)) for turn in turns]
    mean_gap = (sum(GAP) / 3 + -1.0) / 2
    assert found[0] == pytest.approx([0.5 * (1 + 1 / 3)] * 3)
    assert found[1] == pytest.approx([gap - mean_gap + 0.5 * (-1 + 1 / 3) for gap in GAP])
    assert found[2] == pytest.approx([0.5 * (-1 + 1 / 3)] * 3)
    assert found[3] == pytest.approx([-1.0 - mean_gap] * 2)
    assert a_method("combine").baseline(turns) == Baseline()
    # Where all are alike there is nothing to tell them apart by.
    alike = [worse, worse]
    assert advantages(worse, method, method.baseline(alike)) == [0.0] * 3


def test_a_long_reply_moves_what_gaps_are_measured_from_no_more_than_a_short_one(book: Book) -> None:
    """The loss is the mean over a reply's tokens, then over replies: what it is measured from has to be so too."""

    def reply(tokens: int, gap: float) -> StoredTurn:
        taught = Hint("Say it in one sentence.", [-1.0 + gap] * tokens)
        given = {"response_ids": [4] * tokens, "logprobs": [-1.0] * tokens}
        return judged(book, Verdict(hints=(taught,)), SampleKind.OPD, **given)

    turns = [reply(100, -1.0), reply(2, 1.0)]
    assert a_method("opd", baseline="batch").baseline(turns).gap == pytest.approx(0.0)


def test_a_signal_that_one_sample_of_a_batch_has_is_not_cancelled_by_its_own_mean(book: Book) -> None:
    hinted = [judged(book, Verdict(hints=(TAUGHT,)), SampleKind.OPD) for _ in range(2)]
    scored = judged(book, Verdict(-1.0, Source.LLM), SampleKind.RL)
    method = a_method("combine", baseline="batch")
    assert advantages(scored, method, method.baseline([*hinted, scored])) == [-1.0] * 3
    assert method.baseline([hinted[0], scored]) == Baseline()


def test_no_sample_outweighs_the_others_of_its_batch(book: Book) -> None:
    large, small = (judged(book, Verdict(score, Source.ENVIRONMENT), SampleKind.RL) for score in (1e6, -1.0))
    assert advantages(large, RL) == [10.0] * 3
    assert advantages(small, RL) == [-1.0] * 3
    assert advantages(large, a_method("rl", max_advantage=2.5)) == [2.5] * 3
    assert advantages(large, a_method("rl", max_advantage=0.0)) == [1e6] * 3
    centred = a_method("rl", baseline="batch")
    baseline = centred.baseline([large, small])
    assert [advantages(turn, centred, baseline)[0] for turn in (large, small)] == [5.5, -5.5], (
        "it does not move the mean"
    )


def test_a_sample_with_large_gaps_is_scaled_down_as_a_whole(book: Book) -> None:
    taught = judged(book, Verdict(1.0, Source.LLM, hints=(TAUGHT,)), SampleKind.OPD_RL)
    whole = advantages(taught, BOTH)
    mean = sum(map(abs, whole)) / 3
    assert mean > 1.0
    assert advantages(taught, a_method("combine", max_advantage=1.0)) == pytest.approx([one / mean for one in whole])
