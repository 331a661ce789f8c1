"""Rules about an answer: pure functions from its text to whether it passes.

A persona's file names a rule and gives its parameters. An answer without words passes no rule (see `Persona.failed`).
"""

import inspect
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

Count = Callable[[str], int]
"""Counts the tokens of a text."""
Check = Callable[[str, Count], bool]

_CODE = re.compile(r"```.*?(?:```|\Z)|`[^`\n]*`", re.DOTALL)
_BOLD = re.compile(r"\*\*(?=[^\s*]).+?\*\*|__(?=[^\s_]).+?__|<(?:b|strong)>|\\textbf\b", re.IGNORECASE)
_ITEM = re.compile(
    r"^[\s>#*_-]*(?:step\s+)?\(?(\d{1,3})(?:[.):](?!\d)[*_]*(?=\s)|[.)]\*\*)", re.IGNORECASE | re.MULTILINE
)
#: "1) … 2) …" in running text. With full stops it could be two sums.
_INLINE_ITEMS = re.compile(r"(?<!\S)\(?1\)\s.+?(?<!\S)\(?2\)\s", re.DOTALL)
_BULLET = re.compile(r"^\s*[-*+•–]\s+\S", re.MULTILINE)
_BOXED = re.compile(r"\\f?boxed\b")
_CJK = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
_CJK_CHARACTER = re.compile(f"[{_CJK}]")
_WORD = re.compile(rf"[^\W_{_CJK}]+(?:['’.,-][^\W_{_CJK}]+)*")
_ABBREVIATION = re.compile(
    r"\b(?:e\.g|i\.e|etc|vs|mr|mrs|ms|dr|st|approx|z\.b|d\.h|usw|p\. ?ex|p\. ?ej|[a-z](?:\.[a-z])+)\.", re.I
)
_SENTENCE_END = re.compile(r"[.!?…]+[\"'”’»)*_]*(?=\s|$)|[。！？]+|\n+")
#: Signs that an answer is specific: a number, an example, a step, a quotation.
_NUMBER = (
    r"\d|\b(?:two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|dozen|hundred|thousand|million|half|zwei|drei"
    r"|vier|fünf|deux|trois|quatre|cinq|dos|tres|cuatro|cinco)\b|[二三四五六七八九十百千万]"
)
_EXAMPLE = (
    r"\b(?:for example|for instance|e\.g\.|such as|imagine|suppose|let's say|say you|just like|zum beispiel|z\. ?b\."
    r"|etwa wenn|stell dir|par exemple|comme si|por ejemplo|imagina|como si)|例如|比如|譬如|举例|想象"
)
_STEP = (
    r"\b(?:first(?:ly)?|second(?:ly)?|step|after that|finally|zuerst|danach|schritt|schließlich|d'abord|ensuite|enfin"
    r"|étape|primero|después|luego|paso|finalmente)\b|首先|然后|接着|最后|步骤|第一"
)
_QUOTATION = r"[\"“„«「][^\"”“»」\n]{2,80}[\"”“»」]|`[^`\n]+`"
_SIGNS = tuple(re.compile(pattern, re.IGNORECASE) for pattern in (_NUMBER, _EXAMPLE, _STEP, _QUOTATION))
#: What may stand before the first word of a line: Markdown's signs, quotation marks and dashes.
_LINE_SIGNS = " \t>#*_\"'“”‘’-–—•"
_CLOSING_SIGNS = " \t\n*_\"'”’)."
_CONTRACTION = re.compile(
    r"\b(?:[a-z]+n't|(?:i|you|he|she|it|we|they|that|there|who|what)'(?:m|re|ve|ll|d)"
    r"|(?:he|she|it|that|there|here|who|what|where|when|why|how|let)'s|gonna|wanna|gotta)\b",
    re.IGNORECASE,
)
_EMOJI = re.compile("[\U0001f300-\U0001faff\u2600-\u27bf\u2b50\u2b55]")
#: Frequent words that tell languages apart.
_FUNCTION_WORDS = {
    "en": "the and of to is that it for with are this from by you your can as be because when which",
    "fr": "le la les des du de et est une un dans qui que pour sur avec ce cette il elle on au aux plus pas en sont",
    "es": "el la los las del de y es una un en que para con por se su como más lo al son esta este no cuando",
}
_FUNCTION_WORD_SETS = {language: frozenset(words.split()) for language, words in _FUNCTION_WORDS.items()}
#: The share of words that frequent words have at least in ordinary text.
_MIN_FUNCTION_WORDS = 0.2
#: How many words before a phrase are searched for a negation.
_NEGATION_WORDS = 3


