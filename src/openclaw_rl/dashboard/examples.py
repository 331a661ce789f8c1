"""Turns that are worth a look: what was asked and answered, what came next, and what the learner was to make of it."""

import json
import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tokenizers import Tokenizer

from openclaw_rl.dashboard.tokens import Piece, pieces
from openclaw_rl.ledger.changes import QUARANTINED
from openclaw_rl.ledger.queries import load_turn
from openclaw_rl.methods.base import Method, NoSignal
from openclaw_rl.methods.distillation import TopK, distil
from openclaw_rl.methods.topk_select import TopkSelect
from openclaw_rl.rendering.chat import content_text
from openclaw_rl.types import StoredTurn, TurnKind

#: Of each kind so many, the newest ones.
EACH = 2
#: What is looked for, and how; a turn is shown once, under the first that fits.
KINDS = (
    ("Learned from, with a hint", "v.sample IN ('opd', 'opd+rl')", "v.number DESC"),
    ("Rated best", "v.score > 0", "v.score DESC, v.number DESC"),
    ("Rated worst", "v.score < 0", "v.score, v.number DESC"),
    ("Nobody could say", "v.score IS NULL AND v.sample IS NULL", "v.number DESC"),
    ("Set aside", f"t.reason LIKE '{QUARANTINED}%'", "v.number DESC"),
)
#: Turns that are looked through for different prompts.
SEARCHED = 50


@dataclass(frozen=True, slots=True)
class Example:
    """A turn, ready to be shown."""

    why: str
    turn: StoredTurn
    question: str
    answer: str
    came_next: tuple[tuple[str, str], ...]
    """(who, what)."""
    pieces: tuple[Piece, ...] = ()
    """The answer's tokens, where they can be shown."""
    note: str = ""
    """Why its tokens are not shown, or have no colour."""
    overlaps: Mapping[str, str] = field(default_factory=dict)
    """What is to be said of each hint that the teacher was compared with the policy under."""

    @property
    def tokens_left_out(self) -> int:
        shown = sum(piece.tip.count("\n") + 1 for piece in self.pieces)
        return len(self.turn.response_ids) - shown if self.pieces else 0


@dataclass(frozen=True, slots=True)
class Prompt:
    """How a conversation began, as the model was given it."""

    question: str
    ids: tuple[int, ...]


def choose(db: sqlite3.Connection) -> list[tuple[str, int]]:
    """Turns to show, each with the reason."""
    found: dict[int, str] = {}
    for why, condition, order in KINDS:
        rows = db.execute(
            f"SELECT v.turn FROM verdicts v JOIN turns t ON t.number = v.turn WHERE {condition} ORDER BY {order} "
            "LIMIT ?",
            (EACH + len(found),),
        )
        new = [row["turn"] for row in rows if row["turn"] not in found]
        found |= dict.fromkeys(new[:EACH], why)
    return [(why, turn) for turn, why in found.items()]


def make_example(why: str, turn: StoredTurn, tokenizer: Tokenizer | None, method: Method) -> Example:
    overlaps = compare_hints(turn, method.topk if isinstance(method, TopkSelect) else None)
    plain = Example(why, turn, question_of(turn), spoken(turn.message), tuple(came_next(turn)), overlaps=overlaps)
    if tokenizer is None:
        return plain
    if not fits(tokenizer, turn):
        return replace(plain, note="Its tokens are not shown: they are another model's, which --model-name would name.")
    try:
        values, note = method.token_values(turn), ""
    except NoSignal as error:
        values, note = [], f"Its tokens have no colour: {error}."
    return replace(plain, pieces=tuple(pieces(tokenizer, turn, values)), note=note)


def compare_hints(turn: StoredTurn, settings: TopK | None) -> dict[str, str]:
    """What teacher and policy have in common under each hint, and which was chosen; empty where nobody asked."""
    if turn.top is None:
        return {}
    try:
        found = distil(turn, settings or TopK(turn.top.ids.shape[1]))
    except NoSignal:
        return {}
    k = found.ids.shape[1]
    rows = zip(found.hints, found.overlaps, found.chosen_shares(), strict=True)
    return {
        text: f"{overlap.mean():.1f} of the {k} likeliest tokens in common"
        + (f", taught {share:.0%} of the response" if settings else "")
        for text, overlap, share in rows
    }


def fits(tokenizer: Tokenizer, turn: StoredTurn) -> bool:
    """Whether the tokens spell what was answered: else they are those of another model."""
    try:
        spelled = tokenizer.decode(turn.response_ids, skip_special_tokens=True)
    except OverflowError:
        return False
    words = [text_of(turn.message).strip(), *(str(call.get("name")) for call in calls_of(turn.message))]
    return all(word in spelled for word in words)


def question_of(turn: StoredTurn) -> str:
    """What a turn answers: the last message of a person or a tool."""
    asked = [message for message in turn.messages if message.get("role") in ("user", "tool")]
    return spoken(asked[-1]) if asked else ""


def came_next(turn: StoredTurn) -> Iterator[tuple[str, str]]:
    for message in turn.next_state or []:
        yield str(message.get("role", "")), spoken(message)
    for given in turn.feedback:
        yield f"{given.source} feedback", f"{given.score:+g} {given.text}".strip()


def spoken(message: Mapping[str, Any]) -> str:
    """A message in words, its calls of tools with it."""
    lines = [f"calls {call.get('name')} {call.get('arguments')}" for call in calls_of(message)]
    return "\n".join(filter(None, [text_of(message), *lines]))


def calls_of(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [call["function"] for call in message.get("tool_calls") or ()]


def text_of(message: Mapping[str, Any]) -> str:
    try:
        return content_text(message.get("content"))
    except (KeyError, TypeError):
        return json.dumps(message.get("content"), ensure_ascii=False)


def first_prompts(db: sqlite3.Connection, count: int) -> list[Prompt]:
    """How the first conversations began, each beginning once."""
    rows = db.execute(
        "SELECT number FROM turns WHERE kind = ? AND parent IS NULL ORDER BY number LIMIT ?", (TurnKind.MAIN, SEARCHED)
    ).fetchall()
    found: dict[str, Prompt] = {}
    for row in rows:
        turn = load_turn(db, row["number"])
        question = question_of(turn)
        if question and question not in found:
            found[question] = Prompt(question, tuple(turn.prompt_ids))
        if len(found) == count:
            break
    return list(found.values())
