"""A simulated person: a name, preferences as rules, and phrases for being pleased or displeased.

`load` reads a built-in persona by its name, or a TOML file. Its UserError names the file and the key that is wrong.
"""

import random
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from openclaw_rl.errors import UserError
from openclaw_rl.evals.personas.rules import Check, Count, count_words, estimate_tokens, make_check

BUILT_IN = ("student", "teaching-assistant", "teacher", "brief")
#: The file with phrases for every persona. A persona's own file may replace them.
_EVERYBODY = "everybody"
_KEYS = {
    "name",
    "description",
    "languages",
    "longest_answer",
    "translated",
    "repeats_question",
    "pleased",
    "asks_again",
    "no_answer",
    "next_question",
}
_QUESTION = "{question}"
#: The usual limit in tokens: enough for a detailed answer.
MAX_ANSWER_TOKENS = 160


@dataclass(frozen=True, slots=True)
class PersonaPhrases:
    """Several phrasings of one message, by language."""

    by_language: Mapping[str, tuple[str, ...]]

    def choose(self, languages: Sequence[str], dice: random.Random) -> str:
        """A random phrase in a random one of the languages."""
        return dice.choice(self.by_language[dice.choice(list(languages))])


@dataclass(frozen=True, slots=True)
class Rule:
    """One preference of a persona, and what the persona says when an answer violates it."""

    name: str
    displeased: PersonaPhrases
    check: Check = field(repr=False)


@dataclass(frozen=True, slots=True)
class Persona:
    """A simulated person."""

    name: str
    description: str
    """Who it is and what it likes, in the second person: the prompt for a model that plays it."""
    rules: tuple[Rule, ...]
    pleased: PersonaPhrases
    asks_again: PersonaPhrases
    """Repeats the wish and `{question}` in one message."""
    no_answer: PersonaPhrases
    """The reaction to an answer that the quality guard rejects: empty, repetitive or off topic."""
    next_question: PersonaPhrases
    """Introduces the next `{question}` after a reaction in the same message."""
    repeats_question: bool
    """Whether the same question is repeated after an answer that failed."""
    languages: tuple[str, ...] = ("en",)
    longest_answer: int = MAX_ANSWER_TOKENS
    """In tokens. Longer answers are cut off, to save time."""
    translated: bool = False
    """Whether answers should be in another language than the questions."""

    def failed(self, answer: str, count: Count = estimate_tokens) -> tuple[Rule, ...]:
        """The rules that an answer breaks. An answer without words breaks all of them."""
        if not count_words(answer):
            return self.rules
        return tuple(rule for rule in self.rules if not rule.check(answer, count))


def load(name: str, languages: Sequence[str] = ()) -> Persona:
    """A built-in persona, or one from a TOML file. `languages` replaces the persona's own."""
    if name in BUILT_IN:
        where, table = f"{name}.toml", _built_in(name)
    else:
        where, table = name, _read(Path(name))
    persona = of_table(table, where)
    return _checked(replace(persona, languages=tuple(languages)), where) if languages else persona


def of_table(table: dict[str, Any], where: str) -> Persona:
    """A persona from the content of a file, which messages call `where`. Raises UserError."""
    return _checked(_persona(table, where), where)


@cache
def _built_in(name: str) -> dict[str, Any]:
    return tomllib.loads((files("openclaw_rl.evals.personas") / f"{name}.toml").read_text("utf-8"))


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.expanduser().read_text("utf-8"))
    except FileNotFoundError as error:
        raise UserError(
            f"The persona {path} is neither a file nor one of {', '.join(BUILT_IN)}; give the path of a TOML file."
        ) from error
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"The persona {path} cannot be read: {str(error).rstrip('.')}.") from error


