"""The guard: whether an answer is one, on answers written by hand and on anything at all."""

import json
import math
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openclaw_rl.evals.conversation import all_questions
from openclaw_rl.sense import MAX_CHARACTERS, MAX_PERPLEXITY, check, lacks_code

#: Written by hand, with whether they are good, and with a reference where the question is none of ours.
ANSWERS = [json.loads(line) for line in Path(__file__).with_name("answers.jsonl").read_text("utf-8").splitlines()]
REFERENCES = {question.text: question.reference for question in all_questions()}
REFERENCES |= {case["question"]: case["reference"] for case in ANSWERS if "reference" in case}
SKY = "Why is the sky blue?"
GOOD = "Because air scatters blue light from the sun more than any other colour."

words = st.lists(st.sampled_from(GOOD.split()), min_size=2, max_size=6)


def is_ok(answer: str, question: str = SKY, perplexity: float | None = None) -> bool:
    return check(answer, question, REFERENCES[question], perplexity=perplexity).ok


def test_tells_good_answers_from_bad_ones() -> None:
    wrong = [case["answer"] for case in ANSWERS if is_ok(case["answer"], case["question"]) is not case["good"]]
    good = sum(case["good"] for case in ANSWERS)
    assert good >= 30
    assert len(ANSWERS) - good >= 30
    assert len(wrong) <= 0.05 * len(ANSWERS), wrong


def test_references_are_taken_for_answers_to_their_own_questions_only() -> None:
    questions = all_questions()
    mixed = list(questions)
    random.Random(0).shuffle(mixed)
    accepted = [
        (question.text, other.reference)
        for question, other in zip(questions, mixed, strict=True)
        if question.topic != other.topic and check(other.reference, question.text, question.reference).ok
    ]
    assert len(accepted) <= 0.05 * len(questions), accepted


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("", "it is empty"),
        ("?!", "it is empty"),
        ("blue " * 20, "it repeats itself"),
        ("Air scatters " + "o" * 20 + " blue light.", "one character goes on and on"),
        ("xkcd qwrt zzzz bcdf", "it is garbled"),
        ("The sky is blue.", "it only repeats the question"),
        ("Cats like milk and fish.", "it is about something else"),
    ],
)
def test_says_what_is_wrong(answer: str, reason: str) -> None:
    found = check(answer, SKY, REFERENCES[SKY])
    assert not found.ok
    assert reason in found.reasons


def test_other_languages() -> None:
    german = "Die Luft streut den blauen Anteil des Sonnenlichts stärker als den roten."
    assert check("Weil die Luft blaues Licht stärker streut.", "Warum ist der Himmel blau?", german).ok
    assert not check("Katzen trinken gern Milch.", "Warum ist der Himmel blau?", german).ok
    chinese = "空气对蓝光的散射比红光强，所以天空看起来是蓝色的。"
    assert check("因为空气散射蓝光比红光多。", "天空为什么是蓝色的？", chinese).ok
    assert not check("猫喜欢喝牛奶。", "天空为什么是蓝色的？", chinese).ok


def test_perplexity_counts_where_it_is_known() -> None:
    assert is_ok(GOOD, perplexity=None)
    assert is_ok(GOOD, perplexity=MAX_PERPLEXITY)
    for improbable in (MAX_PERPLEXITY + 1, math.inf, math.nan):
        assert not is_ok(GOOD, perplexity=improbable)


@given(st.text(), st.text(), st.text(), st.none() | st.floats())
def test_takes_anything(answer: str, question: str, reference: str, perplexity: float | None) -> None:
    found = check(answer, question, reference, perplexity=perplexity)
    assert found.ok is not bool(found.reasons)
    assert 0 <= found.overlap <= 1
    assert found == check(answer, question, reference, perplexity=perplexity)


@given(words, st.integers(6, 40))
def test_nothing_said_over_and_over_is_an_answer(said: list[str], times: int) -> None:
    assert not is_ok(" ".join(said * times))


@given(st.permutations(["blue light blue light blue light blue light blue light", "air", "sun", "colour"]))
def test_repetition_is_found_wherever_it_stands(parts: list[str]) -> None:
    assert "it repeats itself" in check(" ".join(parts), SKY, REFERENCES[SKY]).reasons


@given(st.sampled_from([case for case in ANSWERS if case["good"]]), st.sampled_from([" ", "\n", "\n\n", ".", " 👍"]))
def test_what_stands_after_a_good_answer_does_not_spoil_it(case: dict[str, str], end: str) -> None:
    assert is_ok(case["answer"], case["question"]) == is_ok(case["answer"] + end, case["question"])


def test_a_long_answer_is_cheap() -> None:
    endless = "".join(random.Random(0).choices("ab cde\n", k=50 * MAX_CHARACTERS))
    assert check(endless, SKY, REFERENCES[SKY]) == check(endless[:MAX_CHARACTERS], SKY, REFERENCES[SKY])


@pytest.mark.parametrize(
    ("question", "asks"),
    [
        ("Write a Python function that adds two numbers.", True),
        ("Please implement this function:", True),
        ("How do I read a file in Python? Show me the code.", True),
        ("give me code that sorts a list", True),
        ("Create a small HTML page with a heading.", True),
        ("What is a comment in code and why would I add one?", False),
        ("What does a list do in Python?", False),
        ("Write a story about a secret code.", False),
        ("Give me some tips for taking good photos.", False),
    ],
)
def test_only_an_answer_to_a_request_for_code_can_lack_it(question: str, asks: bool) -> None:
    assert lacks_code("Nobody knows.", question) is asks
    assert not lacks_code("Like this:\n```python\nprint(1)\n```", question)
