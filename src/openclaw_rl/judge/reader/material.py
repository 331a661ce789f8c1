"""Separates the user's own words from material that a message brings along: texts to translate, mails, reviews, logs.

In "Thanks! Summarise this for me: The update is awful." only "Thanks!" is about the response.
"""

import re

from openclaw_rl.judge.reader.hints import aligned
from openclaw_rl.judge.reader.lexicon import lexicon_for
from openclaw_rl.judge.reader.signals import read_sentence
from openclaw_rl.judge.reader.text import read_plainly, sentences

#: The beginning of error output.
ERROR_OUTPUT = re.compile(
    r"^(?:traceback \(most recent call last\):|(?:fatal |uncaught |unhandled |run-?time |php |[\w.]{1,40}: )?"
    r"[\w.]{0,80}(?:error|exception)(?:\[\w+\]| '?\d+'?(?: \(\w+\))?)?: ?(?=\S|$)|panic: |fatal: "
    r"|(?:[\w./-]+: ){0,3}command not found\b)",
    re.I | re.M,
)
_COLON = re.compile(r"[:：]")
_SENTENCE_END = re.compile(r"[.!?。！？\n]")
_QUOTE = re.compile(r"[\s*_>-]{0,6}[\"'“„«‘「『]")
#: Material has at least this many words, or characters of a script without spaces.
_LEAST_WORDS = 3
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|\w+")
#: Signals of a sentence that speaks about the response, so a list after it is the user's own.
_ABOUT_RESPONSE = ("rejection", "correction", "reminder", "praise", "contrast", "moving_on", "question")


def before_material(words: str, reports: bool) -> str | None:
    """The user's words before the material that a message brings; None if it brings none.

    `reports`: the message shows error output. That is material only if the message asks for work on it.
    """
    plain = aligned(words)
    if "\n" in words and lexicon_for(plain).find("letter", plain):
        return ""
    for start, end in sentences(words):
        sentence = plain[start:end]
        match = lexicon_for(sentence).find("material", sentence)
        dictation = lexicon_for(sentence).find("dictation", sentence)
        if dictation and _WORD.search(words[start + dictation.end() : end]):
            return words[: start + dictation.start()]
        if match and follows(words[start + match.end() :], words[end:]):
            return words[: start + match.start()]
        if not reports and introduces(words[start:end], words[end:]):
            return words[: last_end(words[:start])]
    return None


def last_end(words: str) -> int:
    """Where the last complete sentence ends."""
    ends = [match.end() for match in _SENTENCE_END.finditer(words)]
    return ends[-1] if ends else 0


def follows(rest: str, after: str) -> bool:
    """Whether material follows a request for work on it: after a colon or a quotation mark, or on other lines."""
    colon = _COLON.search(rest.partition("\n")[0])
    if colon:
        return is_text(rest[colon.end() :])
    return after.startswith(("\n", "?\n", "!\n", ".\n")) and is_text(after)


def introduces(sentence: str, after: str) -> bool:
    """Whether a sentence that says nothing about the response ends with a colon, with a quotation or lines after it."""
    before, colon, rest = sentence.rpartition(":") if ":" in sentence else sentence.rpartition("：")
    if not colon or not is_text(rest + after):
        return False
    quoted = _QUOTE.match(rest)
    if not quoted and (rest.strip() or not after.startswith("\n")):
        return False
    plain = " ".join(read_plainly(before).split())
    signals = read_sentence(plain, lexicon_for(plain))
    return not signals.has(*_ABOUT_RESPONSE) and (bool(quoted) or not signals.has("change", "wish"))


def is_text(rest: str) -> bool:
    """Whether there are enough words for a text."""
    return len(_WORD.findall(rest)) >= _LEAST_WORDS
