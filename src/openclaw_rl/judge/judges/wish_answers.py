"""What a judge says about a user's wishes: how it is read, and what of it is believed.

The words of users are shown to a model, and words of others may be beside them. So a wish is believed only if it comes
from what the user said: not from a tool's result, nor from what the user quotes or pastes. Instructions are in the
user's language, whatever it is.
"""

import json
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from operator import attrgetter
from typing import Any

from openclaw_rl.judge.judges.base import Case, Said, UserWords
from openclaw_rl.judge.rules.grammar import all_grammars, grammars_for
from openclaw_rl.judge.rules.phrases import QUOTATION, mask_quotations, normalise
from openclaw_rl.judge.rules.wishes import MOST_WISHES, is_unsafe, topic_of
from openclaw_rl.types import HeardWishes, Note, Wish, scope_stems

#: Characters of an instruction, and of a scope.
MAX_INSTRUCTION, MAX_SCOPE = 200, 90
#: Places of an answer in which wishes may be, and braces before each that may begin the object.
MAX_MARKS, MAX_BRACES = 8, 8
#: Words of a topic that the rules do not name. A judge says itself which wishes its wish replaces.
MAX_TOPIC_WORDS = 6
#: Two votes have the same wish if they share this part of the words of the shorter one.
SAME_SHARE = 0.6
#: Words were said if the user's words have this part of them.
COPIED_SHARE = 0.8
#: Letters of a word that are compared, because languages inflect words.
STEM_LETTERS = 4
_UNSEEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
_SIGNS = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]+|[^\W_\u3040-\u30ff\u3400-\u9fff]+")
_WITHOUT_SPACES = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]")
_HIRAGANA = re.compile(r"[\u3040-\u309f]+")
#: The Arabic article, and what is written together with it.
_ARTICLE = re.compile(r"^[\u0648\u0641\u0628\u0643]?\u0627\u0644(?=..)")
_WISHES_KEY = re.compile(r'"wishes"\s*:')
_CAPITALS = re.compile(r"\b[A-Z]{2,}\b")
_NUMBER = re.compile(r"\d{1,3}")
#: Words of a scope that say that there is none.
_ALWAYS = frozenset({"always", "all", "any", "every", "everything", "none", "immer", "sempre", "siempre", "toujours"})
#: Words that an instruction may have whatever was said.
_PLAIN_WORDS = frozenset(
    {"user", "users", "answer", "answers", "response", "responses", "always", "never", "when", "asks", "give", "write"}
    | {"nutzer", "nutzerin", "antworten", "usuario", "usuaria", "resposta", "respuesta", "utilisateur", "reponse"}
)


def find_wishes(answer: str) -> tuple[dict[str, Any] | None, int, int]:
    """The last object with wishes in an answer, and where it begins and ends; None if there is none."""
    for mark in [match.start() for match in _WISHES_KEY.finditer(answer)][: -MAX_MARKS - 1 : -1]:
        start = mark
        for _ in range(MAX_BRACES):
            start = answer.rfind("{", 0, start)
            if start < 0:
                break
            with suppress(ValueError, RecursionError):
                value, end = json.JSONDecoder().raw_decode(answer, start)
                if isinstance(value, dict) and isinstance(value.get("wishes"), list):
                    return value, start, end
    return None, 0, 0


def read_votes(answers: Sequence[str], case: Case) -> HeardWishes | None:
    """The wishes that most answers of a model have; None if none can be read."""
    assert case.user is not None
    objects = [found for found, _, _ in map(find_wishes, answers) if found is not None]
    votes = [vote for found in objects if (vote := read_object(found, case.user, case)) is not None]
    if not votes:
        return None
    some = [vote for vote in votes if vote.asked or vote.replied]
    chosen = some[0] if 2 * len(some) > len(votes) else HeardWishes()
    agreed = [agreed_on(attrgetter(kind), votes) for kind in ("asked", "replied")]
    if any(agreed):
        chosen = HeardWishes(asked=agreed[0], replied=agreed[1])
    wanted = [vote.wanted for vote in votes if vote.wanted]
    return replace(chosen, wanted=wanted[0] if 2 * len(wanted) > len(votes) else "")


