"""Prepares text for the reader: shortens it, removes code and quotations, and normalises case, width and accents."""

import re
import unicodedata

#: Characters of a long message that are read. People give their opinion at the beginning or at the end.
HEAD, TAIL = 500, 250

_FENCE = re.compile(r"```.*?(?:```|\Z)", re.DOTALL)
_QUOTED_LINE = re.compile(r"^[ \t]*>.*$", re.MULTILINE)
QUOTATION = re.compile(r"\"[^\"\n]{1,200}\"|`[^`\n]{1,200}`|[“„«「『][^”“»」』\n]{1,200}[”“»」』]")
_ACCENT = re.compile("[\u0300-\u036f]")
_INVISIBLE = re.compile("[\u00ad\u200b-\u200f\u2060\ufe00-\ufe0f\ufeff\U0001f3fb-\U0001f3ff]")
_STRETCHED = re.compile(r"([^\W\d_])\1{2,}")
#: The full stop of a title ends no sentence: "Dr. Lopez".
_NO_TITLE = r"(?<!\bDr\.)(?<!\bMr\.)(?<!\bMs\.)(?<!\bMrs\.)(?<!\bProf\.)(?<!\bSr\.)(?<!\bSra\.)"
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


def shorten(text: str, head: int = HEAD, tail: int = TAIL) -> str:
    """The beginning and the end of a long text, on lines of their own."""
    return text if len(text) <= head + tail else f"{text[:head]}\n{text[-tail:]}"


def own_words(text: str) -> str:
    """A message without code blocks and quoted lines."""
    return _QUOTED_LINE.sub("", _FENCE.sub("\n", text))


def without_quotations(text: str) -> str:
    """A message without the words inside quotation marks, which are somebody else's."""
    return QUOTATION.sub('""', text)


def normalise(text: str) -> str:
    """One case, width and kind of quote; no accents, no stretched letters ("sooo"). Newlines stay."""
    # One character can decompose into eighteen, so the length is limited.
    text = unicodedata.normalize("NFKD", text.translate(_WIDTHS))[: 2 * len(text) + 100].casefold()
    text = _INVISIBLE.sub("", _ACCENT.sub("", text))
    # Composed again, because the phrase files contain composed Hangul and kana. The accents are already removed.
    return _STRETCHED.sub(r"\1", unicodedata.normalize("NFC", text)).replace("’", "'")


def sentences(text: str) -> list[tuple[int, int]]:
    """The start and end of each sentence, including its final mark. Quotations do not end sentences."""
    text = QUOTATION.sub(lambda match: "_" * len(match[0]), text)
    ends = [match.span() for match in _SENTENCE_END.finditer(text)]
    spans = zip([0, *(end for _, end in ends)], [*(start for start, _ in ends), len(text)], strict=True)
    return [(start, end) for start, end in spans if text[start:end].strip(_NO_SENTENCE)]


def read_plainly(text: str) -> str:
    """A message, or a part of it, normalised and without quotations, as phrases are searched in it."""
    return normalise(without_quotations(text))
