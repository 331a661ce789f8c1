"""A wish: a simulated person with one wish, the note that a careful reader would make of it, and corrected answers.

A wish's file is that of a persona with four more keys: `note`, `scope`, `set` and `[[corrections]]`. `load` reads a
built-in one by its name, or a TOML file. Its UserError names the file and the key that is wrong.
"""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from openclaw_rl.errors import UserError
from openclaw_rl.evals.conversation import EvalQuestion, Split, questions
from openclaw_rl.evals.personas.persona import Persona, of_table
from openclaw_rl.sense import words_of

#: What a wish is for: `tuning` ones may be looked at while the product changes, `report` ones only for a report.
SETS = ("tuning", "report")
_NAME = re.compile(r"[\w-]+", re.ASCII)
_OWN_KEYS = ("note", "scope", "set", "corrections")


@dataclass(frozen=True, slots=True)
class EvalWish:
    """A wish and the person who has it."""

    persona: Persona
    note: str
    """The wish as one instruction that stands alone."""
    scope: frozenset[str]
    """Words of the requests that it is for; empty: all."""
    group: str
    """One of SETS."""
    corrections: Mapping[str, str]
    """Answers as wanted, by their question."""

    @property
    def name(self) -> str:
        return self.persona.name

    def concerns(self, question: EvalQuestion) -> bool:
        """Whether the wish is for the answer to a question."""
        return not self.scope or bool(self.scope & set(words_of(question.text)))

    def questions(self, split: Split, seed: int) -> list[EvalQuestion]:
        """The questions that the wish is for, in the order of the seed. Those with a correction come first."""
        concerned = [question for question in questions(split=split, seed=seed) if self.concerns(question)]
        return sorted(concerned, key=lambda question: question.text not in self.corrections)

    def other_questions(self, split: Split, seed: int) -> list[EvalQuestion]:
        """The questions that the wish is not for."""
        return [question for question in questions(split=split, seed=seed) if not self.concerns(question)]


def built_in() -> dict[str, EvalWish]:
    """The built-in wishes by name: those for tuning first."""
    names = sorted(
        path.name.removesuffix(".toml") for path in files(__package__).iterdir() if path.name.endswith(".toml")
    )
    wishes = [load(name) for name in names]
    return {wish.name: wish for wish in sorted(wishes, key=lambda wish: SETS.index(wish.group))}


def load(name: str) -> EvalWish:
    """A built-in wish, or one from a TOML file."""
    own = files(__package__) / f"{name}.toml"
    try:
        text = own.read_text("utf-8") if own.is_file() else Path(name).expanduser().read_text("utf-8")
        table = tomllib.loads(text)
    except FileNotFoundError as error:
        raise UserError(f"There is no wish {name}: give the name of a built-in one or the path of a file.") from error
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"The wish {name} cannot be read: {str(error).rstrip('.')}.") from error
    where = name if name.endswith(".toml") else f"{name}.toml"
    persona = of_table({key: value for key, value in table.items() if key not in _OWN_KEYS}, where)
    if not _NAME.fullmatch(persona.name):
        raise UserError(f"{where}: name must be of letters, digits and hyphens, because it names people on a server.")
    return EvalWish(
        persona,
        _note(table, where),
        frozenset(_words(table.get("scope", []), where)),
        _group(table, where),
        _corrections(table, where),
    )


def _note(table: dict[str, Any], where: str) -> str:
    note = table.get("note")
    if not isinstance(note, str) or not note.strip():
        raise UserError(f"{where}: note is missing; write the wish as one instruction.")
    return note.strip()


def _words(scope: Any, where: str) -> list[str]:
    if not isinstance(scope, list) or not all(isinstance(word, str) and words_of(word) == [word] for word in scope):
        raise UserError(f"{where}: scope must be a list of single words in lower case.")
    return scope


def _group(table: dict[str, Any], where: str) -> str:
    group = table.get("set", SETS[0])
    if group not in SETS:
        raise UserError(f"{where}: set must be one of {', '.join(SETS)}.")
    return str(group)


def _corrections(table: dict[str, Any], where: str) -> dict[str, str]:
    """The corrections. Each answers a question that the person asks."""
    given, asked = table.get("corrections"), {question.text for question in questions(split="train")}
    if not isinstance(given, list) or not given:
        raise UserError(f"{where}: corrections is missing; write at least one [[corrections]].")
    corrections = {}
    for place, one in enumerate(given):
        if not isinstance(one, dict) or one.keys() != {"question", "answer"}:
            raise UserError(f"{where}: corrections[{place}] must have a question and an answer.")
        if one["question"] not in asked:
            raise UserError(f"{where}: corrections[{place}].question is not one of those that people ask in training.")
        corrections[one["question"]] = str(one["answer"]).strip()
    return corrections
