"""A simulated person: a name, preferences as rules, and phrases for being pleased or displeased.

`load` reads a built-in persona by its name, or a TOML file. Its UserError names the file and the key that is wrong.
"""

import random
import tomllib
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PositiveInt,
    PrivateAttr,
    RootModel,
    StrictBool,
    StringConstraints,
    ValidationError,
    model_validator,
)

from openclaw_rl.config.options import describe_problem
from openclaw_rl.errors import UserError
from openclaw_rl.evals.personas.rules import Check, Count, count_words, estimate_tokens, make_check

BUILT_IN = ("student", "teaching-assistant", "teacher", "brief")
#: The file with phrases for every persona. A persona's own file may replace them.
_EVERYBODY = "everybody"
_QUESTION = "{question}"
#: The usual limit in tokens: enough for a detailed answer.
MAX_ANSWER_TOKENS = 160

Text = Annotated[str, StringConstraints(strict=True, strip_whitespace=True, min_length=1)]
Texts = Annotated[tuple[Text, ...], Field(min_length=1)]


class PersonaPhrases(RootModel[dict[str, Texts]]):
    """Several phrasings of one message, by language."""

    @property
    def by_language(self) -> dict[str, tuple[str, ...]]:
        return self.root

    def choose(self, languages: Sequence[str], dice: random.Random) -> str:
        """A random phrase in a random one of the languages."""
        return dice.choice(self.root[dice.choice(list(languages))])


def _asking(phrases: PersonaPhrases) -> PersonaPhrases:
    for phrase in (phrase for listed in phrases.root.values() for phrase in listed):
        if phrase.count(_QUESTION) != 1:
            raise ValueError(f'"{phrase}" must contain {_QUESTION} once')
    return phrases


#: Phrases that each contain the question once.
AskingPhrases = Annotated[PersonaPhrases, AfterValidator(_asking)]


class Rule(BaseModel):
    """One preference of a persona, and what the persona says when an answer violates it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Text
    displeased: PersonaPhrases
    check: Text
    """The name of a function in `rules`."""
    parameters: dict[str, Any] = {}
    _keeps: Check = PrivateAttr()

    @model_validator(mode="after")
    def _is_known(self) -> Self:
        try:
            self._keeps = make_check(self.check, self.parameters)
        except ValueError as error:
            raise ValueError(f'check = "{self.check}" {error}') from None
        return self

    def is_kept(self, answer: str, count: Count) -> bool:
        return self._keeps(answer, count)


class Persona(BaseModel):
    """A simulated person."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Text
    description: Text
    """Who it is and what it likes, in the second person: the prompt for a model that plays it."""
    rules: Annotated[tuple[Rule, ...], Field(min_length=1)]
    pleased: PersonaPhrases
    asks_again: AskingPhrases
    """Repeats the wish and `{question}` in one message."""
    no_answer: PersonaPhrases
    """The reaction to an answer that the quality guard rejects: empty, repetitive or off topic."""
    next_question: AskingPhrases
    """Introduces the next `{question}` after a reaction in the same message."""
    repeats_question: StrictBool = False
    """Whether the same question is repeated after an answer that failed."""
    languages: Texts = ("en",)
    longest_answer: PositiveInt = MAX_ANSWER_TOKENS
    """In tokens. Longer answers are cut off, to save time."""
    translated: StrictBool = False
    """Whether answers should be in another language than the questions."""

    @model_validator(mode="after")
    def _speaks_its_languages(self) -> Self:
        phrases = {name: getattr(self, name) for name in ("pleased", "asks_again", "no_answer", "next_question")}
        phrases |= {f"rules[{place}].displeased": rule.displeased for place, rule in enumerate(self.rules)}
        for key, said in phrases.items():
            for language in self.languages:
                if language not in said.root:
                    raise ValueError(f"{key} has no phrases in {language}; add {key}.{language} to the file")
        return self

    def failed(self, answer: str, count: Count = estimate_tokens) -> tuple[Rule, ...]:
        """The rules that an answer breaks. An answer without words breaks all of them."""
        if not count_words(answer):
            return self.rules
        return tuple(rule for rule in self.rules if not rule.is_kept(answer, count))


def load(name: str, languages: Sequence[str] = ()) -> Persona:
    """A built-in persona, or one from a TOML file. `languages` replaces the persona's own."""
    table = _built_in(name) if name in BUILT_IN else _read(Path(name))
    chosen = {"languages": list(languages)} if languages else {}
    return of_table(table | chosen, f"{name}.toml" if name in BUILT_IN else name)


def of_table(table: dict[str, Any], where: str) -> Persona:
    """A persona from the content of a file, which messages call `where`. Raises UserError."""
    try:
        return Persona.model_validate(_built_in(_EVERYBODY) | table)
    except ValidationError as error:
        raise wrong_file(where, error) from None


def wrong_file(where: str, error: ValidationError) -> UserError:
    """What is wrong with a file, in a sentence that names the key."""
    problem = error.errors()[0]
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in problem["loc"]).lstrip(".")
    said = {"missing": f"{place} is missing", "extra_forbidden": f"{place} is not a key that can be used"}
    told = said.get(problem["type"], f"{place}: {describe_problem(problem)}" if place else describe_problem(problem))
    return UserError(f"{where}: {told}.")


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
