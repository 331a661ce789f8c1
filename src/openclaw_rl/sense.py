"""Sense: whether a text is a sensible answer at all, apart from what it should say.

Some rules are satisfied by an answer without content. The check rejects answers that are empty, repetitive, garbled,
off topic, or only the question again; evaluations call it the quality guard. It is cheap and deterministic, never
raises, and needs no model; a caller with a model can add the answer's perplexity under the base model. It does not know
whether an answer is true.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

#: Words that show that a text is in English, and the share of them and the number of words that say so.
_ENGLISH_WORDS = "the of and to is are that it you for with this be by from or have can your they their"
_ENGLISH = frozenset(_ENGLISH_WORDS.split())
_MIN_ENGLISH, _MIN_WORDS_OF_LANGUAGE = 0.08, 5
#: Scripts without spaces, where a pair of characters counts as a word.
CJK = re.compile("[\u3040-\u30ff\u3400-\u9fff]")
_TOKEN = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W_\u3040-\u30ff\u3400-\u9fff]+")
_ACCENT = re.compile("[\u0300-\u036f]")
#: An apostrophe inside a word: "don't" is one word.
_APOSTROPHE = re.compile(r"(?<=\w)['’](?=\w)")
#: Endings that are removed, longest first, if at least three letters remain.
_ENDINGS = ("ation", "ings", "ing", "ion", "ies", "ely", "ed", "es", "er", "en", "ly", "s", "e", "y", "n")
#: The most letters of a stem.
_MAX_STEM = 6
#: Common words without content in English, German, French and Spanish.
_SMALL_WORD_LIST = """
    a about after again all also always am an and any are aren arent as at be because been before being but by can
    cant could did didnt do does doesnt doing dont each else even ever every few for from get gets give given gives
    go goes going good had has have having he her here hers him his how i if im in into is isnt it its itself just
    keep know let lets like lot lots made make makes many may me mean means might more most much must my need needs
    never no not now of off often oh ok on once one only or other our out over own please put said same say says she
    should so some something such sure take than thank thanks that thats the their them then there these they thing
    things think this those through to too try under until up us use used uses using very want was way ways we well
    went were what whats when where which while who why will with would yes yet you your youre
    aber als am an auch auf aus bei bin bist da dann das dass dem den der des die dies diese du ein eine einem einen
    einer er es etwas fur hat haben ich ihr im ist ja kann man mehr mein mit nach nicht noch nur oder sein sich sie
    sind so um und uns von vor war was wenn wer wie wir wird zu zum zur
    au aux avec ce ces cela ca cest comme dans de des du elle en est et etre il ils je la le les leur lui ma mais me
    mes mon ne nous on ou par pas plus pour qu que qui sa se ses si son sont sur ta te tes toi ton tu un une vous
    al como con cual cuando de del el ella en entre era eres es esa ese eso esta este esto ha hay la las lo los mas
    me mi muy nos o para pero por que se ser si sin son su sus tambien te tiene tu un una uno y ya
