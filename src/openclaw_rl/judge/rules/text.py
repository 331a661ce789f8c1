"""Prepares text for the rules: shortens it, removes code and quotations, normalises it, and finds its numbers."""

import re
import unicodedata

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
_NO_SENTENCE = " .!?;…。！？；\t"
_WIDTHS = str.maketrans(
    {"。": ". ", "！": "! ", "？": "? ", "；": "; ", "，": ", ", "、": ", ", "：": ": ", "¿": " ", "¡": " "}
    | dict.fromkeys("‘’ʼ´`＇", "'")
    | dict.fromkeys("“”„«»", '"')
)
_DIGITS = re.compile(r"\d+(?:[.,:]\d+)*")
_LETTERS = re.compile(r"[^\W\d_]+")
#: Number words from 2 to 12 in English, German, French and Spanish. "One" is also an article or a pronoun.
_NUMBER_WORDS = {
    word: str(number)
    for number, listed in enumerate(
        (
            "two zwei deux dos",
            "three drei trois tres",
            "four vier quatre cuatro",
            "five funf cinq cinco",
            "six sechs seis",
            "seven sieben sept siete",
            "eight acht huit ocho",
            "nine neun neuf nueve",
            "ten zehn dix diez",
            "eleven elf onze once",
            "twelve zwolf douze doce",
        ),
        start=2,
    )
    for word in listed.split()
}
_HAN_COUNT = re.compile(r"[两二三四五六七八九十]+(?=[个個位人张張本条條次天年月日点點份句段页頁号號岁歲只间間道])")
_HAN_NUMBERS = {"两": "2"} | {sign: str(number) for number, sign in enumerate("二三四五六七八九十", start=2)}


def shorten(text: str, head: int = HEAD, tail: int = TAIL) -> str:
    """The beginning and the end of a long text, on lines of their own."""
    return text if len(text) <= head + tail else f"{text[:head]}\n{text[-tail:]}"


def without_code(text: str) -> str:
    """A message without code blocks and quoted lines."""
    return _QUOTED_LINE.sub("", _FENCE.sub("\n", text))


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


def normalise_in_place(text: str) -> str:
    """Normalise without moving any position: if the length would change, each character becomes one character."""
    if len(normalised := normalise(text)) == len(text):
        return normalised
    return "".join(single if len(single := normalise(char)) == 1 else "~" for char in text)


def normalise_unquoted(text: str) -> str:
    """Normalise a text without the words inside quotation marks, which are somebody else's."""
    return normalise(QUOTATION.sub('""', text))


def sentence_spans(text: str) -> list[tuple[int, int]]:
    """The start and end of each sentence, including its final mark. Quotations do not end sentences."""
    text = mask_quotations(text)
    ends = [match.span() for match in _SENTENCE_END.finditer(text)]
    spans = zip([0, *(end for _, end in ends)], [*(start for start, _ in ends), len(text)], strict=True)
    return [(start, end) for start, end in spans if text[start:end].strip(_NO_SENTENCE)]


def numbers(text: str) -> set[str]:
    """The numbers of a text, in digits or in words, as digits."""
    words = {_NUMBER_WORDS[word] for word in _LETTERS.findall(normalise(text)) if word in _NUMBER_WORDS}
    counts = {_HAN_NUMBERS[count] for count in _HAN_COUNT.findall(text) if count in _HAN_NUMBERS}
    return set(_DIGITS.findall(text)) | words | counts


def ends_with_question(text: str) -> bool:
    """Whether a text ends with a question mark, closing quotes and brackets aside."""
    return text.rstrip().rstrip("\"'”»*_) ").endswith(("?", "？"))
