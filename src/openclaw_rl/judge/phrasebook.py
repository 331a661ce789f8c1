"""Reads the phrase files, `phrases/*.toml`, once, and compiles them.

A phrase is a regular expression over normalised text (see `text.normalise`; phrases are normalised too), one sentence
at a time. A space matches a space, `^` and `$` are the ends of a clause (commas, colons and "but" end one), `{name}` is
a word group of the file's `[words]`. In scripts with spaces a phrase matches whole words only. To add a language, add a
file. What the signals mean is said in `signals.py`.
"""

import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from openclaw_rl.judge.text import normalise

#: Written between clauses in place of "but".
CONTRAST = "§"
_CLAUSE_END = rf"(?=\W{{0,8}}$|\s?[,:.!?;{CONTRAST}])"
_GROUP = re.compile(r"\{([a-z]\w*)\}")
_SCRIPTS = {
    "latin": re.compile("[a-z]"),
    "han": re.compile("[\u3040-\u30ff\u3400-\u9fff]"),
    "hangul": re.compile("[\uac00-\ud7af]"),
    "cyrillic": re.compile("[\u0400-\u04ff]"),
    "emoji": re.compile("[\u2190-\u2bff\U0001f300-\U0001faff]"),
}
_SPACED = frozenset({"latin", "cyrillic"})


@dataclass(frozen=True, slots=True)
class Phrases:
    """The phrases of one signal in one language."""

    anywhere: re.Pattern[str] | None
    at_start: re.Pattern[str] | None
    """Those that begin a clause. Kept apart, since most places in a text begin none."""


@dataclass(frozen=True, slots=True)
class Language:
    """One phrase file."""

    script: re.Pattern[str]
    spaced: bool
    """Whether words have spaces between them."""
    signals: dict[str, Phrases]
    small_words: frozenset[str]
    """Words that change nothing about what a request asks for; by them a language is recognised, too."""


@cache
def all_languages() -> tuple[Language, ...]:
    """Every phrase file, in the order of their names."""
    folder = files("openclaw_rl.judge") / "phrases"
    names = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".toml"))
    tables = (tomllib.loads((folder / name).read_text("utf-8")) for name in names)
    return tuple(read_language(table) for table in tables if "signals" in table)


@cache
def all_small_words() -> frozenset[str]:
    """The small words of all languages together."""
    return frozenset().union(*(language.small_words for language in all_languages()))


def read_language(table: dict[str, Any]) -> Language:
    """Compile one file."""
    words, spaced = table.get("words", {}), table["script"] in _SPACED
    signals = {
        signal: compile_phrases(
            # What leads can only begin.
            [part if signal != "lead" else f"^{part}" for phrase in listed for part in alternatives(expand(phrase, words))],
            spaced,
        )
        for signal, listed in table["signals"].items()
    }
    small_words = frozenset(normalise(" ".join(table.get("small_words", []))).split())
    return Language(_SCRIPTS[table["script"]], spaced, signals, small_words)


def expand(phrase: str, words: dict[str, str]) -> str:
    """A phrase with its word groups filled in (groups may hold groups), normalised as the text will be."""
    for _depth in range(3):
        phrase = _GROUP.sub(lambda match: f"(?:{words[match[1]]})", phrase)
    # Escapes such as `\W` would not survive the change of case.
    return "".join(part if part.startswith("\\") else normalise(part) for part in re.split(r"(\\.)", phrase))


def alternatives(phrase: str) -> Iterator[str]:
    """The alternatives of a phrase that are not inside of brackets."""
    depth, start = 0, 0
    for place, char in enumerate(phrase):
        depth += (char in "([") - (char in ")]")
        if char == "|" and depth == 0:
            yield phrase[start:place]
            start = place + 1
    yield phrase[start:]


def compile_phrases(phrases: Sequence[str], spaced: bool) -> Phrases:
    """Compile the phrases of one signal."""
    ended = [re.sub(r"(?<!\\)\$", lambda _: _CLAUSE_END, phrase) for phrase in phrases]
    anywhere = [phrase for phrase in ended if not phrase.startswith("^")]
    at_start = [phrase.removeprefix("^") for phrase in ended if phrase.startswith("^")]
    return Phrases(join(anywhere, spaced), join(at_start, spaced))


def join(phrases: Sequence[str], spaced: bool) -> re.Pattern[str] | None:
    """One pattern for many phrases; of whole words, where words are known."""
    if not phrases:
        return None
    joined = "|".join(phrases)
    return re.compile(rf"(?:\b|(?!\w))(?:{joined})(?:\b|(?<!\w))" if spaced else joined)
