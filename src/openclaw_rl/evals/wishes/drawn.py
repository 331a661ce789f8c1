"""Wishes that a seed draws: where an answer has which words, and in which form. Nobody can prepare for one.

A wish has a place (the beginning, the end, a last line, anywhere), words, and a form of them. It can be taken back.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from random import Random

from openclaw_rl.evals.conversation import EvalQuestion, questions
from openclaw_rl.evals.personas.persona import of_table
from openclaw_rl.evals.wishes.wish import EvalWish

#: The set of these wishes.
DRAWN = "drawn"
LONGEST_ANSWER = 96
_FIRST = (
    *(
        "amber",
        "brave",
        "calm",
        "copper",
        "crimson",
        "dusty",
        "early",
        "frosty",
        "gentle",
        "golden",
        "hollow",
        "humble",
    ),
    *("idle", "jolly", "lively", "lucky", "marble", "mellow", "misty", "noble", "olive", "patient", "plain", "proud"),
    *("quiet", "rusty", "scarlet", "silver", "sleepy", "sturdy", "sunny", "tidy", "velvet", "wandering", "wooden"),
)
_SECOND = (
    *("anchor", "badger", "basket", "beacon", "bridge", "button", "candle", "canyon", "castle", "cloud", "compass"),
    *("cricket", "drummer", "falcon", "fiddle", "garden", "harbour", "hammer", "island", "kettle", "ladder", "lantern"),
    *("meadow", "mirror", "monkey", "needle", "orchard", "otter", "paddle", "pepper", "pillow", "pocket", "raven"),
    *("ribbon", "saddle", "sparrow", "teapot", "thistle", "tunnel", "turtle", "violin", "wagon", "walnut", "window"),
)
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
    displeased: tuple[str, ...]


PLACES = {
    "begins": WordPlace(
        "begins_with",
        'Begin every answer with "{words}".',
        "{words}: {answer}",
        (
            'Please begin every answer with "{words}".',
            'Always start with "{words}", please.',
            'Your answers should begin with "{words}".',
            'I want every answer to start with "{words}".',
        ),
    ),
    "ends": WordPlace(
        "ends_with",
        'End every answer with "{words}".',
        "{answer} {words}",
        (
            'Please end every answer with "{words}".',
            'Always finish with "{words}", please.',
            'Your answers should end with "{words}".',
            'I want "{words}" as the last words of every answer.',
        ),
    ),
    "last line": WordPlace(
        "last_line",
        'End every answer with a line of its own that begins with "{words}:" and names the topic.',
        "{answer}\n{words}: {topic}",
        (
            'Please add a last line that begins with "{words}:" and names the topic.',
            'Every answer should end with a line "{words}:" and the topic.',
            'Always write a last line of its own: "{words}:" and then the topic.',
        ),
    ),
    "says": WordPlace(
        "says",
        'Use the words "{words}" in every answer.',
        "{answer} Think of the {words} too.",
        (
            'Please use the words "{words}" in every answer.',
            'Always say "{words}" somewhere, please.',
            'Every answer should have the words "{words}" in it.',
            'I want to read "{words}" in all your answers.',
        ),
    ),
}
BACK_NOTE = 'Do not write "{words}".'
_BACK = (
    'Please stop writing "{words}".',
    'No more "{words}", please. I changed my mind.',
    'I don\'t want "{words}" in your answers any more.',
    'Leave out "{words}" from now on.',
)


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
    plain = f"{dice.choice(_free(_FIRST, taken))} {dice.choice(_free(_SECOND, taken))}"
    form = dice.choice(sorted(FORMS))
    words, place = FORMS[form](plain), PLACES[name]
    title = "-".join([name.replace(" ", "-"), *plain.split(), form])
    rules = [(place.check, [plain])]
    # Signs and capitals are no part of what says whether a text begins or ends with words.
    rules += [("writes", [words])] if form != "plain" else []
    wish = _wish(title, place.note, place.displeased, rules, words, place.shown)
    back = _wish(f"no-{title}", BACK_NOTE, _BACK, [("avoids", [plain])], words, "{answer}")
    return DrawnWish(wish, words, back)


def _free(words: Collection[str], taken: Collection[str]) -> list[str]:
    return [word for word in words if word not in taken]


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