def agreed_on(kind: Callable[[HeardWishes], Sequence[Wish]], votes: Sequence[HeardWishes]) -> tuple[Wish, ...]:
    """The wishes that more than half of the votes have, in the words of the first vote that has each."""
    agreed: list[Wish] = []
    for wish in (wish for vote in votes for wish in kind(vote)):
        having = sum(any(is_same(wish, other) for other in kind(vote)) for vote in votes)
        if 2 * having > len(votes) and not any(is_same(wish, other) for other in agreed):
            agreed.append(wish)
    return tuple(agreed[:MOST_WISHES])


def is_same(one: Wish, other: Wish) -> bool:
    """Whether two votes have the same wish."""
    if not one.instruction or not other.instruction:
        return not one.instruction and not other.instruction and bool(one.instead_of & other.instead_of)
    mine, others = content(one.instruction), content(other.instruction)
    fewest = min(len(mine), len(others))
    return one.replaces(other) or bool(fewest and len(mine & others) >= SAME_SHARE * fewest)


def read_object(found: Mapping[str, Any], user: UserWords, case: Case | None = None) -> HeardWishes | None:
    """The lasting wishes of one answer that are believed; None if it is not an answer.

    With `case`, they must come from the user's words.
    """
    asked: list[Wish] = []
    replied: list[Wish] = []
    listed = [{"instruction": item} if isinstance(item, str) else item for item in found["wishes"]]
    given = [item for item in listed if isinstance(item, dict) and isinstance(item.get("instruction"), str)]
    if len(listed) > MOST_WISHES or (listed and not given):
        return None
    for item in given:
        wish = read_wish(item, user.notes) if is_lasting(item.get("once")) else None
        source = source_of(item, wish, user, case) if wish else None
        if wish and source:
            (asked if source.opening else replied).append(replace(wish, said=source.when))
    wanted = found.get("wanted")
    wanted = wanted.strip() if isinstance(wanted, str) else ""
    # It may be quoted or pasted: it is an answer, and no wish.
    written = any(" ".join(wanted.split()) in " ".join(said.text.split()) for said in user.said if not said.opening)
    return HeardWishes(tuple(replied), wanted if written and not is_unsafe(wanted) else "", asked=tuple(asked))


def is_lasting(once: Any) -> bool:
    return not once or (isinstance(once, str) and once.strip().casefold() in ("false", "no", "0"))


def read_wish(given: Mapping[str, Any], notes: Sequence[Note]) -> Wish | None:
    """A wish as a judge wrote it; None if it is not plain, too long, or would change whom the model obeys."""
    scope = given.get("scope") or ""
    scope = " ".join(scope) if isinstance(scope, list) and all(isinstance(one, str) for one in scope) else scope
    if not isinstance(scope, str):
        return None
    instruction, scope = one_plain_line(given["instruction"]), one_plain_line(scope).rstrip(".,;:")
    if len(instruction) > MAX_INSTRUCTION or len(scope) > MAX_SCOPE or is_unsafe(instruction) or is_unsafe(scope):
        return None
    instead_of = frozenset(named_notes(given.get("replaces"), notes))
    if not instruction:
        return Wish("", "", lasting=True, instead_of=instead_of) if instead_of else None
    words = scope_words(scope)
    if words and not any(stem in instruction.casefold() for stem in scope_stems(words)):
        instruction = f"{scope}: {instruction}"
    return Wish(sentence(instruction), subject(instruction), lasting=True, scope=words, instead_of=instead_of)


def one_plain_line(text: str) -> str:
    """A text in one line, without signs that cannot be seen."""
    line = " ".join(text.split())
    return "".join(sign for sign in line if unicodedata.category(sign) not in _UNSEEN).strip()


def sentence(instruction: str) -> str:
    stop = "\u3002" if _WITHOUT_SPACES.match(instruction[-1]) else "."
    ends = instruction[-1] in ".!?\u3002\uff01\uff1f\u061f\"'\u300d\u201d)"
    return instruction[0].upper() + instruction[1:] + ("" if ends else stop)


