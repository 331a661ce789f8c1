"""Finds the numbers in a text, in digits and in words."""

import re

from openclaw_rl.judge.reader.text import normalise

_DIGITS = re.compile(r"\d+(?:[.,:]\d+)*")
_LETTERS = re.compile(r"[^\W\d_]+")
_HAN_COUNT = re.compile(r"[两二三四五六七八九十]+(?=[个個位人张張本条條次天年月日点點份句段页頁号號岁歲只间間道])")
#: Number words from 2 to 12. "One" is also an article or a pronoun.
_WORDS = {
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
_HAN = {"两": "2", "二": "2", "三": "3", "四": "4", "五": "5", "六": "6", "七": "7", "八": "8", "九": "9", "十": "10"}


def numbers(text: str) -> set[str]:
    """The numbers of a text, as digits."""
    digits = set(_DIGITS.findall(text))
    words = {_WORDS[word] for word in _LETTERS.findall(normalise(text)) if word in _WORDS}
    return digits | words | {_HAN[count] for count in _HAN_COUNT.findall(text) if count in _HAN}
