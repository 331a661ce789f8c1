"""What wanted answers have in common that a model's usual answers lack, as far as their form and words show it.

Two examples show what a note means: both begin with "Well", both end with a question. Practice imitates only answers
that show the same, so the policy learns a wish better than the model keeps to it with the examples.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from openclaw_rl.sense import SMALL_WORDS

Shows = Callable[[str], bool]

#: A form counts if at most this share of the usual answers has it, and a word if at most that one.
MAX_USUAL_FORMS, MAX_USUAL_WORDS = 0.15, 0.05
#: A word counts if the examples make it likelier by this share of the answers, and by at least half as much as the word
#: that they raise most. Otherwise both have it by chance.
MIN_RAISED, MIN_OF_BEST = 0.1, 0.5
#: The same for a word of a single example.
MIN_RAISED_ALONE = 0.2
MIN_LETTERS = 3
#: Words in a row that two answers share only if they are meant to.
PHRASE_WORDS = 3

_EMOJI = re.compile("[\u2600-\u27bf\U0001f300-\U0001faff]")
_BOLD = re.compile(r"\*\*[^*\n]+\*\*")
_ITEM = re.compile(r"\s*(?:[-*+•]|\d+[.)])\s")
_WORD = re.compile(r"[^\W_]+(?:[;'’.-][^\W_]+)*")
_LABEL = re.compile(r"\s*([^\W\d_][\w;'’ -]{0,24}:)")


def words(text: str) -> list[str]:
    return [word.casefold() for word in _WORD.findall(text)]


def lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip()]


def labels(text: str) -> set[str]:
    """How lines of a text begin that begin with a label: "tl;dr:"."""
    return {match[1].casefold() for line in lines(text) if (match := _LABEL.match(line))}


FORMS: Mapping[str, Shows] = {
    "an emoji": lambda text: _EMOJI.search(text) is not None,
    "a list": lambda text: any(map(_ITEM.match, lines(text))),
    "nothing but a list": lambda text: len(lines(text)) > 1 and all(map(_ITEM.match, lines(text))),
    "bold words": lambda text: _BOLD.search(text) is not None,
    "a bold beginning": lambda text: _BOLD.match(text.lstrip()) is not None,
    "a question at the end": lambda text: text.rstrip().endswith(("?", "？")),
    "an exclamation mark": lambda text: "!" in text,
    "code": lambda text: "```" in text,
    "no capital letters": lambda text: text.islower(),
    "only capital letters": lambda text: text.isupper(),
}


@dataclass(frozen=True, slots=True)
class AnswerTraits:
    """What an answer must show to be like the examples."""

    forms: Mapping[str, Shows] = field(default_factory=dict)
    """All of them, by their names."""
    words: frozenset[str] = frozenset()
    """At least one of them; empty: any."""

    def __bool__(self) -> bool:
        return bool(self.forms or self.words)

    def shown_by(self, text: str, *, with_words: bool = True) -> bool:
        """Whether an answer shows the forms, and the words unless they do not matter."""
        has_words = not (with_words and self.words) or bool(self.words & set(words(text)))
        return has_words and all(shows(text) for shows in self.forms.values())


def find_traits(wanted: Sequence[str], usual: Sequence[str]) -> AnswerTraits:
    """What all wanted answers show and few usual ones do; nothing if there are fewer than two wanted ones."""
    if len(wanted) < 2 or not usual:
        return AnswerTraits()
    forms = {
        name: shows
        for name, shows in (*FORMS.items(), *_edges(wanted).items())
        if all(map(shows, wanted)) and _share(shows, usual) <= MAX_USUAL_FORMS
    }
    shared = set.intersection(*(set(words(text)) for text in wanted)) - SMALL_WORDS
    rare = {word for word in shared if len(word) >= MIN_LETTERS and _share(_has(word), usual) <= MAX_USUAL_WORDS}
    return AnswerTraits(forms, frozenset(rare))


def confirmed(traits: AnswerTraits, wanted: Sequence[str], taught: Sequence[str], usual: Sequence[str]) -> AnswerTraits:
    """The traits without words that answers under the examples (`taught`) have no more often than usual ones.

    If nothing is left, the examples may show a way of speaking: each has other words of it, which `taught` answers to
    other questions have too.
    """
    found = AnswerTraits(traits.forms, _raised(traits.words, taught, usual, MIN_RAISED))
    if found or len(wanted) < 2:
        return found
    said = {word for text in wanted for word in words(text)} - SMALL_WORDS
    rare = {word for word in said if _share(_has(word), usual) <= MAX_USUAL_WORDS}
    return AnswerTraits(words=_raised(rare, taught, usual, MIN_RAISED_ALONE))


def _raised(some: Iterable[str], taught: Sequence[str], usual: Sequence[str], least: float) -> frozenset[str]:
    """The words that more of the taught answers have than of the usual ones."""
    gains = {word: _share(_has(word), taught) - _share(_has(word), usual) for word in some}
    least = max(least, MIN_OF_BEST * max(gains.values(), default=0.0))
    return frozenset(word for word, gain in gains.items() if gain >= least)


def _edges(wanted: Sequence[str]) -> dict[str, Shows]:
    """How all wanted answers begin and end: the first and the last word, labels of lines, and phrases anywhere."""
    found: dict[str, Shows] = {}
    said = [words(text) or [""] for text in wanted]
    first, last = {text[0] for text in said}, {text[-1] for text in said}
    if len(first) == 1 and (opening := first.pop()):
        found[f"the first word {opening}"] = lambda text: words(text)[:1] == [opening]
    if len(last) == 1 and (closing := last.pop()):
        found[f"the last word {closing}"] = lambda text: words(text)[-1:] == [closing]
    for label in set.intersection(*map(labels, wanted)):
        found[f"a line that begins with {label}"] = _labelled(label)
    for phrase in set.intersection(*map(phrases, wanted)):
        found[f"the words {' '.join(phrase)}"] = _phrased(phrase)
    return found


def phrases(text: str) -> set[tuple[str, ...]]:
    """Words that follow each other, without numbers."""
    said = words(text)
    found = {tuple(said[start : start + PHRASE_WORDS]) for start in range(len(said) - PHRASE_WORDS + 1)}
    return {phrase for phrase in found if not any(map(str.isdecimal, phrase))}


def _phrased(phrase: tuple[str, ...]) -> Shows:
    return lambda text: phrase in phrases(text)


def _has(word: str) -> Shows:
    return lambda text: word in words(text)


def _labelled(label: str) -> Shows:
    return lambda text: label in labels(text)


def _share(shows: Shows, texts: Sequence[str]) -> float:
    return sum(map(shows, texts)) / len(texts) if texts else 0.0
