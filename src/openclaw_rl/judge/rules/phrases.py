"""Text as the rules read it: shortened, normalised, in sentences; and the phrases that they find in it.

A phrase of the files `languages/*.toml` is a regular expression over normalised text (phrases are normalised too), one
sentence at a time. A space matches a space, `^` and `$` are the ends of a clause (commas, colons and "but" end one),
`{name}` is a word group of the file's `[words]`. In scripts with spaces a phrase matches whole words only. To add a
language, add a file. `signals.py` explains the signals.
"""

import re
import tomllib
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache, partial
from importlib.resources import files
from itertools import islice
from typing import Any, NamedTuple, Self

#: Characters of a long message that are read. People give their opinion at the beginning or at the end.
HEAD, TAIL = 500, 250
QUOTATION = re.compile(
    r"\"[^\"\n]{1,200}\"|`[^`\n]{1,200}`|[“„«「『][^”“»」』\n]{1,200}[”“»」』]"
    # Single quotation marks are also apostrophes: within a quotation they stand between letters.
    r"|(?<!\w)['‘](?=\w)[^'’\n]{1,100}(?:['’]\w[^'’\n]{0,100}){0,3}['’](?!\w)"
)
#: A word; in scripts without spaces, a character.
WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|\w+")

_FENCE = re.compile(r"```.*?(?:```|\Z)", re.DOTALL)
_QUOTED_LINE = re.compile(r"^[ \t]*>.*$", re.MULTILINE)
_ACCENT = re.compile("[\u0300-\u036f]")
_INVISIBLE = re.compile("[\u00ad\u200b-\u200f\u2060\ufe00-\ufe0f\ufeff\U0001f3fb-\U0001f3ff]")
_STRETCHED = re.compile(r"([^\W\d_])\1{2,}")
#: The full stop of a title or an abbreviation ends no sentence: "Dr. Lopez".
_NO_TITLE = (
    r"(?<!\bDr\.)(?<!\bMr\.)(?<!\bMs\.)(?<!\bMrs\.)(?<!\bProf\.)(?<!\bSr\.)(?<!\bSra\.)(?<!\bi\.e\.)(?<!\be\.g\.)"
)
#: The last alternative is for a missing full stop: "shorter pls Another question: why ...".
_SENTENCE_END = re.compile(
    rf"(?<=[.!?;…]){_NO_TITLE}[.!?;…]*\s+|(?<=[。！？；])\s*|\n+|\s+[-–—]+\s+"
    r"|(?<=[a-zß-ÿ]) (?=[A-ZÀ-Þ]\w{1,15} (?:\w{1,15} ){0,2}\w{1,15} ?: )"
)
#: A sentence whose last mark is within a quotation.
_AFTER_QUOTATION = re.compile(r"(?<=[.!?]['\"\u201d\u2019\u00bb])\s+(?=[A-Z])")
_NO_SENTENCE = " .!?;…。！？；\t"
_WIDTHS = str.maketrans(
    {"。": ". ", "！": "! ", "？": "? ", "；": "; ", "，": ", ", "、": ", ", "：": ": ", "¿": " ", "¡": " "}
    | dict.fromkeys("‘’ʼ´`＇", "'")
    | dict.fromkeys("“”„«»", '"')
)
#: Written between clauses in place of "but".
CONTRAST = "§"
SCRIPTS = {
    "latin": re.compile("[a-z]"),
    "han": re.compile("[\u3040-\u30ff\u3400-\u9fff]"),
    "hangul": re.compile("[\uac00-\ud7af]"),
    "cyrillic": re.compile("[\u0400-\u04ff]"),
    "emoji": re.compile("[\u2190-\u2bff\U0001f300-\U0001faff]"),
}
_SPACED_SCRIPTS = frozenset({"latin", "cyrillic"})
_CLAUSE_START = rf"(?:^|(?<=[,:{CONTRAST}]\s))"
_CLAUSE_END = rf"(?=\W{{0,8}}$|\s?[,:.!?;{CONTRAST}])"
_GROUP = re.compile(r"\{([a-z]\w*)\}")
#: With fewer small words, the language is unknown and every language of the script is tried.
_MIN_SMALL_WORDS = 3
#: A limit, because a text of only commas would take long.
_MOST_CLAUSES = 12
_MOST_BLANKS = 20
_WORD = re.compile(r"\w+")
_FIRST_WORD = re.compile(r"\W{0,8}")
_AFTER_MARK = re.compile(rf"[,:{CONTRAST}]\s")
#: A phrase with more possible first letters costs more to compile for each letter than the index saves.
_MANY_LETTERS = 6
_REPEATED = ("*", "+", "{")
_OPTIONAL = re.compile(r"\?|\*|\{0,?\d*\}")
_LOOK_AROUND = ("(?!", "(?=", "(?<")


