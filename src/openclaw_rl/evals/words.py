"""The words of a text and their stems, in several languages, from endings and lists of common words alone."""

import re
import unicodedata
from itertools import pairwise

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
_SMALL_WORDS = frozenset(_SMALL_WORD_LIST.split())
#: Chinese and Japanese characters without content.
_SMALL_CHARACTERS = frozenset(
    "的了是在我你他她它们这那有和就不也都要会可以吗呢吧啊个一为什么怎请把被让对从到与及のはがをにでとも"
)


def words_of(text: str) -> list[str]:
    """The words of a text in lower case without accents. A character of a script without spaces is a word."""
    plain = _ACCENT.sub("", unicodedata.normalize("NFKD", _APOSTROPHE.sub("", text)))
    return _TOKEN.findall(unicodedata.normalize("NFC", plain).casefold())


def stems(text: str) -> frozenset[str]:
    """The content of a text: its content words without endings, its numbers, and pairs of characters."""
    words = words_of(text)
    characters = [word if CJK.match(word) and word not in _SMALL_CHARACTERS else "" for word in words]
    pairs = {one + other for one, other in pairwise(characters) if one and other}
    spaced = {stem(word) for word in words if word not in _SMALL_WORDS and not CJK.match(word)}
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
