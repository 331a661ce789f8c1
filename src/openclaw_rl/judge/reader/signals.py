"""What the sentences of a message signal, one by one, before anything is concluded from them.

The signals of the phrase files, and what each says of the response:

- rejection: it was wrong; outburst: the same in the form of a question
- correction: what was wrong with it; change: what should be otherwise; statement: a bare fact, perhaps a better one
- wish: what should be otherwise about the form of the response (length, layout, tone, detail); a whole clause of it
- ask: how a wish is put ("could you"), which changes nothing about it
- reminder: what had been asked for, so that what else is said is no new wish
- praise, thanks; idiom: praise in negative words ("not bad"); sarcasm: praise that is none; negation: takes praise back
- trouble: words beside praise that may turn it into mockery
- moving_on: the next step; next: a request, which is the next step if contentment came before
- again: the request will be repeated
- tale: tells of oneself or others, which asks for nothing
- defer: will be thought about or tried, so nothing is known yet
- interrogative: a plain question, from which nothing follows
- back: points to the response ("it", "shorter"); fresh: asks for a new thing; own: speaks of something of the user's
- opposite: stands between what is right and what is not ("not", "instead of")
- contrast: "but"; mask: looks like a signal and is none; noise: changes nothing; lead: nothing for a hint

No signals of the files: "doubt" is praise with a negation in the same clause, "question" what is interrogative, and
"announcement" the next step with the question or the request itself behind it.
"""

import re
from dataclasses import dataclass, field

from openclaw_rl.judge.reader.lexicon import Lexicon
from openclaw_rl.judge.reader.phrasebook import CONTRAST

_IDIOM = "+"
#: Of a sentence; what has no end after that is no speech.
_LONGEST = 240
_COMMA = re.compile(r",(?=[^\s\d])|(?<=[^\d]),(?=\d)")
_SPACES = re.compile(r"\s{2,}")
_LEFT_OVER = re.compile(r"^[\s,.!?~]+(?=\w)|(?<=,)[\s,]+,")
_CLAUSE_MARK = re.compile(rf"[,:;{CONTRAST}]")


@dataclass(slots=True)
class Sentence:
    """One sentence and its signals: where in the sentence each was found first."""

    plain: str
    """As it is read; `start` and `end` say where it stands in the message."""
    start: int
    end: int
    asks: bool
    found: dict[str, int] = field(default_factory=dict)
    rest: str = ""
    """The sentence without what rejects or praises."""

    def has(self, *signals: str) -> bool:
        """Whether any of the signals was found."""
        return any(signal in self.found for signal in signals)


def read_sentence(plain: str, lexicon: Lexicon, span: tuple[int, int] = (0, 0)) -> Sentence:
    """Find the signals of a normalised sentence that stands at `span` of the message."""
    text = tidy(lexicon.blank("noise", _COMMA.sub(", ", plain[:_LONGEST]), by=""))
    sentence = Sentence(plain, *span, asks=plain.rstrip().endswith("?"))
    if lexicon.find("outburst", text):
        sentence.found["rejection"] = 0
        return sentence
    if question := lexicon.find("interrogative", text):
        # What comes before a question counts: "great, next: what is ...?"
        sentence.asks = True
        sentence.found["question"] = question.start()
        text = text[: question.start()]
    text = tidy(lexicon.blank("mask", text))
    if text.strip(" ~"):
        find_signals(sentence, text, lexicon)
    return sentence


def find_signals(sentence: Sentence, text: str, lexicon: Lexicon) -> None:
    """Find the signals of what is no plain question."""
    found = sentence.found
    text = tidy(lexicon.blank("contrast", lexicon.blank("idiom", text, by=_IDIOM), by=CONTRAST))
    for signal in ("sarcasm", "rejection", "moving_on", "thanks", "defer"):
        note(found, signal, text, lexicon)
    if "moving_on" in found and (sentence.asks or ":" in text):
        found["announcement"] = found["moving_on"]
    sentence.rest = lexicon.blank("rejection", text) if "rejection" in found else text
    # A question praises nothing, unless it comes after a comma.
    if not sentence.asks or "," in text:
        note_praise(found, sentence.rest, lexicon)
    # Praise is taken out, so that "exactly what I wanted" does not say what was wanted.
    if "praise" in found and "rejection" not in found:
        text = sentence.rest = lexicon.blank("praise", text, by=_IDIOM)
    for signal in ("trouble", "negation") if found.keys() & {"praise", "moving_on"} else ():
        note(found, signal, sentence.rest, lexicon)
    if "negation" in found:
        found["trouble"] = found.pop("negation")
    for signal in ("correction", "reminder", "change", "next", "statement", "tale"):
        note(found, signal, text, lexicon)
    drop_tales(found, text, lexicon)
    note_wish(found, tidy(lexicon.blank("ask", text, by="")), lexicon)
    if _IDIOM in text:
        found.setdefault("praise", text.index(_IDIOM))
    # "I thought it was wrong, but you are right": what comes last counts.
    if CONTRAST in text and _IDIOM not in text.rpartition(CONTRAST)[2]:
        found["contrast"] = text.index(CONTRAST)


def drop_tales(found: dict[str, int], text: str, lexicon: Lexicon) -> None:
    """Drop what is said of oneself: "my flat is too small" is no wish, "we have one, it's great" no praise."""
    signals = {"change", "correction", "praise"} & found.keys()
    if not signals or CONTRAST in text or "reminder" in found or "tale" not in found:
        return
    # "Wonderful, my class will love it": what is praised first is the response.
    if found.get("praise", _LONGEST) < found["tale"]:
        signals.discard("praise")
    for signal in signals:
        del found[signal]
    if "praise" in signals:
        found["doubt"] = 0


def note(found: dict[str, int], signal: str, text: str, lexicon: Lexicon) -> None:
    """Note where a signal is found, if it is."""
    if match := lexicon.find(signal, text):
        found[signal] = match.start()


def note_praise(found: dict[str, int], text: str, lexicon: Lexicon) -> None:
    """Note praise, or doubt if its clause has a negation beside it ("I don't think that's right")."""
    if not (match := lexicon.find("praise", text)):
        return
    before = _CLAUSE_MARK.split(text[: match.start()])[-1]
    after = _CLAUSE_MARK.split(text[match.end() :], maxsplit=1)[0]
    negated = lexicon.find("negation", before) or lexicon.find("negation", after)
    found["doubt" if negated else "praise"] = match.start()


def note_wish(found: dict[str, int], text: str, lexicon: Lexicon) -> None:
    """Note a wish, unless praise comes after it ("no lists, great") or a request before it, whose condition it is."""
    if not (match := lexicon.find("wish", text)) or _IDIOM in text[match.end() :]:
        return
    before = text[: match.start()].rstrip()
    requested = before and (lexicon.find("next", before) or lexicon.find("fresh", before))
    # "Great example": what is praised is not wished for.
    if not requested and not before.endswith(_IDIOM):
        found["wish"] = match.start()


def tidy(text: str) -> str:
    """Close the gaps that words leave when they are taken out."""
    return _SPACES.sub(" ", _LEFT_OVER.sub("", text)).strip()
