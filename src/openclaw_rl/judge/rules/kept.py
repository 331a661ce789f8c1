"""Whether an answer keeps to a note, as far as words show it: its length, language, form, names and given words.

Most notes cannot be checked so ("Talk like a pirate."). A note about a name is kept by an answer that has the name; an
answer without it shows nothing, because not every answer addresses the user.
"""

import re
from collections.abc import Iterator
from functools import cache

from openclaw_rl.judge.rules.phrases import SCRIPTS, WORD, normalise, sentence_spans, tables, word_list

_NUMBERS = {
    word: number
    for number, words in enumerate(
        (
            "one a an single ein eine einem einen einer un une una uno 一",
            "two zwei deux dos 两 二 一两",
            "three drei trois tres 三",
            "four vier quatre cuatro 四",
            "five funf cinq cinco 五",
        ),
        start=1,
    )
    for word in words.split()
} | {"ten": 10, "twenty": 20, "thirty": 30, "fifty": 50, "hundred": 100}
_NUMBER = rf"(?:\d{{1,6}}|{'|'.join(sorted(_NUMBERS, key=len, reverse=True))})"
_WORDS = "words?|wort(?:e|en)?|worter|wortern|mots?|palabras?"
_SENTENCES = "sentences?|satz|satze|satzen|phrases?|frases?"
_AMOUNT = re.compile(
    rf"\b(?P<least>(?:at least|mindestens|au moins|al menos) )?(?P<low>{_NUMBER})(?: (?:or|to|oder|bis|ou|o|a) "
    rf"(?P<high>{_NUMBER}))? (?:[\w-]+ ){{0,2}}?(?:(?P<words>{_WORDS})|(?P<sentences>{_SENTENCES}))\b"
)
_HAN_AMOUNT = re.compile(rf"(?P<least>至少)?(?P<low>{_NUMBER})(?P<high>)个?(?:(?P<sentences>句)|(?P<words>字))")
#: People and models count roughly: an answer "in 50 words" may have a few more.
_ROUGHLY = 1.2
_AT_MOST = re.compile(r"\b(?:at most|no more than|hochstens|maxim\w*|au plus)\b|最多|不超过")
_DENIES = re.compile(r"\b(?:no|not|never|don't|without|ohne|keine?|nicht|sans|pas|sin)\b|不|别")
#: Where a note begins to say something else.
_NEW_WISH = re.compile(r"[.;:!?。；] *|, *(?=(?:use|write|give|add|put|prefer|please|but|just)\b)")
_LIST = re.compile(r"^\s*(?:[-*+•]|\d+[.)])\s", re.MULTILINE)
_BOLD = re.compile(r"\*\*|__")
_MARKDOWN = re.compile(rf"{_LIST.pattern}|{_BOLD.pattern}|^#{{1,6}} |```|^\|", re.MULTILINE)
_EMOJI = re.compile("[\u2600-\u27bf\U0001f300-\U0001faff]")
_CONTRACTION = re.compile(
    r"\w(?:n['’]t|['’](?:re|ve|ll|m|d))\b|\b(?:it|he|she|that|there|what|who|here|let)['’]s\b", re.I
)
_DIGIT = re.compile(r"\d")
#: What a note forbids, and how an answer shows it.
_FORBIDDEN = (
    (r"\b(?:lists?|bullets?|bullet points|listen|listas?|listes?)\b|列表", _LIST),
    (r"\b(?:bold|asterisks|fettdruck|gras|negritas?)\b|加粗", _BOLD),
    (r"\b(?:markdown|formatting)\b", _MARKDOWN),
    (r"\b(?:emojis?|smileys?|emoticons?)\b|表情", _EMOJI),
    (r"\bcontractions?\b", _CONTRACTION),
    (r"\bdigits?\b", _DIGIT),
)
_NUMBERS_AS_WORDS = re.compile(
    r"\b(?:numbers?|digits?|figures?)\b[^,;:]{0,20}\b(?<!not )(?:as|be|in|into|with) words\b"
)
_PLAIN = re.compile(r"\b(?:plain text|one paragraph|einfachen text|texte simple|texto normal)\b|普通文字")
_NAME = re.compile(
    r"(?:call|address) the user (?:as )?(.+)|nenne? den nutzer (?:nicht )?(.+)"
    r"|appelle(?:z)?(?: pas)? l'utilisateur (.+)|llam(?:a|es) al usuario (.+)|叫用户(.+)",
    re.IGNORECASE,
)
_FORBIDDEN_WORDS = re.compile(r"(?:do not|don't|never|stop) say(?:ing)? (.+)", re.IGNORECASE)
_FORBIDDEN_QUOTES = re.compile(
    r"\b(?:not|never|without|avoid|stop)\b[^\".:]{0,30}\bwords? ((?:(?:,|and|or| )*\"[^\"]+\")+)", re.IGNORECASE
)
_QUOTED = re.compile(r'"([^"]+)"')
_EDGE = re.compile(r"\b(?i:(start|begin|open|end|finish|close))\b[^\"]{0,40}? with (?:\"([^\"]+)\"|([A-Z]\w+)\b)")
_MARKS = " .,!?\"'“”。！？*_"
#: A language needs this many small words to be recognised, and its letters this share of all letters.
_FEWEST_SMALL_WORDS = 2
_LEAST_SHARE = 0.3
_LETTER = re.compile(r"[^\W\d_]")
_KANA = re.compile("[\u3040-\u30ff]")


