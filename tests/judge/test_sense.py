"""What is no answer, whatever was asked."""

import pytest

from openclaw_rl.judge.sense import fault_of, repeats_question, words_of

MAGNETS = "How do magnets attract iron?"


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        ("", "is empty"),
        ("…", "is empty"),
        ("very very very very very very very very very very", "repeats itself"),
        ("Magnets pull iron with their field.", ""),
        ("Yes.", ""),
    ],
)
def test_empty_and_repetitive_answers_are_bad(answer: str, fault: str) -> None:
    assert fault_of(words_of(answer)) == fault


@pytest.mark.parametrize(
    ("answer", "request_", "instruction", "repeats"),
    [
        ("How do magnets attract iron?", MAGNETS, "", True),
        ("Great question, how do magnets attract iron?", MAGNETS, 'Start with "Great question!".', True),
        ("There are 5 minutes in 5 minutes.", "How many minutes are 5 minutes?", "", True),
        ("Great question! Their fields line up.", MAGNETS, 'Start with "Great question!".', False),
        ("The capital of France is Paris.", "What is the capital of France?", "", False),
        ("There are 60 minutes in an hour.", "How many minutes are in an hour?", "", False),
        ("A spider has eight legs.", "How many legs does a spider have?", "", False),
        ("Yes.", "Is iron magnetic?", "", False),
        ("Magnets attract iron.", "Put it shorter: magnets, as we all know, attract iron", "", False),
        ("", MAGNETS, "", False),
    ],
)
def test_an_answer_that_adds_nothing_to_its_question_is_found(
    answer: str, request_: str, instruction: str, repeats: bool
) -> None:
    assert repeats_question(answer, request_, instruction) is repeats
