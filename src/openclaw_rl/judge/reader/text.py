"""Text as the reader compares it: short enough, without code and quotations, in one case, width and accent."""

import re
import unicodedata

#: What is looked at of a long message. People say what they think of an answer first, or last.
HEAD, TAIL = 500, 250

_FENCE = re.compile(r"```.*?(?:```|\Z)", re.DOTALL)
_QUOTED_LINE = re.compile(r"^[ \t]*>.*$", re.MULTILINE)
_QUOTATION = re.compile(r"\"[^\"\n]{1,200}\"|`[^`\n]{1,200}`|[“„«「『][^”“»」』\n]{1,200}[”“»」』]")
_ACCENT = re.compile("[\u0300-\u036f]")
_INVISIBLE = re.compile("[\u00ad\u200b-\u200f\u2060\ufe00-\ufe0f\ufeff\U0001f3fb-\U0001f3ff]")
_STRETCHED = re.compile(r"([^\W\d_])\1{2,}")
_SENTENCE_END = re.compile(r"(?<=[.!?;])[.!?;]*\s+|\n+|\s+[-–—]+\s+")
_SPACE = re.compile(r"\s+")
_WIDTHS = str.maketrans(
    {"。": ". ", "！": "! ", "？": "? ", "；": "; ", "，": ", ", "、": ", ", "：": ": ", "¿": " ", "¡": " "}
    | dict.fromkeys("‘’ʼ´`＇", "'")
    | dict.fromkeys("“”„«»", '"')
)


def shorten(text: str, head: int = HEAD, tail: int = TAIL) -> str:
    """The beginning and the end of a long text, on lines of their own."""
    return text if len(text) <= head + tail else f"{text[:head]}\n{text[-tail:]}"


def own_words(text: str) -> str:
    """A message without what its writer only shows: code blocks and quoted lines."""
    return _QUOTED_LINE.sub("", _FENCE.sub("\n", text))


def without_quotations(text: str) -> str:
    """A message in which the words inside quotation marks are gone: they are somebody else's."""
    return _QUOTATION.sub('""', text)


def normalise(text: str) -> str:
    """One case, width and kind of quote; no accents, no stretched letters ("sooo"). Newlines stay."""
    # One character can decompose into eighteen: cut, so that it stays a bounded piece of work.
    text = unicodedata.normalize("NFKD", text.translate(_WIDTHS))[: 2 * len(text) + 100].casefold()
    text = _INVISIBLE.sub("", _ACCENT.sub("", text))
    # Composed again, since Hangul and kana are written so in the phrase files; accents are gone by now.
    return _STRETCHED.sub(r"\1", unicodedata.normalize("NFC", text)).replace("’", "'")


def sentences(text: str) -> list[str]:
    """The sentences of a text, each with its final mark."""
    pieces = (_SPACE.sub(" ", piece).strip() for piece in _SENTENCE_END.split(text))
    return [piece for piece in pieces if piece.strip(" .!?;")]