def keeps(note: str, answer: str) -> bool | None:
    """Whether an answer keeps to a note; None if nothing shows it."""
    checks = _checks(note, normalise(note), answer) if answer.strip() else ()
    shown = [result for result in checks if result is not None]
    return all(shown) if shown else None


def _checks(note: str, normalised: str, answer: str) -> Iterator[bool | None]:
    yield from (_fits(amount, normalised, answer) for amount in _AMOUNT.finditer(normalised))
    yield from (_fits(amount, normalised, answer) for amount in _HAN_AMOUNT.finditer(note))
    if _PLAIN.search(normalised):
        yield not _MARKDOWN.search(answer)
    denies = _DENIES.search(normalised) is not None
    for matter, shown in _FORBIDDEN:
        if any(_is_denied(normalised, found.start()) for found in re.finditer(matter, normalised)):
            yield not shown.search(answer)
    if _NUMBERS_AS_WORDS.search(normalised):
        yield not _DIGIT.search(answer)
    yield _in_language(normalised, answer, denies)
    yield from _says(note, answer, denies)


def _is_denied(note: str, place: int) -> bool:
    """Whether a note denies what it names at a place: "do not use lists", not "use lists, not paragraphs"."""
    before = _NEW_WISH.split(note[:place])[-1]
    return _DENIES.search(before) is not None


def _fits(amount: re.Match[str], note: str, answer: str) -> bool:
    """Whether an answer has as many words or sentences as a note says."""
    by_sentences = amount["sentences"] is not None
    count = len(sentence_spans(answer)) if by_sentences else len(WORD.findall(answer))
    wanted = _value(amount["high"] or amount["low"])
    if amount["least"]:
        return count >= wanted
    return count <= (wanted if by_sentences or _AT_MOST.search(note) else wanted * _ROUGHLY)


def _value(number: str) -> int:
    return int(number) if number.isdecimal() else _NUMBERS[number]


def _says(note: str, answer: str, denies: bool) -> Iterator[bool | None]:
    """Whether an answer has the names and words that a note wants or forbids."""
    if match := _NAME.search(note):
        has = _has(answer, next(filter(None, match.groups())))
        yield not has if denies else has or None
    if match := _FORBIDDEN_WORDS.search(note):
        yield not _has(answer, match[1])
    if match := _FORBIDDEN_QUOTES.search(note):
        yield not any(_has(answer, word) for word in _QUOTED.findall(match[1]))
    if (match := _EDGE.search(note)) and not denies:
        words, said = normalise(match[2] or match[3]).strip(_MARKS), normalise(answer).strip(_MARKS)
        first = match[1].lower() in ("start", "begin", "open")
        yield said.startswith(words) if first else said.endswith(words)


def _has(answer: str, words: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(normalise(words).strip(_MARKS))}(?!\w)", normalise(answer)) is not None


def _in_language(note: str, answer: str, denies: bool) -> bool | None:
    """Whether an answer is in the language that a note names, or not in the one that it forbids."""
    names = _names()
    named = {code for word, code in names.items() if re.search(rf"(?:\b(?:in|auf|en|use|only) |用){word}", note)}
    spoken = _language_of(answer)
    if len(named) != 1 or spoken is None:
        return None
    return (spoken in named) is not denies


def _language_of(answer: str) -> str | None:
    """The first name of the language of a text; None if it cannot be told."""
    text = normalise(answer)
    letters = max(1, len(_LETTER.findall(text)))
    words = WORD.findall(text)
    best, most = None, _FEWEST_SMALL_WORDS - 1
    for name, script, small_words in _languages():
        if script == "latin":
            if (count := sum(word in small_words for word in words)) > most:
                best, most = name, count
        elif len(SCRIPTS[script].findall(text)) > _LEAST_SHARE * letters:
            kana = _KANA.search(text) is not None
            if script != "han" or kana == (name == "japanese"):
                return name
    return best


@cache
def _languages() -> tuple[tuple[str, str, frozenset[str]], ...]:
    """The first name, script and small words of each language."""
    return tuple(
        (table["names"][0], table["script"], word_list(table, "small_words")) for table in tables() if "names" in table
    )


@cache
def _names() -> dict[str, str]:
    """The first name of each language, by every name."""
    return {normalise(word): table["names"][0] for table in tables() for word in table.get("names", ())}
