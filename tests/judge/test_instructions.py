"""Wishes about form become instructions that a small model follows; whatever else was said stays."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openclaw_rl.judge.rules import ReplyKind, instruct, read_reply

ONE = "Answer in one short sentence only."
PLAIN = "Answer in one paragraph of plain text."
DETAIL = "Give a longer and more detailed answer, with an example."
SHORTER = "Give a much shorter answer, in one or two sentences."
PRAISE = 'Start your answer with "Great question!", then answer the question.'


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
        ("Please write it as plain text, without bold.", PLAIN),
        ("Can you make it a paragraph instead of a list?", PLAIN),
        ("Please write it as one paragraph.", PLAIN),
        ("I asked for plain text, not a list, and no bold.", PLAIN),
        ("Please add some praise.", PRAISE),
        ("You forgot to praise the question.", PRAISE),
        ("Could you begin with something encouraging?", PRAISE),
        ("Too harsh. Please be kinder.", "Answer the question in a warm, friendly tone, with a word of encouragement."),
        ("I'd prefer it without the box.", "Write the result in plain words, without \\boxed."),
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


@pytest.mark.parametrize(
    "hint",
    [
        "No praise please.",
        "Skip the praise.",
        "I want an answer, not a compliment.",
        "Please don't start with praise.",
        "Be less warm.",
        "Make it formal, not friendly.",
        "It was cold, not warm.",
        "No examples please.",
        "I asked for no examples.",
        "Skip the explanation with examples.",
        "Remove the whole paragraph.",
        "You need to expand the brackets.",
        "It should be some numbers, not words.",
        "The result should be positive.",
        "Please use a numbered list instead of one paragraph.",
        "No running text please, use a list.",
        "I'd prefer a list rather than full sentences.",
        "That's not a list, make it a list.",
        "I asked for a list and got one paragraph.",
        "You did not list the steps.",
        "It's all in one paragraph, hard to read.",
        "Give me another list.",
        "There should not be negative numbers in the list.",
        "Put the numbers at the start.",
        "Use many bold words please.",
        "Use markdown, not plain text.",
        "Use latex instead of plain text.",
        "Put the result in a box.",
        "The result should be boxed.",
        "You forgot the box.",
        "Use a box plot instead.",
        "It's the second box, not the first one.",
        "Not shorter, please.",
        "I asked for an essay.",
        "Please add one more sentence.",
        "You didn't use a list.",
        "The bold is good, but add more of it.",
        "Keep it on one line.",
        "Keine Beispiele, bitte.",
        "Pas d'exemples, s'il te plaît.",
        "Sin ejemplos, por favor.",
    ],
)
def test_who_wants_the_opposite_or_something_else_is_not_told_otherwise(hint: str) -> None:
    assert instruct(hint) == hint


@pytest.mark.parametrize(
    "hint",
    [
        "Shorter, and put the result first.",
        "Shorter, but keep the examples.",
        "Shorter, without the example.",
        "Make it shorter but don't drop the second step.",
        "Shorter and more formal.",
        "Write it for children, shorter.",
        "The last sentence is too long.",
        "Too dry. Use real life examples.",
        "One sentence at the beginning, then the list.",
        "No bold please, just a numbered list.",
    ],
)
def test_a_second_wish_is_not_lost(hint: str) -> None:
    assert instruct(hint).startswith(hint)


def test_an_instruction_is_a_sentence_of_its_own() -> None:
    hint = "right, but far too long, and mention the author"
    assert instruct(hint, "word " * 100).startswith(f"{hint}. ")
    assert instruct(f"{hint}!", "word " * 100).startswith(f"{hint}! ")


def test_bold_words_are_no_reason_to_lose_a_list_or_code() -> None:
    kept = "Use plain text, without bold or other formatting."
    assert instruct("No bold, please.", "**Why?** Because.") == PLAIN
    for response in ("1. **Boil** the water.\n2. Wait.", "Do this:\n```\nprint(1)\n```", "- one\n- **two**"):
        assert instruct("No bold, please.", response) == kept
        assert instruct("No list, please.", response) == PLAIN
    assert instruct("No bold please, just a numbered list.").endswith(kept)


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
