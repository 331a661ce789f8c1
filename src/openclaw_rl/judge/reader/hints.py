"""Makes a hint from a user's message: the user's own words, shortened, without greetings and thanks."""

import re

from openclaw_rl.judge.reader.lexicon import Lexicon, lexicon_for
from openclaw_rl.judge.reader.phrasebook import all_small_words
from openclaw_rl.judge.reader.text import normalise

MAX_CHARACTERS = 300
_SEPARATORS = " \t\n,.!?;:…-–—。、\uff0c\uff01\uff1f\uff1b\uff1a"
_SPACE = re.compile(r"\s+")
_SENTENCE_END = re.compile(r"[.!?。！？](?=\s|$)|[。！？]")
_LETTERS = re.compile(r"[^\W\d_]+")
_MOST_LEADS = 6
_MAX_CHARACTERS_PRAISE = 60


def make_hint(words: str) -> str:
    """Clean a user's message. The result is empty only if the message has no words."""
    text = _SPACE.sub(" ", words).strip()
    return cut(strip_leads(text[: 4 * MAX_CHARACTERS]))


def says_nothing(hint: str, lexicon: Lexicon) -> bool:
    """Whether a hint only asks for an answer, without saying what was wrong with the given one."""
    rest = lexicon.blank("bare", normalise(hint), by="")
    return rest != normalise(hint) and not set(_LETTERS.findall(rest)) - all_small_words()


def strip_leads(text: str) -> str:
    """Remove greetings, thanks and fillers from the beginning, as long as something is left."""
    lexicon = lexicon_for(normalise(text))
    text = strip_praise(text, lexicon)
    for _ in range(_MOST_LEADS):
        shorter = strip_lead(text, lexicon)
        if shorter == text or len(shorter) < 2:
            break
        text = shorter
    return text


def strip_praise(text: str, lexicon: Lexicon) -> str:
    """Remove praise or thanks before a "but"."""
    plain = aligned(text[:_MAX_CHARACTERS_PRAISE])
    contrast = lexicon.find("contrast", plain)
    if not contrast or not any(lexicon.find(signal, plain[: contrast.start()]) for signal in ("praise", "thanks")):
        return text
    return text[contrast.end() :].lstrip(_SEPARATORS) or text


def strip_lead(text: str, lexicon: Lexicon) -> str:
    """Remove one greeting, thanks or filler from the beginning."""
    words = text.lstrip(_SEPARATORS)
    plain = aligned(words[:60])
    match = lexicon.find("lead", plain)
    if not match or plain[: match.start()].strip(_SEPARATORS) or not match.group():
        return words
    return words[match.end() :].lstrip(_SEPARATORS)


def aligned(text: str) -> str:
    """Normalise without moving any position: if the length would change, each character becomes one character."""
    if len(plain := normalise(text)) == len(text):
        return plain
    return "".join(plain if len(plain := normalise(char)) == 1 else "~" for char in text)


def cut(text: str) -> str:
    """Cut a long text at the end of a sentence, or of a word."""
    if len(text) <= MAX_CHARACTERS:
        return text
    head = text[:MAX_CHARACTERS]
    ends = [match.end() for match in _SENTENCE_END.finditer(head)]
    if ends and ends[-1] > MAX_CHARACTERS // 3:
        return head[: ends[-1]]
    return head.rsplit(" ", 1)[0].rstrip(",;: ") + " …"