def shorten(text: str, head: int = HEAD, tail: int = TAIL) -> str:
    """The beginning and the end of a long text, on lines of their own."""
    return text if len(text) <= head + tail else f"{text[:head]}\n{text[-tail:]}"


def without_code(text: str) -> str:
    """A message without code blocks and quoted lines."""
    return _QUOTED_LINE.sub("", _FENCE.sub("\n", text))


@lru_cache(maxsize=64)
def mask_quotations(text: str) -> str:
    """The text with each quotation replaced by as many underscores."""
    return QUOTATION.sub(lambda match: "_" * len(match[0]), text)


def normalise(text: str) -> str:
    """One case, width and kind of quote; no accents, no stretched letters ("sooo"). Newlines stay."""
    # One character can decompose into eighteen, so the length is limited.
    text = unicodedata.normalize("NFKD", text.translate(_WIDTHS))[: 2 * len(text) + 100].casefold()
    text = _INVISIBLE.sub("", _ACCENT.sub("", text))
    # Composed again, because the phrase files contain composed Hangul and kana. The accents are already removed.
    return _STRETCHED.sub(r"\1", unicodedata.normalize("NFC", text)).replace("’", "'")


@lru_cache(maxsize=64)
def normalise_in_place(text: str) -> str:
    """Normalise without moving any position: if the length would change, each character becomes one character."""
    if len(normalised := normalise(text)) == len(text):
        return normalised
    return "".join(single if len(single := normalise(char)) == 1 else "~" for char in text)


def normalise_unquoted(text: str) -> str:
    """Normalise a text without the words inside quotation marks, which are somebody else's."""
    return normalise(QUOTATION.sub('""', text))


def sentence_spans(text: str) -> list[tuple[int, int]]:
    """The start and end of each sentence, including its final mark. Quotations do not end sentences
    but where both end."""
    whole, text = text, mask_quotations(text)
    ends = [match.span() for match in _SENTENCE_END.finditer(text)]
    ends = sorted(ends + [one.span() for one in _AFTER_QUOTATION.finditer(whole) if text[one.start() - 1] == "_"])
    spans = zip([0, *(end for _, end in ends)], [*(start for start, _ in ends), len(text)], strict=True)
    return [(start, end) for start, end in spans if text[start:end].strip(_NO_SENTENCE)]


def ends_with_question(text: str) -> bool:
    """Whether a text ends with a question mark, closing quotes and brackets aside."""
    return text.rstrip().rstrip("\"'”»*_) ").endswith(("?", "？"))


class PhraseGroup:
    """Phrases of one signal and language that can begin with one letter. Compiled at its first use."""

    def __init__(self, letter: str, spaced: bool) -> None:
        """`letter`: "" if they can begin with any."""
        self.phrases: list[str] = []
        self._letter = letter
        self._spaced = spaced

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        phrases = [narrow(phrase, self._letter) for phrase in self.phrases] if self._letter else self.phrases
        return join(phrases, self._spaced)


