"""A judge's answer is read for what it says in the end; what cannot be read does not count."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openclaw_rl.judge.judges.base import agreement
from openclaw_rl.judge.judges.llm import MIN_HINT, SCORES, accepted_hints, parse, tally
from openclaw_rl.types import Question, Vote

SENTENCE = "Give the distance in kilometres."


def score(text: str) -> float | None:
    return parse(Question.SCORE, text).value


def hint(text: str) -> tuple[float | None, str]:
    vote = parse(Question.HINT, text)
    return vote.value, vote.hint


def hinted(words: str, box: str = "\\boxed{1}") -> str:
    return f"[HINT_START]{words}[HINT_END] {box}"


# reading a score


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("\\boxed{1}", 1),
        ("\\boxed{-1}", -1),
        ("\\boxed{0}", 0),
        ("\\boxed{+1}", 1),
        ("It did well. \\boxed{ 1 }.", 1),
        ("\\boxed {-1}", -1),
        ("\\boxed{\n-1\n}", -1),
        ("$\\boxed{1}$", 1),
        ("**\\boxed{0}**\n\nThat is all.", 0),
    ],
)
def test_a_box_is_read_however_it_is_written(text: str, value: int) -> None:
    assert score(text) == value


def test_the_last_box_wins() -> None:
    assert score("At first \\boxed{1}, but no: \\boxed{0}. Rather \\boxed{-1}") == -1


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1",
        "boxed{1}",
        "\\boxed{}",
        "\\boxed{yes}",
        "\\boxed{1",
        "\\boxed 1",
        "\\boxed{2}",
        "\\boxed{-2}",
        "\\boxed{0.5}",
        "\\boxed{1.5}",
        "\\boxed{1 or -1}",
        "\\boxed{--1}",
        "\\boxed{- 1}",
        "\\boxed{10}",
        "\\boxed{" + "1" * 5000 + "}",
        "\\boxed{-" + "0" * 5000 + "1}",
        "\\boxed{{1}}",
        "\\boxed{\\text{good}}",
        "\\boxed{\\frac{1}{1}}",
    ],
)
def test_what_is_no_score_in_a_box_is_no_vote(text: str) -> None:
    assert score(text) is None


@pytest.mark.parametrize("last", ["\\boxed{maybe}", "\\boxed{}", "\\boxed{\\text{-1}}", "\\boxed{{-1}}", "\\boxed{7}"])
def test_an_earlier_box_does_not_stand_in_for_a_last_one_that_cannot_be_read(last: str) -> None:
    assert score(f"One could say \\boxed{{1}}. My answer is {last}") is None


def test_thoughts_do_not_count() -> None:
    assert score("<think>\\boxed{1}? Or \\boxed{0}?</think>It failed. \\boxed{-1}") == -1
    assert score("\\boxed{1} seems right\n</think>\n\n\\boxed{0}") == 0, "the prompt may have opened the thought"
    assert score("<think>\\boxed{1}</think>I cannot say.") is None
    assert score("<think>a</think>\\boxed{1}<think>b</think>\\boxed{-1}") == -1


def test_a_thought_that_was_cut_off_is_no_answer() -> None:
    assert score("<think>It could be \\boxed{1}, but the user then says that") is None
    assert hint("<think>\n[HINT_START]Give the distance in kilometres.[HINT_END] \\boxed{1}? Or") == (None, "")


def test_an_answer_that_was_cut_off_is_no_vote_and_is_kept() -> None:
    text = "At first it seems \\boxed{1}, but"
    assert parse(Question.SCORE, text, 1.5, 7, cut_off=True) == Vote(Question.SCORE, None, "", text, 1.5, 7)
    assert parse(Question.HINT, hinted(SENTENCE), cut_off=True) == Vote(Question.HINT, None, "", hinted(SENTENCE))


def test_a_vote_keeps_what_was_said_and_what_it_cost() -> None:
    text = "<think>hm</think>\\boxed{1}"
    assert parse(Question.SCORE, text, 1.5, 7) == Vote(Question.SCORE, 1, "", text, 1.5, 7)


# reading a hint


def test_a_hint_is_read_with_its_box_and_its_space_made_even() -> None:
    written = hinted("  Give the distance\n\tin  kilometres. ")
    assert hint(f"I would say:\n{written}") == (1, SENTENCE)


def test_the_last_hint_wins() -> None:
    assert hint(f"[HINT_START]This was too hasty.[HINT_END] Better: {hinted(SENTENCE)}") == (1, SENTENCE)


def test_a_hint_that_never_ends_says_nothing_and_takes_no_time() -> None:
    """With time that grows with the square of the length, this test takes a minute."""
    assert hint("[HINT_START]" * 20_000 + "\\boxed{1}") == (None, "")
    assert hint(hinted(SENTENCE) + "[HINT_END]" + "[HINT_START]" * 20_000) == (1, SENTENCE)


def test_a_hint_counts_only_with_the_box_that_accepts_it() -> None:
    assert hint(hinted(SENTENCE, "\\boxed{-1}")) == (-1, "")
    assert hint(hinted(SENTENCE, "")) == (None, "")
    assert hint(hinted(SENTENCE, "\\boxed{0}")) == (None, "")
    assert hint(hinted(SENTENCE, "\\boxed{1} or rather \\boxed{-1}")) == (-1, "")


def test_a_box_that_accepts_counts_only_with_a_hint() -> None:
    assert hint("\\boxed{1}") == (None, "")
    assert hint(f"[HINT_START]{SENTENCE} \\boxed{{1}}") == (None, "")
    assert hint(f"{SENTENCE}[HINT_END] \\boxed{{1}}") == (None, "")
    assert hint("\\boxed{-1}") == (-1, "")


def test_a_hint_that_is_too_short_says_nothing() -> None:
    assert hint(hinted("x" * MIN_HINT)) == (None, "")
    assert hint(hinted("x" * (MIN_HINT + 1)))[0] == 1
    assert hint(hinted("x" + " " * 50 + "y")) == (None, "")


def test_a_hint_in_thoughts_does_not_count() -> None:
    assert hint(f"<think>{hinted(SENTENCE)}</think>\\boxed{{1}}") == (None, "")


def test_a_score_has_no_hint() -> None:
    assert parse(Question.SCORE, hinted(SENTENCE)).hint == ""


# any text

pieces = st.sampled_from(
    ["\\boxed{", "}", "{", "1", "-1", "+", "0", " ", "</think>", "<think>", "[HINT_START]", "[HINT_END]", "words " * 3]
)
answers = st.one_of(st.text(), st.lists(st.one_of(pieces, st.text(max_size=4))).map("".join))


@given(st.sampled_from(Question), answers)
def test_any_text_gives_a_vote_that_is_valid_or_does_not_count(question: Question, text: str) -> None:
    vote = parse(question, text)
    assert vote.text == text
    assert vote.value in (None, *SCORES)
    if question is Question.HINT:
        assert vote.value != 0
        assert bool(vote.hint) == (vote.value == 1)
    else:
        assert vote.hint == ""


@given(answers, st.sampled_from(SCORES))
def test_a_box_at_the_end_decides_whatever_comes_before_it(before: str, value: int) -> None:
    closed = before if "<think>" not in before else before + "</think>"
    assert score(f"{closed} \\boxed{{{value}}}") == value


# counting


def votes(*values: float | None) -> list[Vote]:
    return [Vote(Question.SCORE, value) for value in values]


@pytest.mark.parametrize(
    ("values", "threshold", "result"),
    [
        ((1, 1, -1), 0, 1),
        ((-1, -1, 1), 0, -1),
        ((1,), 0, 1),
        ((0, 0, 1), 0, 0),
        ((1, 0, -1), 0, 0),
        ((1, -1), 0, 0),
        ((1, 1, -1, -1, 0), 0, 0),
        ((1, 1, -1, 0), 0, 1),
        ((1, None, None), 0, 1),
        ((1, -1, None), 0, 0),
        ((), 0, None),
        ((None, None), 0, None),
        ((None,), 1, None),
        ((1, 1, -1), 0.66, 1),
        ((1, 1, -1), 0.67, 0),
        ((1, 1, None), 1, 1),
        ((1, 1, -1), 1, 0),
        ((-1, -1, -1, 1, 1), 0.6, -1),
    ],
)
def test_most_valid_votes_win(values: tuple[float | None, ...], threshold: float, result: float | None) -> None:
    assert tally(votes(*values), threshold) == result


values_ = st.lists(st.sampled_from([None, -1, 0, 1]), max_size=12)
thresholds = st.sampled_from([0.0, 0.34, 0.5, 0.6, 0.75, 1.0])


@given(values_.flatmap(lambda v: st.tuples(st.just(v), st.permutations(v))), thresholds)
def test_the_order_of_votes_does_not_matter(both: tuple[list[float | None], list[float | None]], share: float) -> None:
    one, other = (votes(*values) for values in both)
    assert tally(one, share) == tally(other, share)
    assert agreement(one) == agreement(other)


@given(values_, thresholds)
def test_invalid_votes_never_matter(values: list[float | None], share: float) -> None:
    valid = [value for value in values if value is not None]
    assert tally(votes(*values), share) == tally(votes(*valid), share)
    assert agreement(votes(*values)) == agreement(votes(*valid))
    assert (tally(votes(*values)) is None) == (not valid)


@given(values_, thresholds)
def test_the_other_way_round_is_the_other_way_round(values: list[float | None], share: float) -> None:
    turned = [None if value is None else -value for value in values]
    result = tally(votes(*values), share)
    assert tally(votes(*turned), share) == (None if result is None else -result)


@given(st.integers(1, 60).flatmap(lambda n: st.tuples(st.integers(n // 2 + 1, n), st.just(n))))
def test_a_share_that_is_just_reached_is_reached(shares: tuple[int, int]) -> None:
    """11 of 20 votes are 55 percent, though 0.55 times 20 is more than 11 to a computer."""
    winners, of = shares
    assert tally(votes(*[1] * winners, *[-1] * (of - winners)), winners / of) == 1


def test_agreement_is_the_winners_share_of_the_valid_votes() -> None:
    assert agreement(votes(1, 1, -1, None)) == pytest.approx(2 / 3)
    assert agreement(votes(None)) is None


def hint_vote(text: str) -> Vote:
    return Vote(Question.HINT, 1 if text else -1, text)


def test_accepted_hints_come_once_each_and_the_longest_first() -> None:
    given_ = [hint_vote("Be brief, please."), hint_vote(""), hint_vote(SENTENCE), hint_vote("Be brief, please.")]
    assert accepted_hints(given_) == (SENTENCE, "Be brief, please.")


def test_no_hint_is_something_else_than_no_valid_vote() -> None:
    assert accepted_hints([hint_vote("")]) == ()
    assert accepted_hints([hint_vote(""), Vote(Question.HINT, None)]) == ()
    assert accepted_hints([Vote(Question.HINT, None)]) is None
    assert accepted_hints([]) is None