def _persona(table: dict[str, Any], where: str) -> Persona:
    """A persona from the content of a file, without a check of its languages."""
    if unknown := table.keys() - _KEYS - {"rules"}:
        raise UserError(
            f"{where}: {sorted(unknown)[0]} is not a key of a persona; use one of {', '.join(sorted(_KEYS))}."
        )
    phrases = _built_in(_EVERYBODY) | table
    rules = table.get("rules")
    if not isinstance(rules, list) or not rules:
        raise UserError(f"{where}: rules is missing; write at least one [[rules]].")
    longest = table.get("longest_answer", MAX_ANSWER_TOKENS)
    if not isinstance(longest, int) or longest < 1:
        raise UserError(f"{where}: longest_answer must be a number of tokens.")
    for key in ("repeats_question", "translated"):
        if not isinstance(table.get(key, False), bool):
            raise UserError(f"{where}: {key} must be true or false.")
    return Persona(
        name=_text(table, "name", where),
        description=_text(table, "description", where),
        rules=tuple(_rule(rule, f"{where}: rules[{place}]") for place, rule in enumerate(rules)),
        pleased=_phrases(phrases, "pleased", where),
        asks_again=_asking(phrases, "asks_again", where),
        no_answer=_phrases(phrases, "no_answer", where),
        next_question=_asking(phrases, "next_question", where),
        repeats_question=table.get("repeats_question", False),
        languages=_texts(table.get("languages", ["en"]), f"{where}: languages"),
        longest_answer=longest,
        translated=table.get("translated", False),
    )


def _rule(table: Any, where: str) -> Rule:
    if not isinstance(table, dict):
        raise UserError(f"{where} is not a table; write [[rules]] above it.")
    if unknown := table.keys() - {"name", "check", "parameters", "displeased"}:
        raise UserError(f"{where}.{sorted(unknown)[0]} is not a key of a rule; parameters belong in parameters.")
    parameters = table.get("parameters", {})
    if not isinstance(parameters, dict):
        raise UserError(f"{where}.parameters is not a table.")
    name = _text(table, "check", where)
    try:
        check = make_check(name, parameters)
    except ValueError as error:
        raise UserError(f'{where}.check = "{name}" {error}.') from error
    return Rule(_text(table, "name", where), _phrases(table, "displeased", where), check)


def _phrases(table: dict[str, Any], key: str, where: str) -> PersonaPhrases:
    """The phrases under a key, by language."""
    given = table.get(key)
    if not isinstance(given, dict) or not given:
        raise UserError(f'{where}: {key} is missing; write a table with phrases by language, such as en = ["…"].')
    return PersonaPhrases(
        {language: _texts(listed, f"{where}: {key}.{language}") for language, listed in given.items()}
    )


def _asking(table: dict[str, Any], key: str, where: str) -> PersonaPhrases:
    """Phrases that each contain the question once."""
    phrases = _phrases(table, key, where)
    for language, listed in phrases.by_language.items():
        for phrase in listed:
            if phrase.count(_QUESTION) != 1:
                raise UserError(f'{where}: {key}.{language}: "{phrase}" must contain {_QUESTION} once.')
    return phrases


def _text(table: dict[str, Any], key: str, where: str) -> str:
    value = table.get(key)
    if not isinstance(value, str) or not value.strip():
        raise UserError(f"{where}: {key} is missing; it must be a text.")
    return value.strip()


def _texts(value: Any, where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not value or not all(isinstance(text, str) and text.strip() for text in value):
        raise UserError(f"{where} is not a list of texts.")
    return tuple(text.strip() for text in value)


def _checked(persona: Persona, where: str) -> Persona:
    """The persona, if it has all phrases in each of its languages. Raises UserError."""
    by_key = {
        "pleased": persona.pleased,
        "asks_again": persona.asks_again,
        "no_answer": persona.no_answer,
        "next_question": persona.next_question,
    }
    by_key |= {f"rules[{place}].displeased": rule.displeased for place, rule in enumerate(persona.rules)}
    if not persona.languages:
        raise UserError(f"{where}: languages is empty; name at least one.")
    for key, phrases in by_key.items():
        for language in persona.languages:
            if language not in phrases.by_language:
                raise UserError(f"{where}: {key} has no phrases in {language}; add {key}.{language} to the file.")
    return persona