class PhraseIndex:
    """Phrases by their first letter. Earlier phrases take precedence, as they do in one pattern.

    Python tries the alternatives of a pattern one after the other at every position. With hundreds of them for every
    signal and language, that would take most of the time. With the index only a few are tried.
    """

    def __init__(self, groups: Mapping[str, Sequence[PhraseGroup]]) -> None:
        """`groups`: by letter, in the order in which they are tried; with "", phrases that may begin with any."""
        self._groups = groups
        self._any = groups.get("", ())

    @classmethod
    def of(cls, phrases: Sequence[str], spaced: bool, few_places: bool = False) -> Self:
        """An index of the phrases of one language.

        `spaced`: the script has spaces between words, so phrases match whole words and start at a word.
        `few_places`: the phrases are tried at few positions. Those with many first letters are then compiled only once.
        """
        groups: dict[str, PhraseGroup] = {}
        for phrase in phrases:
            letters = first_letters(phrase) if spaced else None
            if letters is None or (few_places and len(letters) > _MANY_LETTERS):
                letters = frozenset([""])
            for letter in letters:
                groups.setdefault(letter, PhraseGroup(letter, spaced)).phrases.append(phrase)
        return cls({letter: [group] for letter, group in groups.items()})

    @classmethod
    def merge(cls, indexes: Sequence[Self]) -> Self:
        """An index of all phrases of several languages. It shares their compiled patterns."""
        groups: dict[str, list[PhraseGroup]] = defaultdict(list)
        for index in indexes:
            for letter, listed in index._groups.items():
                groups[letter] += listed
        return cls(dict(groups))

    def match(self, text: str, place: int) -> re.Match[str] | None:
        """Match at one position."""
        letter = text[place : place + 1]
        groups = (*self._groups.get(letter, ()), *self._any) if letter else self._any
        return first_match(groups, text, place)

    def match_first(self, text: str, places: Iterable[int]) -> re.Match[str] | None:
        """Match at the first of some positions where that is possible."""
        return next((match for place in places if (match := self.match(text, place))), None)

    def search(self, text: str, words: Sequence[int]) -> re.Match[str] | None:
        """The first match; `words` are the positions where words begin."""
        found = (match for group in self._any if (match := group.pattern.search(text)))
        first = min(found, key=re.Match.start, default=None)
        for place in words:
            # There are none at most positions, so this is checked first.
            if not (groups := self._groups.get(text[place])):
                continue
            if first and first.start() <= place:
                break
            if match := first_match(groups, text, place):
                return match
        return first

    def compile(self) -> None:
        """Compile everything now."""
        for groups in self._groups.values():
            for group in groups:
                _ = group.pattern


class Phrases(NamedTuple):
    """Phrases of one meaning, by their position."""

    at_start: PhraseIndex
    """At the beginning of a clause."""
    anywhere: PhraseIndex

    def find(self, text: str) -> re.Match[str] | None:
        """The first match anywhere; without one, the first at the beginning of a clause."""
        anywhere = self.anywhere.search(text, word_starts(text))
        return anywhere or self.at_start.match_first(text, clause_starts(text))

    def compile(self) -> None:
        """Compile everything now."""
        self.at_start.compile()
        self.anywhere.compile()


@dataclass(frozen=True)
class Language:
    """The phrases of one phrase file, or of all files with the same script. They are read at their first use."""

    script: re.Pattern[str]
    spaced: bool
    """Whether words have spaces between them."""
    read_signals: Callable[[], dict[str, Phrases]]
    small_words: frozenset[str]
    """Words that do not change what a request asks for. A language is also recognised by them."""

    @cached_property
    def signals(self) -> dict[str, Phrases]:
        return self.read_signals()


class Lexicon:
    """Searches the phrases of all languages that a text may be in."""

    def __init__(self, languages: Sequence[Language]) -> None:
        self._languages = languages

    def has(self, signal: str, text: str) -> bool:
        """Whether the text has any of a signal's phrases."""
        return self.find(signal, text) is not None

    def find(self, signal: str, text: str) -> re.Match[str] | None:
        """The first match of any of a signal's phrases."""
        return self._find(signal, text, clause_starts(text), word_starts(text))

    def _find(self, signal: str, text: str, starts: Sequence[int], words: Sequence[int]) -> re.Match[str] | None:
        first: re.Match[str] | None = None
        for language in self._languages:
            if phrases := language.signals.get(signal):
                first = earlier(first, phrases.anywhere.search(text, words))
                first = earlier(first, phrases.at_start.match_first(text, starts))
        return first

    def blank(self, signal: str, text: str, by: str = "~") -> str:
        """The text with a signal's phrases replaced by a mark."""
        place = 0
        pieces: list[str] = []
        starts = clause_starts(text)
        words = word_starts(text)
        for _ in range(_MOST_BLANKS):
            if not (match := self._find(signal, text, starts, words)):
                break
            pieces += [text[place : match.start()], f" {by} "]
            place = max(match.end(), match.start() + 1)
            text = "\0" * place + text[place:]
            starts = [start for start in starts if start >= place]
            words = [word for word in words if word >= place]
        return "".join([*pieces, text[place:]])


