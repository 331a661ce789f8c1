"""Wishes about form become instructions that a small model follows; whatever else was said stays."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openclaw_rl.judge.reader import ReplyKind, instruct, read_reply

ONE = "Answer in one short sentence only."
PLAIN = "Answer in one paragraph of plain text."
DETAIL = "Give a longer and more detailed answer, with an example."
SHORTER = "Give a much shorter answer, in one or two sentences."


@pytest.mark.parametrize(
    ("hint", "instruction"),
    [
        ("One sentence, please.", ONE),
        ("shorter pls", SHORTER),
        ("Too long.", SHORTER),
        ("No bold, please.", PLAIN),
        ("Kürzer bitte, ein Satz.", "Antworte nur in einem kurzen Satz."),
        ("Sans gras, s'il te plaît.", "Écris du texte simple, sans gras."),
        ("太长了。", "请简短回答，最多一两句话。"),
        ("Make it one short sentence.", ONE),
        ("I don't have time to read all that. One sentence, please.", ONE),
        ("That's a lot to read.", SHORTER),
        ("Kannst du das kürzer machen?", "Antworte viel kürzer, in ein oder zwei Sätzen."),
        ("Résume en une phrase, c'est trop long.", "Réponds en une seule phrase courte."),
        ("Hazlo más breve, por favor.", "Responde mucho más corto, en una o dos frases."),
        ("I asked for plain text, not bold.", PLAIN),
        ("I can't copy the bold parts. Make it plain text, please.", PLAIN),
        ("Can you make it a paragraph instead of a list?", PLAIN),
        ("Too many points. Write it as one paragraph, please.", PLAIN),
        ("I asked for plain text, not a list, and no bold.", PLAIN),
        ("Please add some praise.", 'Start with "Great question!", then answer.'),
        ("Too harsh. Please be kinder.", "Be warm, kind and encouraging."),
        ("I wanted the plain number, not a box.", "Write the result in plain words, without \\boxed."),
        ("I asked for an explanation, not a one-liner.", DETAIL),
        ("Too short. I need more detail, please.", DETAIL),
    ],
)
def test_a_wish_that_says_nothing_else_becomes_the_instruction(hint: str, instruction: str) -> None:
    assert instruct(hint) == instruction


@pytest.mark.parametrize("hint", ["Shorter please, and mention Freud.", "Add an example about cats."])
def test_what_else_was_said_stays_before_the_instruction(hint: str) -> None:
    said = instruct(hint)
    assert said.startswith(hint)
    assert len(said) > len(hint) + 20


@pytest.mark.parametrize(
    "hint",
    [
        "Make it two sentences.",
        "At most 20 words, please.",
        "Use a table instead of a list, please.",
        "Give me a list.",
        "Put the names in bold.",
        "Paris is not the capital of Italy, Rome is.",
        "Use the metric system.",
        "",
    ],
)
def test_what_is_no_such_wish_or_names_a_number_stays_as_it_is(hint: str) -> None:
    assert instruct(hint) == hint


def test_an_answer_that_is_short_already_is_told_to_be_one_sentence() -> None:
    response = "To prepare for it, read the company's page. Dress well and arrive early."
    assert instruct("Shorter, please.", response) == ONE
    assert instruct("Shorter, please.", response * 10) == SHORTER
    assert instruct("No bold, please.", response) == instruct("No bold, please.")


def test_too_short_is_no_wish_for_less() -> None:
    assert instruct("Zu kurz, ich brauche mehr Details.").endswith("Antworte ausführlicher, mit einem Beispiel.")
    assert "kürzer" not in instruct("Zu viel Fettdruck. Bitte nur normaler Text.")
    assert instruct("Write it in a normal sentence, without the box.").endswith("without \\boxed.")
    assert ONE not in instruct("Write it in a normal sentence, without the box.")


@given(st.text(max_size=400))
def test_no_text_is_lost_or_breaks_it(hint: str) -> None:
    said = instruct(hint)
    assert isinstance(said, str)
    assert bool(said) == bool(hint)


@pytest.mark.parametrize(
    "message",
    [
        "You didn't answer my question. Please answer it properly.",
        "That makes no sense. Please write a proper answer.",
        "Du hast meine Frage nicht beantwortet.",
    ],
)
def test_who_only_wants_an_answer_gives_no_hint(message: str) -> None:
    reading = read_reply("Why do we dream?", "Dreams.", [{"role": "user", "content": message}])
    assert (reading.kind, reading.hint) == (ReplyKind.REJECTION, "")


def test_a_correction_keeps_its_own_words() -> None:
    message = "No, it was shorter than that: 1987, not 1986."
    reading = read_reply("When?", "It was in 1986.", [{"role": "user", "content": message}])
    assert "1987" in reading.hint
