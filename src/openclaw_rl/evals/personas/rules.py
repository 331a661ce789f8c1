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


def avoids(text: str, _count: Count, *, all_of: Sequence[str]) -> bool:
    """The answer has none of the phrases."""
    return not says(text, _count, any_of=all_of)


def _whole(phrase: str) -> str:
    """A pattern for a phrase that matches whole words only, if its script separates words."""
    start = "" if _CJK_CHARACTER.match(phrase) or not phrase[:1].isalnum() else r"(?<!\w)"
    end = "" if _CJK_CHARACTER.match(phrase[-1:]) or not phrase[-1:].isalnum() else r"(?!\w)"
    return start + re.escape(phrase) + end


CHECKS: dict[str, Callable[..., bool]] = {
    check.__name__: check
    for check in (no_bold, no_numbered_list, no_bullets, no_boxed, long_enough, specific, short, says, avoids)
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
            _check_parameter(one.name, parameters[one.name], one.annotation is int)
        elif one.default is inspect.Parameter.empty:
            raise ValueError(f"needs the parameter {one.name}")
    return partial(CHECKS[name], **parameters)


def _check_parameter(name: str, value: Any, is_number: bool) -> None:
    """Raise ValueError if a parameter has the wrong type."""
    if is_number:
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"needs a whole number of at least 1 as {name}")
    elif not isinstance(value, list) or not value or not all(isinstance(text, str) and text for text in value):
        raise ValueError(f"needs a list of texts as {name}")
