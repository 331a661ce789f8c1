"""A response token by token: all of it, whole characters only, with the numbers that the learner had."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openclaw_rl.dashboard.run import make_example
from openclaw_rl.dashboard.views.turn import MAX_TOKENS, SHADES, pieces, token_view
from openclaw_rl.rendering.tokenizer import ChatTokenizer
from openclaw_rl.types import SampleKind, State, StoredTurn, Verdict
from support.judged_run import answered, hinted, judged
from support.methods import a_method
from support.properties import examples
from support.records import Book


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> ChatTokenizer:
    return ChatTokenizer(tiny_model)


def a_turn_of(ids: list[int]) -> StoredTurn:
    """Only what is looked at here."""
    turn = object.__new__(StoredTurn)
    given = {
        "response_ids": ids,
        "logprobs": [-0.5] * len(ids),
        "verdict": None,
        "sample": SampleKind.RL,
        "top": None,
    }
    for name, value in given.items():
        object.__setattr__(turn, name, value)
    return turn


def spelled(text: str) -> str:
    return text.replace("↵\n", "\n")


texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="↵"), max_size=60)


@examples(150)
@given(texts)
def test_the_pieces_are_the_response_and_none_is_half_a_character(tokenizer: ChatTokenizer, text: str) -> None:
    ids = tokenizer.encode_text(text)
    found = pieces(tokenizer.backend, a_turn_of(ids), [])
    assert spelled("".join(piece.text for piece in found)) == text
    assert "\ufffd" in text or not any("\ufffd" in piece.text for piece in found)
    assert sum(piece.tokens for piece in found) == len(ids)


@examples(100)
@given(st.lists(st.integers(0, 420), max_size=40))
def test_bytes_that_never_become_a_character_are_shown_all_the_same(tokenizer: ChatTokenizer, ids: list[int]) -> None:
    found = pieces(tokenizer.backend, a_turn_of(ids), [1.0] * len(ids))
    assert sum(piece.tokens for piece in found) == len(ids)
    assert all(piece.advantage == 1.0 for piece in found)


def test_tokens_that_make_one_character_are_one_piece(tokenizer: ChatTokenizer) -> None:
    ids = tokenizer.encode_text("a🦞b")
    assert len(ids) == 6
    worth = [1.0, 0.0, 1.0, 2.0, 1.0, -4.0]
    found = pieces(tokenizer.backend, a_turn_of(ids), worth)
    assert [(piece.text, piece.advantage) for piece in found] == [("a", 1.0), ("🦞", 1.0), ("b", -4.0)]
    assert [piece.shade for piece in found] == [SHADES // 2, SHADES // 2, SHADES]


def test_colours_and_words_are_those_of_the_learner(book: Book, tokenizer: ChatTokenizer) -> None:
    turn = book.read(hinted(book, answered(book, tokenizer, "Why?", "hello world", "Shorter!")))
    method = a_method("combine", w_rl=0.5)
    view = make_example("why", turn, tokenizer.backend, method).tokens
    assert view is not None
    values = method.token_values(turn)
    assert len(view.pieces) == len(values)
    for place, (piece, value) in enumerate(zip(view.pieces, values, strict=True)):
        assert piece.advantage == pytest.approx(value)
        teacher = -0.5 if place % 2 else -3.0
        for number in (f"log-prob {turn.logprobs[place]:+.3f}", f"log-prob {teacher:+.3f}", f"advantage {value:+.3f}"):
            assert number in piece.tip
        assert f"teacher {100 * math.exp(teacher):.2g} %" in piece.tip
    assert view.pieces[0].tip.startswith("'he' (256) · policy ")
    assert view.pieces[-1].text == "<|im_end|>"


def test_without_a_signal_there_are_tokens_but_no_colours(book: Book, tokenizer: ChatTokenizer) -> None:
    turn = answered(book, tokenizer, "Why?", "hello", "Oh.")
    judged(book, turn, Verdict(None, None), None, "the judge abstained: silence")
    view = token_view(tokenizer.backend, book.read(turn), a_method("combine"))
    assert {piece.shade for piece in view.pieces} == {0}
    assert view.note == "Its tokens have no colour: every signal in it is zero with this method."


def test_tokens_of_another_model_are_not_shown_as_words(book: Book, tokenizer: ChatTokenizer) -> None:
    turn = book.put(State.READY, response_ids=[70, 71, 72], logprobs=[-1.0] * 3)
    example = make_example("why", book.read(turn), tokenizer.backend, a_method("combine"))
    assert example.tokens is not None
    assert example.tokens.pieces == ()
    assert "another model wrote them" in example.tokens.note
    assert example.answer.startswith("answer ")
    nonsense = replace(book.read(turn), response_ids=[-5, 10**8], logprobs=[-1.0] * 2)
    assert token_view(tokenizer.backend, nonsense, a_method("combine")).pieces == ()


def test_of_an_endless_response_the_beginning_is_shown(book: Book, tokenizer: ChatTokenizer) -> None:
    turn = answered(book, tokenizer, "Why?", "hello " * 2000, "Stop!")
    view = token_view(tokenizer.backend, book.read(turn), a_method("combine"))
    assert len(view.pieces) == MAX_TOKENS
    assert view.left_out == len(book.read(turn).response_ids) - MAX_TOKENS
