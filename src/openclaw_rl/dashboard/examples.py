"""Examples of judged turns: what was asked and answered, what came next, and what the learner made of it."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tokenizers import Tokenizer

from openclaw_rl.dashboard.tokens import Piece, pieces
from openclaw_rl.ledger.reader import LedgerReader
from openclaw_rl.ledger.verdicts import ExampleKind
from openclaw_rl.methods.base import Method, NoSignal
from openclaw_rl.methods.distillation import TopK, distil
from openclaw_rl.rendering.chat import content_text
from openclaw_rl.types import StoredTurn

#: The heading of an example.
TITLES = {
    ExampleKind.HINTED: "Learned from, with a hint",
    ExampleKind.BEST: "Rated best",
    ExampleKind.WORST: "Rated worst",
    ExampleKind.ABSTAINED: "Not judged",
    ExampleKind.QUARANTINED: "Set aside",
}
#: Turns that are searched for different prompts.
MAX_SEARCHED_TURNS = 50


@dataclass(frozen=True, slots=True)
class Example:
    """A turn, ready to be shown."""

    title: str
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
    """For each hint that was compared: what teacher and policy have in common under it."""

    @property
    def tokens_left_out(self) -> int:
        shown = sum(piece.tip.count("\n") + 1 for piece in self.pieces)
        return len(self.turn.response_ids) - shown if self.pieces else 0


@dataclass(frozen=True, slots=True)
class Prompt:
    """How a conversation began, as the model was given it."""

    question: str
    ids: tuple[int, ...]


def make_example(title: str, turn: StoredTurn, tokenizer: Tokenizer | None, method: Method) -> Example:
    overlaps = compare_hints(turn, method.topk)
    plain = Example(title, turn, question_of(turn), spoken(turn.message), tuple(came_next(turn)), overlaps=overlaps)
    if tokenizer is None:
        return plain
    if not fits(tokenizer, turn):
        return replace(plain, note="Its tokens are not shown: another model wrote them; name it with --model-name.")
    try:
        values, note = method.token_values(turn), ""
    except NoSignal as error:
        values, note = [], f"Its tokens have no colour: {error}."
    return replace(plain, pieces=tuple(pieces(tokenizer, turn, values)), note=note)


def compare_hints(turn: StoredTurn, settings: TopK | None) -> dict[str, str]:
    """What teacher and policy have in common under each hint, and how much it taught; empty without top-k log-probs."""
    if turn.top is None:
        return {}
    try:
        distilled = distil(turn, settings or TopK(turn.top.ids.shape[1]))
    except NoSignal:
        return {}
    k = distilled.ids.shape[1]
    rows = zip(distilled.hints, distilled.overlaps, distilled.chosen_shares(), strict=True)
    return {
        text: f"{overlap.mean():.1f} of the {k} likeliest tokens in common"
        + (f", taught {share:.0%} of the response" if settings else "")
        for text, overlap, share in rows
    }


def fits(tokenizer: Tokenizer, turn: StoredTurn) -> bool:
    """Whether the tokens spell the answer; if not, they are those of another model."""
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
    """A message in words, with its tool calls."""
    lines = [f"calls {call.get('name')} {call.get('arguments')}" for call in calls_of(message)]
    return "\n".join(filter(None, [text_of(message), *lines]))


def calls_of(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [call["function"] for call in message.get("tool_calls") or ()]


def text_of(message: Mapping[str, Any]) -> str:
    try:
        return content_text(message.get("content"))
    except (KeyError, TypeError):
        return json.dumps(message.get("content"), ensure_ascii=False)


def first_prompts(reader: LedgerReader, count: int) -> list[Prompt]:
    """How the first conversations began, each question once."""
    prompts: dict[str, Prompt] = {}
    for turn in reader.conversation_starts(MAX_SEARCHED_TURNS):
        question = question_of(turn)
        if question and question not in prompts:
            prompts[question] = Prompt(question, tuple(turn.prompt_ids))
        if len(prompts) == count:
            break
    return list(prompts.values())
