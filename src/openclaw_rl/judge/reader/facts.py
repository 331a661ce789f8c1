"""Finds facts in a message that contradict the response: another number or name, or a part of the request once more."""

import re

from openclaw_rl.judge.reader.lexicon import lexicon_for
from openclaw_rl.judge.reader.numbers import numbers
from openclaw_rl.judge.reader.opposites import TurnTexts, is_question
from openclaw_rl.judge.reader.relevance import names
from openclaw_rl.judge.reader.text import normalise, shorten

#: Names in a message that only repeats what the response ignored.
_MOST_REMINDED = 3
#: A longer message says more than one fact.
_LONGEST_REMINDER = 80
_LONGEST_FACT = 60
#: Words in a message with a better fact that neither the request nor the response has.
_MOST_UNKNOWN = 1
_CAPITALS = re.compile(r"\b[^\W\d_]{3,}\b")
_CAPITALISED = re.compile(r"\b[A-ZÀ-Þ][a-zß-ÿ]{2,}\b")


def reminds(words: str, plain: str, turn: TurnTexts) -> bool:
    """Whether a message only gives a fact that the response should have had. `plain` is it without quotations."""
    if len(words) > _LONGEST_REMINDER:
        return False
    return (
        names_what_is_missing(plain, turn)
        or renumbers(words, turn)
        or restores_number(words, turn)
        or emphasises(words, turn)
        or answers_otherwise(words, turn)
    )


def names_what_is_missing(plain: str, turn: TurnTexts) -> bool:
    """Whether a message only names things that the request named and the response did not."""
    named = names(plain)
    return 0 < len(named) <= _MOST_REMINDED and named <= names(turn.request) and not named & names(turn.response)


def renumbers(words: str, turn: TurnTexts) -> bool:
    """Whether a message names a number of the response and a new one."""
    named, theirs, asked = numbers(words), numbers(shorten(turn.response)), numbers(shorten(turn.request))
    return bool(named & theirs - asked) and bool(named - theirs - asked)


def restores_number(words: str, turn: TurnTexts) -> bool:
    """Whether a message names a number of the request where the response has another: "six", not "a table for four"."""
    named, theirs, asked = numbers(words), numbers(shorten(turn.response)), numbers(shorten(turn.request))
    unknown = names(words) - names(turn.request) - names(turn.response)
    return bool(named & asked - theirs) and bool(theirs - asked) and len(unknown) <= _MOST_UNKNOWN


def emphasises(words: str, turn: TurnTexts) -> bool:
    """Whether a message repeats a part of the request with emphasis: in capitals, or with an exclamation mark."""
    asked = names(turn.request)
    shouted = {word for word in _CAPITALS.findall(words) if word.isupper() and word not in turn.request}
    if {normalise(word) for word in shouted} & asked:
        return True
    named = names(words)
    return words.rstrip().endswith(("!", "！")) and bool(named) and named <= asked


def answers_otherwise(words: str, turn: TurnTexts) -> bool:
    """Whether a message answers the request's question with another number or name than the response."""
    if not is_question(turn.request) or len(words) > _LONGEST_FACT:
        return False
    known = names(turn.request) | names(turn.response)
    unknown = {name for name in names(words) - known if not name.isdigit()}
    given, theirs = numbers(words), numbers(shorten(turn.response))
    if given - numbers(shorten(turn.request)) and theirs:
        return not given & theirs and len(unknown) <= _MOST_UNKNOWN and asks_for("number_asked", turn.request)
    return asks_for("name_asked", turn.request) and gives_name(words, unknown, bool(names(words) & known))


def asks_for(signal: str, request: str) -> bool:
    """Whether a question asks for a number ("number_asked"), or for a person or place ("name_asked")."""
    plain = normalise(shorten(request))
    return lexicon_for(plain).find(signal, plain) is not None


def gives_name(words: str, unknown: set[str], shares: bool) -> bool:
    """Whether a message states one name with no words but those of the turn: "It was Goethe", "Goethe wrote it"."""
    plain = normalise(words)
    lexicon = lexicon_for(plain)
    named = {normalise(name) for name in _CAPITALISED.findall(words)}
    if unknown and unknown <= named:
        return shares or lexicon.find("statement", plain) is not None
    # Some users write everything in lower case.
    return words.islower() and len(unknown) == 1 and lexicon.find("names_it", plain) is not None


def disputes(words: str, response: str) -> bool:
    """Whether the message names numbers where the response named others."""
    named = numbers(words)
    return bool(named) and bool(theirs := numbers(shorten(response))) and not named & theirs
