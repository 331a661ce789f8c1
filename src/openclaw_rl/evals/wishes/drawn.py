"""Wishes that a seed draws: where an answer has which words, and in which form. Nobody can prepare for one.

A wish has a place (the beginning, the end, a last line, anywhere), words, and a form of them. It can be taken back.
"""

import tomllib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from importlib.resources import files
from random import Random

from openclaw_rl.evals.conversation import EvalQuestion, questions
from openclaw_rl.evals.personas.persona import of_table
from openclaw_rl.evals.wishes.wish import EvalWish

#: The set of these wishes.
DRAWN = "drawn"
LONGEST_ANSWER = 96
#: How the words are written.
FORMS: dict[str, Callable[[str], str]] = {
    "plain": lambda words: words,
    "capitals": lambda words: words.upper(),
    "italics": lambda words: f"*{words}*",
}


@dataclass(frozen=True, slots=True)
class WordPlace:
    """Where an answer has the words."""

    check: str
    note: str
    shown: str
    """An answer with them, from its usual text."""
    displeased: Sequence[str]


_PARTS = tomllib.loads((files("openclaw_rl.evals") / "data" / "drawn.toml").read_text("utf-8"))
PLACES = {name: WordPlace(**place) for name, place in _PARTS["places"].items()}


@dataclass(frozen=True, slots=True)
class DrawnWish:
    """A wish of words, and the same one taken back."""

    wish: EvalWish
    words: str
    back: EvalWish
    """That the words are no longer wanted."""


def draw(dice: Random, places: Collection[str] = tuple(PLACES), without: Collection[str] = ()) -> DrawnWish:
    """A wish at one of the places, whose words share none with those in `without`."""
    name = dice.choice(sorted(places))
    taken = {word for words in without for word in words.lower().strip("*").split()}
    plain = f"{dice.choice(_free('first', taken))} {dice.choice(_free('second', taken))}"
    form = dice.choice(sorted(FORMS))
    words, place = FORMS[form](plain), PLACES[name]
    title = "-".join([name.replace(" ", "-"), *plain.split(), form])
    rules = [(place.check, [plain])]
    # Signs and capitals are no part of what says whether a text begins or ends with words.
    rules += [("writes", [words])] if form != "plain" else []
    wish = _wish(title, place.note, place.displeased, rules, words, place.shown)
    gone = _PARTS["back"]
    back = _wish(f"no-{title}", gone["note"], gone["displeased"], [("avoids", [plain])], words, "{answer}")
    return DrawnWish(wish, words, back)


def _free(place: str, taken: Collection[str]) -> list[str]:
    return [word for word in _PARTS[place].split() if word not in taken]


def _wish(
    name: str,
    note: str,
    displeased: Collection[str],
    rules: Collection[tuple[str, list[str]]],
    words: str,
    shown: str,
) -> EvalWish:
    said = [phrase.replace("{words}", words) for phrase in displeased]
    instruction = note.replace("{words}", words)
    table = {
        "name": name,
        "description": f"You want one thing: {instruction} When an answer is not like this, you say so.",
        "longest_answer": LONGEST_ANSWER,
        "rules": [
            {
                "name": check,
                "check": check,
                "parameters": {"all_of" if check == "avoids" else "any_of": wanted},
                "displeased": {"en": said},
            }
            for check, wanted in rules
        ],
    }
    corrections = {one.text: _answer(shown, words, one) for one in questions(split="train")}
    return EvalWish(of_table(table, name), instruction, frozenset(), DRAWN, corrections)


def _answer(shown: str, words: str, question: EvalQuestion) -> str:
    return shown.format(words=words, answer=question.reference, topic=question.topic)
