"""The questions that simulated people ask."""

from openclaw_rl.evals.conversation import all_questions, questions
from openclaw_rl.evals.personas.persona import BUILT_IN
from openclaw_rl.evals.personas.rules import count_sentences, count_words
from openclaw_rl.sense import check


def test_enough_of_them_in_each_split() -> None:
    assert len(all_questions()) >= 160
    assert len(questions(split="held-out")) == 40
    for persona in BUILT_IN:
        assert len(questions(persona, "train")) >= 24, persona
        assert len(questions(persona, "held-out")) >= 10, persona


def test_none_is_in_the_file_twice() -> None:
    texts = [question.text.casefold() for question in all_questions()]
    assert len(set(texts)) == len(texts)
    assert {name for question in all_questions() for name in question.personas} == set(BUILT_IN)


def test_references_are_short_answers_that_the_guard_accepts() -> None:
    for question in all_questions():
        assert 1 <= count_sentences(question.reference) <= 2, question
        assert count_words(question.reference) <= 40, question
        assert check(question.reference, question.text, question.reference).ok, question


def test_the_seed_decides_the_order_and_nothing_else() -> None:
    one, same, other = (questions("student", "train", seed) for seed in (1, 1, 2))
    assert one == same
    assert one != other
    assert sorted(one, key=str) == sorted(other, key=str)


def test_a_persona_of_ones_own_may_ask_everything() -> None:
    assert len(questions("pirate")) == len(all_questions())