def scope_words(scope: str) -> str:
    """The words of a scope that requests may have; empty if it is for all."""
    told = (word for word in re.findall(r"\w+", scope) if len(word) > 1)
    return " ".join(word for word in told if normalise(word) not in noise() and word.casefold() not in _ALWAYS)


def subject(instruction: str) -> str:
    """What an instruction is about: a topic that the rules name, or else its words."""
    normalised = normalise(instruction)
    topics = [topic for grammar in grammars_for(normalised)[:1] for topic in grammar.topics]
    # "Add a short summary." has a word of length, and is not about the length of answers.
    named = (name for when, name in topics if name != "length" and when.search(normalised))
    words = [word for word in _SIGNS.findall(normalised) if word not in noise()]
    return topic_of(instruction) or next(named, "") or " ".join(words[:MAX_TOPIC_WORDS]) or "other"


def named_notes(replaces: Any, notes: Sequence[Note]) -> Iterator[int]:
    """The numbers of the notes that a judge names, by their places in the list that it was shown, or by their words."""
    for name in replaces if isinstance(replaces, list) else [replaces]:
        if isinstance(name, str) and not _NUMBER.fullmatch(name.strip()):
            words = content(name)
            yield from (
                note.number
                for note in notes
                if name == note.topic or (words and len(words & content(note.text)) >= SAME_SHARE * len(words))
            )
        elif isinstance(name, str | int) and not isinstance(name, bool) and 1 <= int(name) <= len(notes):
            yield notes[int(name) - 1].number


def source_of(given: Mapping[str, Any], wish: Wish, user: UserWords, case: Case | None) -> Said | None:
    """Where the user said a wish: what came last counts; None if it does not come from the user's words."""
    latest = list(reversed(user.said))
    if case is None:
        return latest[0]
    quoted = one_plain_line(said) if isinstance(said := given.get("said"), str) else ""
    if quoted:
        latest = [said for said in latest if was_said(quoted, said.own)]
    taken_back = [] if wish.instruction else [note.text for note in user.notes if note.number in wish.instead_of]
    told = " ".join([wish.instruction, wish.scope, *taken_back])
    # "Be short." has small words only.
    skipped = noise() if content(told) else _PLAIN_WORDS
    about = content(told, skipped)
    for said in latest:
        if about & content(mask_quotations(said.own), skipped):
            return said
    from_others = 2 * len(about & content(user.others, skipped)) >= max(1, len(about))
    if from_others or not (quoted or about & content(f"{case.request}\n{case.response}", skipped)):
        return None
    return latest[0] if latest else None


def was_said(quoted: str, own: str) -> bool:
    """Whether words are in what somebody said, and not only in what they quote there."""
    words, said = " ".join(normalise(quoted).split()).strip(" .!?"), " ".join(normalise(own).split())
    outside = mask_quotations(own)
    if words in said and (words in " ".join(normalise(outside).split()) or QUOTATION.search(quoted) is not None):
        return True
    # A model may leave words out.
    told = content(quoted)
    return bool(told) and len(told & content(outside)) >= COPIED_SHARE * len(told)


def content(text: str, skipped: frozenset[str] | None = None) -> frozenset[str]:
    """What can be compared of the words of a text in any language: their beginnings, or pairs of signs.

    Words that are `skipped`, by default those that say nothing, are left out.
    """
    skipped = noise() if skipped is None else skipped
    # An abbreviation says something, although "tldr" may be a small word.
    found: set[str] = {word.casefold() for word in _CAPITALS.findall(text)}
    for word in _SIGNS.findall(normalise(text)):
        if _WITHOUT_SPACES.match(word):
            # Hiragana alone is mostly grammar.
            pairs = (word[place : place + 2] for place in range(len(word) - 1))
            found |= {pair for pair in pairs if not _HIRAGANA.fullmatch(pair)}
        elif word not in skipped and len(word) > 1:
            found.add(_ARTICLE.sub("", word)[:STEM_LETTERS])
    return frozenset(found)


@cache
def noise() -> frozenset[str]:
    """Words that say nothing about what a wish is about."""
    return _PLAIN_WORDS.union(*(grammar.topic_noise for grammar in all_grammars()))