def count_words(text: str) -> int:
    """The number of words. Two characters of a script without spaces count as one word."""
    return len(_WORD.findall(text)) + (len(_CJK_CHARACTER.findall(text)) + 1) // 2


def estimate_tokens(text: str) -> int:
    """A rough number of tokens: four for every three words, one for each character of a script without spaces."""
    return len(_WORD.findall(text)) * 4 // 3 + len(_CJK_CHARACTER.findall(text))


def count_sentences(text: str) -> int:
    """The number of sentences. Each line of a list is one; abbreviations and decimal points do not end a sentence."""
    parts = _SENTENCE_END.split(_ABBREVIATION.sub("x", text))
    return sum(1 for part in parts if count_words(part))


def no_bold(text: str, _count: Count) -> bool:
    """Nothing is bold in Markdown, HTML or LaTeX. Asterisks and underscores inside code do not count."""
    return _BOLD.search(_CODE.sub("", text)) is None


def no_numbered_list(text: str, _count: Count) -> bool:
    """No line is the first of a numbered list ("1.", "1)", "Step 1:"), and no two lines are numbered."""
    without_code = _CODE.sub("", text)
    numbers = [int(number) for number in _ITEM.findall(without_code)]
    return 1 not in numbers and len(numbers) < 2 and _INLINE_ITEMS.search(without_code) is None


def no_bullets(text: str, _count: Count) -> bool:
    """At most one line begins like a list item: a single one may be an ordinary dash."""
    return len(_BULLET.findall(_CODE.sub("", text))) < 2


def no_boxed(text: str, _count: Count) -> bool:
    r"""No `\boxed` result."""
    return _BOXED.search(text) is None


def long_enough(text: str, count: Count, *, tokens: int) -> bool:
    """The answer has at least `tokens` tokens."""
    return count(text) >= tokens


def specific(text: str, _count: Count, *, signs: int = 1) -> bool:
    """The answer has at least `signs` of these: a number, an example, a step, a quotation."""
    return sum(1 for sign in _SIGNS if sign.search(text)) >= signs


def short(text: str, _count: Count, *, words: int, sentences: int = 1) -> bool:
    """The answer has at most `words` words and `sentences` sentences."""
    return count_words(text) <= words and count_sentences(text) <= sentences


def says(text: str, _count: Count, *, any_of: Sequence[str], not_after: Sequence[str] = ()) -> bool:
    """The answer has one of the phrases, as whole words in any case, without a word of `not_after` just before it."""
    low = text.lower().replace("’", "'")
    negations = frozenset(word.lower() for word in not_after)
    return any(
        not negations & set(_WORD.findall(low[: match.start()])[-_NEGATION_WORDS:])
        for phrase in any_of
        for match in re.finditer(_whole(phrase.lower()), low)
    )


def writes(text: str, _count: Count, *, any_of: Sequence[str]) -> bool:
    """The answer has one of the texts, letter for letter."""
    return any(wanted in text for wanted in any_of)


def avoids(text: str, _count: Count, *, all_of: Sequence[str]) -> bool:
    """The answer has none of the phrases."""
    return not says(text, _count, any_of=all_of)


def begins_with(text: str, _count: Count, *, any_of: Sequence[str]) -> bool:
    """The answer's first words are one of the phrases, in any case."""
    return _begins(text.lstrip(), any_of)


def ends_with(text: str, _count: Count, *, any_of: Sequence[str]) -> bool:
    """The answer's last words are one of the phrases, in any case."""
    end = text.rstrip(_CLOSING_SIGNS).lower().replace("’", "'")
    return any(re.search(_whole(phrase.rstrip(_CLOSING_SIGNS).lower()) + r"\Z", end) for phrase in any_of)


def has_line(text: str, _count: Count, *, any_of: Sequence[str]) -> bool:
    """A line begins with one of the phrases and goes on after it."""
    return any(_begins(line, any_of, goes_on=True) for line in text.splitlines())


def last_line(text: str, _count: Count, *, any_of: Sequence[str]) -> bool:
    """The last of several lines begins with one of the phrases and goes on after it."""
    lines = [line for line in text.splitlines() if line.strip()]
    return len(lines) > 1 and _begins(lines[-1], any_of, goes_on=True)


def ends_with_question(text: str, _count: Count) -> bool:
    """The last sentence is a question."""
    return text.rstrip(_CLOSING_SIGNS.replace(".", "")).endswith(("?", "？"))


