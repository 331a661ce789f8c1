"""Reads the phrase files, `phrases/*.toml`, once, and compiles them.

A phrase is a regular expression over normalised text (see `text.normalise`; phrases are normalised too), one sentence
at a time. A space matches a space, `^` and `$` are the ends of a clause (commas, colons and "but" end one), `{name}` is
a word group of the file's `[words]`. In scripts with spaces a phrase matches whole words only. To add a language, add a
file. `signals.py` explains the signals.
"""

import re
import tomllib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from openclaw_rl.judge.reader.alternatives import PhraseIndex, split
from openclaw_rl.judge.reader.text import normalise

#: Written between clauses in place of "but".
CONTRAST = "§"
_CLAUSE_START = rf"(?:^|(?<=[,:{CONTRAST}]\s))"
_CLAUSE_END = rf"(?=\W{{0,8}}$|\s?[,:.!?;{CONTRAST}])"
_GROUP = re.compile(r"\{([a-z]\w*)\}")
SCRIPTS = {
    "latin": re.compile("[a-z]"),
    "han": re.compile("[\u3040-\u30ff\u3400-\u9fff]"),
    "hangul": re.compile("[\uac00-\ud7af]"),
    "cyrillic": re.compile("[\u0400-\u04ff]"),
    "emoji": re.compile("[\u2190-\u2bff\U0001f300-\U0001faff]"),
}
SPACED = frozenset({"latin", "cyrillic"})


class SignalPhrases(NamedTuple):
    """The phrases of one signal in one language, by their position."""

    at_start: PhraseIndex
    """At the beginning of a clause."""
    anywhere: PhraseIndex


@dataclass(frozen=True, slots=True)
class Language:
    """The compiled phrases of one phrase file, or of all files with the same script."""

    script: re.Pattern[str]
    spaced: bool
    """Whether words have spaces between them."""
    signals: dict[str, SignalPhrases]
    small_words: frozenset[str]
    """Words that do not change what a request asks for. A language is also recognised by them."""


@cache
def all_languages() -> tuple[Language, ...]:
    """Every phrase file as a language."""
    return tuple(map(read_language, tables()))


@cache
def all_scripts() -> tuple[Language, ...]:
    """The phrase files of each script as one language, for texts too short to tell the language."""
    return tuple(
        merge([one for one in all_languages() if one.script is script])
        for script in dict.fromkeys(one.script for one in all_languages())
    )


def merge(languages: Sequence[Language]) -> Language:
    """Languages of one script as one."""
    listed: dict[str, list[SignalPhrases]] = defaultdict(list)
    for language in languages:
        for signal, phrases in language.signals.items():
            listed[signal].append(phrases)
    signals = {
        signal: SignalPhrases(
            PhraseIndex.merge([phrases.at_start for phrases in parts]),
            PhraseIndex.merge([phrases.anywhere for phrases in parts]),
        )
        for signal, parts in listed.items()
    }
    small_words = frozenset().union(*(language.small_words for language in languages))
    return Language(languages[0].script, languages[0].spaced, signals, small_words)


@cache
def all_small_words() -> frozenset[str]:
    """The small words of all languages together."""
    return frozenset().union(*(language.small_words for language in all_languages()))


@cache
def tables() -> tuple[dict[str, Any], ...]:
    """The contents of the phrase files, in the order of their names."""
    folder = files("openclaw_rl.judge.reader") / "phrases"
    names = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".toml"))
    read = (tomllib.loads((folder / name).read_text("utf-8")) for name in names)
    return tuple(table for table in read if "signals" in table)


def read_language(table: Mapping[str, Any]) -> Language:
    """Compile one phrase file."""
    spaced, words = table["script"] in SPACED, table.get("words", {})
    signals = {}
    for signal, listed in table["signals"].items():
        phrases = [part for phrase in listed for part in split(expand(phrase, words))]
        # A lead only matches at the start of a clause.
        at_start = [f"^{phrase}" for phrase in phrases] if signal == "lead" else phrases
        signals[signal] = compile_phrases(at_start, spaced)
    small_words = frozenset(normalise(" ".join(table.get("small_words", []))).split())
    return Language(SCRIPTS[table["script"]], spaced, signals, small_words)


def expand(phrase: str, words: dict[str, str]) -> str:
    """A phrase with its word groups filled in (groups may hold groups), normalised as the text will be."""
    for _depth in range(3):
        phrase = _GROUP.sub(lambda match: f"(?:{words[match[1]]})", phrase)
    # Escapes such as `\W` must not be lower-cased.
    return "".join(part if part.startswith("\\") else normalise(part) for part in re.split(r"(\\.)", phrase))


def compile_phrases(phrases: Sequence[str], spaced: bool) -> SignalPhrases:
    """Compile the phrases of one signal."""
    ended = [re.sub(r"(?<!\\)\$", lambda _: _CLAUSE_END, phrase) for phrase in phrases]
    at_start = [inner_starts(phrase[1:]) for phrase in ended if phrase.startswith("^")]
    anywhere = [inner_starts(phrase) for phrase in ended if not phrase.startswith("^")]
    return SignalPhrases(PhraseIndex.of(at_start, spaced, few_places=True), PhraseIndex.of(anywhere, spaced))


def inner_starts(phrase: str) -> str:
    """A phrase in which `^` matches the start of a clause, also inside an alternative."""
    return re.sub(r"(?<![\\\[])\^", lambda _: _CLAUSE_START, phrase)