"""
SMALL_WORDS = frozenset(_SMALL_WORD_LIST.split())
#: Chinese and Japanese characters without content.
_SMALL_CHARACTERS = frozenset(
    "的了是在我你他她它们这那有和就不也都要会可以吗呢吧啊个一为什么怎请把被让对从到与及のはがをにでとも"
)
#: The share of content words that the answer has in common with the question and its reference, of the smaller set.
MIN_OVERLAP = 0.15
#: An answer that names this share of the question's content words is on topic, also if its overlap is small.
MIN_NAMED = 0.5
#: Under a 135M base model, none of its own 96 answers was over 14 and none of 96 hand-written ones over 250. With their
#: words shuffled, three in four of these answers were over 280.
MAX_PERPLEXITY = 300.0
#: The rest of a longer answer is ignored.
MAX_CHARACTERS = 8_000
#: How often one letter, or one other sign, may repeat in a row. Signs draw lines and tables, so their limit is higher.
_MAX_SAME_LETTERS, _MAX_SAME_SIGNS = 5, 60
#: Shorter texts are not checked for repeated words.
_MIN_WORDS = 8
#: The share of all words that one word may have. "The" is 7 % of English.
_MAX_SHARE_OF_ONE_WORD = 0.4
#: The length of a run of words, and the share of a text's runs that must be distinct.
_RUN, _MIN_DISTINCT_RUNS = 4, 0.5
#: How often the same few words may repeat in a row, and how many words such a cycle may have.
_MAX_REPEATS = 4
_MAX_CYCLE_WORDS = 8
#: The share of all words that may be unpronounceable.
_MAX_GARBLED = 0.3
#: The share of visible characters that must be letters or digits.
_MIN_WRITING = 0.5
_SAME_LETTERS = re.compile(rf"([^\W\d_])\1{{{_MAX_SAME_LETTERS},}}")
_SAME_SIGNS = re.compile(rf"([^\w\s])\1{{{_MAX_SAME_SIGNS},}}")
_NO_VOWEL = re.compile(r"[b-df-hj-np-tv-xz]{5,}")
_LATIN = re.compile(r"[a-z]+")
_LANGUAGES = "python|javascript|typescript|java|c|rust|sql|html|css|json|(?:bash|shell) script"
_ASKS_FOR_CODE = re.compile(
    r"\b(?:write|show|give|create|implement)\b[^.?!\n]{0,80}"
    rf"\b(?:{_LANGUAGES}|function|the code|code (?:that|to|for))\b",
    re.IGNORECASE,
)
_CODE_FENCE = "```"
_MAX_WORD_LETTERS = 28


def words_of(text: str) -> list[str]:
    """The words of a text in lower case without accents. A character of a script without spaces is a word."""
    unaccented = _ACCENT.sub("", unicodedata.normalize("NFKD", _APOSTROPHE.sub("", text)))
    return _TOKEN.findall(unicodedata.normalize("NFC", unaccented).casefold())


def stems(text: str) -> frozenset[str]:
    """The content of a text: its content words without endings, its numbers, and pairs of characters."""
    words = words_of(text)
    characters = [word if CJK.match(word) and word not in _SMALL_CHARACTERS else "" for word in words]
    pairs = {one + other for one, other in pairwise(characters) if one and other}
    spaced = {stem(word) for word in words if word not in SMALL_WORDS and not CJK.match(word)}
    return frozenset(pairs | {word for word in spaced if len(word) > 1 or word.isdigit()})


def stem(word: str) -> str:
    """The first letters of a word without its ending. Numbers stay as they are."""
    if word.isdigit():
        return word
    for ending in _ENDINGS:
        if word.endswith(ending) and len(word) - len(ending) >= 3:
            word = word[: -len(ending)]
            break
    return word[:_MAX_STEM]


@dataclass(frozen=True, slots=True)
class Quality:
    """The result of the check."""

    ok: bool
    reasons: tuple[str, ...]
    """What is wrong, each in a few words; empty if the answer is ok."""
    overlap: float
    """The share of content words in common with the question and its reference, from 0 to 1."""


def check(
    answer: str, question: str, reference: str, *, perplexity: float | None = None, translated: bool = False
) -> Quality:
    """Check an answer. `perplexity` is the answer's perplexity under the base model, if the caller knows it.

    One that is wanted in another language than the question's (`translated`) has few words in common with it, so it
    may be about anything.
    """
    answer = answer[:MAX_CHARACTERS]
    words = words_of(answer)
    overlap = overlap_of(answer, f"{question} {reference}")
    if not words:
        return Quality(False, ("it is empty",), 0.0)
    faults = {
        "it repeats itself": repeats(words),
        "one character goes on and on": bool(_SAME_LETTERS.search(answer) or _SAME_SIGNS.search(answer)),
        "it is garbled": is_garbled(answer, words),
        "it only repeats the question": is_echo(answer, question),
        "it is about something else": not translated
        and overlap < MIN_OVERLAP
        and named_share(answer, question) < MIN_NAMED,
        "the base model finds it improbable": perplexity is not None and not perplexity <= MAX_PERPLEXITY,
    }
    reasons = tuple(reason for reason, holds in faults.items() if holds)
    return Quality(not reasons, reasons, overlap)


def overlap_of(answer: str, about: str) -> float:
    """The content words that two texts have in common, as a share of the smaller set."""
    ours, theirs = stems(answer), stems(about)
    return len(ours & theirs) / min(len(ours), len(theirs)) if ours and theirs else 0.0


def named_share(answer: str, question: str) -> float:
    """The share of a question's content words that an answer names."""
    asked = stems(question)
    return len(stems(answer) & asked) / len(asked) if asked else 0.0


def repeats(words: Sequence[str]) -> bool:
    """Whether words repeat too often: one word, a short cycle, or whole passages."""
    if has_cycle(words):
        return True
    if len(words) < _MIN_WORDS:
        return False
    if Counter(words).most_common(1)[0][1] > _MAX_SHARE_OF_ONE_WORD * len(words):
        return True
    runs = [tuple(words[place : place + _RUN]) for place in range(len(words) - _RUN + 1)]
    return len(set(runs)) < _MIN_DISTINCT_RUNS * len(runs)


def has_cycle(words: Sequence[str]) -> bool:
    """Whether the same few words repeat more than four times in a row. Numbers may repeat, in sums for example."""
    for length in range(1, _MAX_CYCLE_WORDS + 1):
        same = 0
        for place in range(length, len(words)):
            same = same + 1 if words[place] == words[place - length] and not words[place].isdigit() else 0
            if same >= length * _MAX_REPEATS:
                return True
    return False


def is_garbled(answer: str, words: Sequence[str]) -> bool:
    """Whether much of the text is not writing: signs instead of letters, or letters that form no words."""
    visible = [char for char in answer if not char.isspace()]
    writing = sum(char.isalnum() for char in visible)
    # A formula may have as many signs as digits.
    if writing < _MIN_WRITING * len(visible) and not any(char.isdigit() for char in visible):
        return True
    if "\ufffd" in answer and answer.count("\ufffd") > 0.02 * len(visible):
        return True
    spelled = [word for word in words if len(word) > 1 and not word.isdigit() and not CJK.match(word)]
    return bool(spelled) and sum(map(is_no_word, spelled)) > _MAX_GARBLED * len(spelled)


def is_no_word(word: str) -> bool:
    """Whether a word is unpronounceable: too long, digits among letters, or only consonants."""
    if len(word) > _MAX_WORD_LETTERS:
        return True
    mixed = any(char.isdigit() for char in word) and len(word) > 4 and not word[0].isdigit()
    if not _LATIN.fullmatch(word):
        return mixed
    vowels = sum(char in "aeiouy" for char in word)
    return mixed or _NO_VOWEL.search(word) is not None or (len(word) > 3 and vowels == 0)


def is_echo(answer: str, question: str) -> bool:
    """Whether an answer has no content word that is not in the question."""
    words = stems(answer)
    return bool(words) and words <= stems(question)


def lacks_code(answer: str, question: str) -> bool:
    """Whether a question asks for code ("Write a Python function …") and the answer has no block of it."""
    return _CODE_FENCE not in answer and _ASKS_FOR_CODE.search(question) is not None


def is_other_language(answer: str) -> bool:
    """Whether an answer is long enough to be in English, and is not."""
    words = words_of(answer)
    return len(words) >= _MIN_WORDS_OF_LANGUAGE and sum(word in _ENGLISH for word in words) < _MIN_ENGLISH * len(words)