def no_contractions(text: str, _count: Count) -> bool:
    """No "don't", "it's" or "you'll". Possessives are none."""
    return _CONTRACTION.search(text.replace("’", "'")) is None


def no_lists(text: str, count: Count) -> bool:
    """Neither a numbered list nor bullets."""
    return no_numbered_list(text, count) and no_bullets(text, count)


def no_digits(text: str, _count: Count) -> bool:
    """No number is written with digits."""
    return not any(char.isdigit() for char in text)


def has_emoji(text: str, _count: Count) -> bool:
    """The answer has an emoji."""
    return _EMOJI.search(text) is not None


def lower_case(text: str, _count: Count) -> bool:
    """No letter is a capital."""
    return not any(char.isupper() for char in text)


def only_bullets(text: str, _count: Count) -> bool:
    """Every line is a bullet, and there are at least two."""
    lines = [line for line in text.splitlines() if line.strip()]
    return len(lines) > 1 and all(_BULLET.match(line) for line in lines)


def begins_bold(text: str, _count: Count) -> bool:
    """The answer begins with bold words, and goes on with words that are not bold."""
    start = text.lstrip()
    bold = _BOLD.match(start)
    return bold is not None and count_words(start[bold.end() :]) > 0


def in_lines(text: str, _count: Count, *, lines: int, words: int) -> bool:
    """The answer has exactly `lines` lines with at most `words` words each."""
    written = [line for line in text.splitlines() if line.strip()]
    return len(written) == lines and all(1 <= count_words(line) <= words for line in written)


def in_language(text: str, _count: Count, *, language: str) -> bool:
    """Frequent words of the language are as common as in ordinary text, and more so than those of the others."""
    found = [word.lower() for word in _WORD.findall(text)]
    shares = {
        name: sum(word in known for word in found) / max(1, len(found)) for name, known in _FUNCTION_WORD_SETS.items()
    }
    own = shares.pop(language)
    return own >= _MIN_FUNCTION_WORDS and own > max(shares.values())


def _begins(text: str, any_of: Sequence[str], *, goes_on: bool = False) -> bool:
    """Whether a text begins with one of the phrases as whole words, after signs; `goes_on`: and has words after it."""
    start = text.lstrip(_LINE_SIGNS).lower().replace("’", "'")
    found = (re.match(_whole(phrase.lower()), start) for phrase in any_of)
    return any(match and (not goes_on or count_words(start[match.end() :])) for match in found)


def _whole(phrase: str) -> str:
    """A pattern for a phrase that matches whole words only, if its script separates words."""
    start = "" if _CJK_CHARACTER.match(phrase) or not phrase[:1].isalnum() else r"(?<!\w)"
    end = "" if _CJK_CHARACTER.match(phrase[-1:]) or not phrase[-1:].isalnum() else r"(?!\w)"
    return start + re.escape(phrase) + end


CHECKS: dict[str, Callable[..., bool]] = {
    check.__name__: check
    for check in (
        *(no_bold, no_numbered_list, no_bullets, no_lists, no_boxed, no_digits, no_contractions, lower_case),
        *(long_enough, specific, short, says, writes, avoids, begins_with, ends_with, has_line, last_line),
        *(ends_with_question, has_emoji, only_bullets, begins_bold, in_lines, in_language),
    )
}


def make_check(name: str, parameters: dict[str, Any]) -> Check:
    """The named rule with its parameters. Raises ValueError with the end of a sentence that says what is wrong."""
    if name not in CHECKS:
        raise ValueError(f"is not one of {', '.join(CHECKS)}")
    known = list(inspect.signature(CHECKS[name]).parameters.values())[2:]
    if unknown := parameters.keys() - {one.name for one in known}:
        raise ValueError(f"has no parameter {', '.join(sorted(unknown))}")
    for one in known:
        if one.name in parameters:
            _check_parameter(one.name, parameters[one.name], one.annotation)
        elif one.default is inspect.Parameter.empty:
            raise ValueError(f"needs the parameter {one.name}")
    return partial(CHECKS[name], **parameters)


def _check_parameter(name: str, value: Any, kind: Any) -> None:
    """Raise ValueError if a parameter has the wrong type."""
    if kind is int:
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"needs a whole number of at least 1 as {name}")
    elif kind is str:
        if value not in _FUNCTION_WORD_SETS:
            raise ValueError(f"needs one of {', '.join(_FUNCTION_WORD_SETS)} as {name}")
    elif not isinstance(value, list) or not value or not all(isinstance(text, str) and text for text in value):
        raise ValueError(f"needs a list of texts as {name}")