def earlier(one: re.Match[str] | None, other: re.Match[str] | None) -> re.Match[str] | None:
    """The match that begins first."""
    return other if other and (not one or other.start() < one.start()) else one


def lexicon_for(text: str, opening: str = "") -> Lexicon:
    """The languages that a normalised text may be in, by its script and, if it is long enough, its small words.

    `opening` is the beginning of the text, which may be in another language than the rest.
    """
    written = [language for language in all_languages() if language.script.search(text)]
    hits = count_small_words(text, written)
    first = count_small_words(opening, written)
    most = max(hits, default=0)
    most_first = max([1, *first])
    if most < _MIN_SMALL_WORDS:
        if has_word_of_one(text, written):
            return Lexicon([one for one, n in zip(written, hits, strict=True) if n or not one.spaced])
        return Lexicon([script for script in all_scripts() if script.script.search(text)])
    counted = zip(written, hits, first, strict=True)
    return Lexicon([one for one, n, m in counted if n >= 0.6 * most or m >= most_first or not one.spaced])


def count_small_words(text: str, languages: Sequence[Language]) -> list[int]:
    """How many words of a text are small words of each language; 0 for scripts without spaces."""
    words = _WORD.findall(text)
    return [sum(word in one.small_words for word in words) if one.spaced else 0 for one in languages]


def has_word_of_one(text: str, languages: Sequence[Language]) -> bool:
    """Whether a text has a small word that only one language has, so languages without small words are excluded."""
    return any(sum(word in one.small_words for one in languages) == 1 for word in _WORD.findall(text))


@lru_cache(maxsize=16)
def clause_starts(text: str) -> Sequence[int]:
    """The positions where clauses begin: the first word, and after commas, colons and contrasts."""
    first = _FIRST_WORD.match(text)
    later = islice(_AFTER_MARK.finditer(text), _MOST_CLAUSES)
    return [first.end() if first else 0, *(match.end() for match in later)]


@lru_cache(maxsize=16)
def word_starts(text: str) -> Sequence[int]:
    """The positions where words begin."""
    return [match.start() for match in _WORD.finditer(text)]


@cache
def all_languages() -> tuple[Language, ...]:
    """Every phrase file as a language."""
    return tuple(map(read_language, tables()))


@cache
def all_scripts() -> tuple[Language, ...]:
    """The phrase files of each script as one language, for texts too short to tell the language."""
    scripts = dict.fromkeys(one.script for one in all_languages())
    return tuple(merge([one for one in all_languages() if one.script is script]) for script in scripts)


@cache
def all_small_words() -> frozenset[str]:
    """The small words of all languages together."""
    return frozenset().union(*(language.small_words for language in all_languages()))


def merge(languages: Sequence[Language]) -> Language:
    """Languages of one script as one."""
    small_words = frozenset().union(*(language.small_words for language in languages))
    return Language(languages[0].script, languages[0].spaced, partial(merge_signals, languages), small_words)


def merge_signals(languages: Sequence[Language]) -> dict[str, Phrases]:
    listed: dict[str, list[Phrases]] = defaultdict(list)
    for language in languages:
        for signal, phrases in language.signals.items():
            listed[signal].append(phrases)
    return {
        signal: Phrases(
            PhraseIndex.merge([phrases.at_start for phrases in parts]),
            PhraseIndex.merge([phrases.anywhere for phrases in parts]),
        )
        for signal, parts in listed.items()
    }


@cache
def tables() -> tuple[dict[str, Any], ...]:
    """The contents of the phrase files, in the order of their names."""
    folder = files("openclaw_rl.judge.rules") / "languages"
    names = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".toml"))
    return tuple(tomllib.loads((folder / name).read_text("utf-8")) for name in names)


def read_language(table: Mapping[str, Any]) -> Language:
    """The language of one phrase file."""
    signals = partial(read_signals, table)
    return Language(SCRIPTS[table["script"]], is_spaced(table), signals, word_list(table, "small_words"))


def read_signals(table: Mapping[str, Any]) -> dict[str, Phrases]:
    signals = {}
    for signal, listed in table["signals"].items():
        # A lead only matches at the start of a clause.
        start = "^" if signal == "lead" else ""
        phrases = [start + part for phrase in listed for part in split(expand(phrase, table))]
        signals[signal] = read_phrases(phrases, table)
    return signals


