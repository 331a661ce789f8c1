"""Examples of judged turns: what was asked and answered, what came next, and what the learner made of it."""

from dataclasses import dataclass
from sqlite3 import Connection

from tokenizers import Tokenizer

from openclaw_rl.dashboard.views.tokens import compare_hints, token_view
from openclaw_rl.dashboard.views.turn_view import TurnView, from_turn
from openclaw_rl.dashboard.views.words import spoken
from openclaw_rl.ledger.turns import conversation_starts, load_turn
from openclaw_rl.ledger.verdicts import ExampleKind
from openclaw_rl.methods.base import Method
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
class Prompt:
    """How a conversation began, as the model was given it."""

    question: str
    ids: tuple[int, ...]


def make_example(title: str, turn: StoredTurn, tokenizer: Tokenizer | None, method: Method) -> TurnView:
    tokens = token_view(tokenizer, turn, method) if tokenizer is not None else None
    return from_turn(turn, title, tokens, compare_hints(turn, method.topk))


def question_of(turn: StoredTurn) -> str:
    """What a turn answers: the last message of a person or a tool."""
    asked = [message for message in turn.messages if message.get("role") in ("user", "tool")]
    return spoken(asked[-1]) if asked else ""


def first_prompts(db: Connection, count: int) -> list[Prompt]:
    """How the first conversations began, each question once."""
    prompts: dict[str, Prompt] = {}
    for number in conversation_starts(db, MAX_SEARCHED_TURNS):
        turn = load_turn(db, number)
        question = question_of(turn)
        if question and question not in prompts:
            prompts[question] = Prompt(question, tuple(turn.prompt_ids))
        if len(prompts) == count:
            break
    return list(prompts.values())
