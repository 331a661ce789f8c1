"""Finds the signals in each sentence of a message. `conclusions.py` draws conclusions from them.

The signals of the phrase files, and what each says about the response:

- rejection: it was wrong; outburst: the same in the form of a question
- correction: what was wrong with it; change: what should be otherwise; statement: a bare fact, perhaps a better one
- wish: what should be otherwise about the form of the response (length, layout, tone, detail); a whole clause of it
- ask: words that only introduce a wish ("could you")
- reminder: repeats what had been asked for, so the rest is not a new wish
- confirmed: the user tried it and it works
- praise, thanks; idiom: praise in negative words ("not bad"); sarcasm: praise that is not meant; negation
- harm: damage that the response did, which turns praise beside it into mockery; exaggeration does the same
- mockery: words that mock, whatever is beside them; tag: makes a claim a question ("right?")
- loss: something is gone, which is harm unless the request asked for that; removal: such a request
- name_asked, number_asked: a question for a name or a number; names_it: a message that only gives a name
- demand: says that what follows is wanted, so words of praise after it are none
- further: asks for another thing, which is the next step if contentment came before
- trouble: words beside praise that may turn it into mockery
- moving_on: the next step; next: a request, which is the next step if contentment came before
- again: the request will be repeated
- tale: the user talks about themselves or others, which asks for nothing
- defer: the user will think about it or try it, so nothing is known yet
- interrogative: a plain question, which says nothing about the response
- back: points to the response ("it", "shorter"); fresh: asks for a new thing; own: speaks of something of the user's
- opposite: stands between what is right and what is not ("not", "instead of")
- closing: the user ends the conversation, so thanks are courtesy
- material: asks for work on a text that the message brings; letter: such a text; injected: words for a judge
- dictation: asks to send or note the words after a colon ("Reply to him: ...")
- refers: refers to the response without naming it
- contrast: "but"; mask: looks like a signal but is none; noise: changes nothing; lead: not part of a hint

Four signals are derived: "doubt" is praise with a negation in the same clause, "exclamation" is praise that is a clause
of a word or two, "question" is an interrogative, and "announcement" is the next step together with its question or
request.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from openclaw_rl.judge.reader.lexicon import Lexicon
from openclaw_rl.judge.reader.phrasebook import CONTRAST

_IDIOM = "+"
#: Characters of a sentence that are read.
_MAX_CHARACTERS = 240
#: Words of praise that can be a mere exclamation: "Great", "Well done".
_LONGEST_EXCLAMATION = 2
_COMMA = re.compile(r",(?=[^\s\d])|(?<=[^\d]),(?=\d)")
_SPACES = re.compile(r"\s{2,}")
_LEFT_OVER = re.compile(r"^[\s,.!?~]+(?=\w)|(?<=,)[\s,]+,")
_CLAUSE_MARK = re.compile(rf"[,:;.!{CONTRAST}]")


@dataclass(slots=True)
class Sentence:
    """One sentence, and the first position of each signal in it."""

    plain: str
    """The normalised text. `start` and `end` are its position in the message."""
    start: int
    end: int
    asks: bool
    found: dict[str, int] = field(default_factory=dict)
    rest: str = ""
    """The sentence without the phrases that reject or praise."""
    apart: Sequence[str] = ()
    """Its clauses without praise or thanks, after one with them; all clauses if none has them."""

    def has(self, *signals: str) -> bool:
        """Whether any of the signals was found."""
        return any(signal in self.found for signal in signals)


def read_sentence(plain: str, lexicon: Lexicon, span: tuple[int, int] = (0, 0)) -> Sentence:
    """Find the signals of a normalised sentence at `span` of the message."""
    text = _COMMA.sub(", ", plain[:_MAX_CHARACTERS])
    sentence = Sentence(plain, *span, asks=plain.rstrip().endswith("?"))
    if lexicon.find("mockery", text):
        sentence.found.update(harm=0, sarcasm=0)
        return sentence
    note(sentence.found, "sarcasm", text, lexicon)
    note(sentence.found, "closing", text, lexicon)
    text = tidy(lexicon.blank("noise", lexicon.blank("closing", text), by=""))
    if lexicon.find("outburst", text):
        sentence.found["rejection"] = 0
        return sentence
    if (question := lexicon.find("interrogative", text)) and not is_praise(text, question.start(), lexicon):
        # The words before a question count: "great, next: what is ...?"
        sentence.asks = True
        sentence.found["question"] = question.start()
        text = text[: question.start()]
    text = tidy(lexicon.blank("mask", text))
    if text.strip(" ~"):
        find_signals(sentence, text, lexicon)
    return sentence


def is_praise(text: str, place: int, lexicon: Lexicon) -> bool:
    """Whether what begins like a question is praise: "What a lovely idea!"."""
    praise = None if text.rstrip().endswith("?") else lexicon.find("praise", text)
    return praise is not None and praise.start() == place


def find_signals(sentence: Sentence, text: str, lexicon: Lexicon) -> None:
    """Find the signals of a text without its plain question."""
    found = sentence.found
    note(found, "exaggeration", text, lexicon)
    text = tidy(lexicon.blank("contrast", lexicon.blank("idiom", text, by=_IDIOM), by=CONTRAST))
    for signal in ("sarcasm", "harm", "loss", "rejection", "moving_on", "thanks", "defer", "further", "confirmed"):
        note(found, signal, text, lexicon)
    if "exaggeration" in found:
        found.setdefault("harm", found.pop("exaggeration"))
    if "moving_on" in found and (sentence.asks or ":" in text):
        found["announcement"] = found["moving_on"]
    sentence.rest = lexicon.blank("rejection", text) if "rejection" in found else text
    # A question contains no praise, except before a comma.
    if not sentence.asks or "," in text:
        note_praise(found, sentence.rest, lexicon)
    # Praise is removed, so that "exactly what I wanted" is not read as a wish.
    if "praise" in found and "rejection" not in found:
        text = sentence.rest = lexicon.blank("praise", text, by=_IDIOM)
    clauses = _CLAUSE_MARK.split(lexicon.blank("thanks", sentence.rest, by=_IDIOM))
    first = next((n for n, clause in enumerate(clauses) if _IDIOM in clause), 0)
    sentence.apart = [clause for clause in clauses[first:] if _IDIOM not in clause]
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
    # "I thought it was wrong, but you are right": the last part counts.
    if CONTRAST in text:
        last = text.rpartition(CONTRAST)[2]
        if _IDIOM in last:
            sentence.rest = last
        else:
            found["contrast"] = text.index(CONTRAST)


def drop_tales(found: dict[str, int], text: str, lexicon: Lexicon) -> None:
    """Drop signals in a tale: "my flat is too small" is not a wish, "we have one, it's great" is not praise."""
    signals = {"change", "correction", "praise"} & found.keys()
    if not signals or CONTRAST in text or "reminder" in found or "tale" not in found:
        return
    # "Wonderful, my class will love it": praise before the tale is about the response.
    if 0 <= text.find(_IDIOM) < found["tale"]:
        signals.discard("praise")
    # "We're four people, you planned for two", "That's for Windows, I'm on Linux": another clause is a claim.
    claim = found.get("correction", found["tale"])
    if claim < found["tale"] or text[:claim].rstrip().endswith(","):
        signals.discard("correction")
    for signal in signals:
        del found[signal]
    if "praise" in signals:
        found["doubt"] = 0


def note(found: dict[str, int], signal: str, text: str, lexicon: Lexicon) -> None:
    """Note the position of a signal, if it is in the text."""
    if match := lexicon.find(signal, text):
        found[signal] = match.start()


def note_praise(found: dict[str, int], text: str, lexicon: Lexicon) -> None:
    """Note praise, or doubt if its clause has a negation beside it ("I don't think that's right")."""
    if not (match := lexicon.find("praise", text)):
        return
    before = _CLAUSE_MARK.split(text[: match.start()])[-1]
    # "Play Bravo": the word is the object of a request.
    if before.strip() and (request := lexicon.find("next", before.lstrip())) and request.start() == 0:
        return
    # "It should run without errors" demands what it names.
    if lexicon.find("demand", before):
        return
    after = _CLAUSE_MARK.split(text[match.end() :], maxsplit=1)[0]
    negated = lexicon.find("negation", before) or lexicon.find("negation", after)
    found["doubt" if negated else "praise"] = match.start()
    if not before and not after.strip() and len(match.group().split()) <= _LONGEST_EXCLAMATION:
        found["exclamation"] = 0


def note_wish(found: dict[str, int], text: str, lexicon: Lexicon) -> None:
    """Note a wish, unless praise comes after it ("no lists, great") or a request before it, whose condition it is."""
    if not (match := lexicon.find("wish", text)) or _IDIOM in text[match.end() :]:
        return
    before = text[: match.start()].rstrip()
    requested = before and (lexicon.find("next", before) or lexicon.find("fresh", before))
    # "Great example": a wish right after praise is none.
    if not requested and not before.endswith(_IDIOM):
        found["wish"] = match.start()


def tidy(text: str) -> str:
    """Close the gaps that removed words leave."""
    return _SPACES.sub(" ", _LEFT_OVER.sub("", text)).strip()