def is_spaced(table: Mapping[str, Any]) -> bool:
    """Whether a phrase file's language has spaces between words."""
    return table["script"] in _SPACED_SCRIPTS


def word_list(table: Mapping[str, Any], name: str) -> frozenset[str]:
    """The words of a list in a phrase file."""
    return frozenset(_WORD.findall(normalise(" ".join(table.get(name, [])))))


def expand(phrase: str, table: Mapping[str, Any]) -> str:
    """A phrase with the file's word groups filled in (groups may hold groups), normalised as the text will be."""
    words = table.get("words", {})
    for _depth in range(3):
        phrase = _GROUP.sub(lambda match: f"(?:{words[match[1]]})", phrase)
    # Escapes such as `\W` must not be lower-cased.
    return "".join(part if part.startswith("\\") else normalise(part) for part in re.split(r"(\\.)", phrase))


def read_phrases(phrases: Iterable[str], table: Mapping[str, Any]) -> Phrases:
    """Index expanded phrases of one meaning."""
    ended = [re.sub(r"(?<!\\)\$", lambda _: _CLAUSE_END, phrase) for phrase in phrases]
    at_start = [inner_starts(phrase[1:]) for phrase in ended if phrase.startswith("^")]
    anywhere = [inner_starts(phrase) for phrase in ended if not phrase.startswith("^")]
    spaced = is_spaced(table)
    return Phrases(PhraseIndex.of(at_start, spaced, few_places=True), PhraseIndex.of(anywhere, spaced))


def inner_starts(phrase: str) -> str:
    """A phrase in which `^` matches the start of a clause, also inside an alternative."""
    return re.sub(r"(?<![\\\[])\^", lambda _: _CLAUSE_START, phrase)


def first_match(groups: Iterable[PhraseGroup], text: str, place: int) -> re.Match[str] | None:
    return next((match for group in groups if (match := group.pattern.match(text, place))), None)


def join(phrases: Sequence[str], spaced: bool) -> re.Pattern[str]:
    """One pattern for many phrases."""
    joined = "|".join(phrases)
    return re.compile(rf"(?:\b|(?!\w))(?:{joined})(?:\b|(?<!\w))" if spaced else joined)


def split(phrase: str) -> Iterator[str]:
    """The top-level alternatives of a phrase."""
    depth = start = 0
    for place, char in enumerate(phrase):
        depth += (char in "([") - (char in ")]")
        if char == "|" and depth == 0:
            yield phrase[start:place]
            start = place + 1
    yield phrase[start:]


def first_letters(phrase: str) -> frozenset[str] | None:
    """The letters that a match can begin with; None if it can be any."""
    if phrase.startswith(_LOOK_AROUND):
        return first_letters(phrase[closing(phrase) + 1 :])
    if phrase.startswith("(?:"):
        end = closing(phrase)
        firsts = [first_letters(part) for part in split(phrase[3:end])]
        rest = phrase[end + 1 :]
    elif phrase[:1].isalnum():
        firsts = [frozenset(phrase[0])]
        rest = phrase[1:]
    else:
        return None
    if optional := _OPTIONAL.match(rest):
        firsts.append(first_letters(rest[optional.end() :]))
    known = [letters for letters in firsts if letters is not None]
    return frozenset().union(*known) if len(known) == len(firsts) else None


def narrow(phrase: str, letter: str) -> str:
    """The phrase without the alternatives at its beginning that cannot begin with a letter. One of them can."""
    if phrase.startswith(_LOOK_AROUND):
        end = closing(phrase) + 1
        return phrase[:end] + narrow(phrase[end:], letter)
    if not phrase.startswith("(?:"):
        return phrase
    end = closing(phrase)
    rest = phrase[end + 1 :]
    if rest.startswith(_REPEATED):
        # A repetition may begin with another letter than the first time.
        return phrase
    parts = [part for part in split(phrase[3:end]) if letter in (first_letters(part) or ())]
    if not parts:
        return narrow(rest.removeprefix("?"), letter)
    return f"(?:{'|'.join(narrow(part, letter) for part in parts)}){rest}"


def closing(phrase: str) -> int:
    """The position of the bracket that closes a phrase's first one."""
    depth = 0
    for place, char in enumerate(phrase):
        depth += (char == "(") - (char == ")")
        if depth == 0:
            return place
    raise ValueError(f"This phrase has a bracket that is not closed: {phrase}")
