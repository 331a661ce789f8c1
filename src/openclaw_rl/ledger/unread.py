"""What people say that the judge's rules do not understand."""

import json
import sqlite3
from collections import defaultdict

from openclaw_rl.rendering.clients import message_words
from openclaw_rl.types import UNREAD, Source

#: Judged turns that are looked at, the newest first.
_TURNS = 100
#: A person's last messages that count, and the fewest that say anything about how that person is understood.
_WINDOW, _LEAST = 20, 6
#: A larger share of messages that were not understood is reported.
_MOST_UNREAD = 0.5
_EXAMPLES = 2
#: Characters of an example.
_MAX_CHARACTERS = 60
#: Plain questions are no feedback, so the rules need not understand them.
_QUESTION_MARKS = ("?", "\uff1f")
#: Verdicts of these sources do not depend on what the next message says.
_OTHER_SOURCES = (Source.ENVIRONMENT, Source.EXPLICIT)


def unread_words(db: sqlite3.Connection) -> str:
    """A sentence with examples if the rules did not understand most of what somebody said; otherwise empty."""
    messages: dict[str, list[tuple[str, bool]]] = defaultdict(list)
    rows = db.execute(
        "SELECT s.owner, t.next_state, (v.score IS NULL AND instr(v.reason, ?)) AS unread "
        "FROM verdicts v JOIN turns t ON t.number = v.turn "
        "JOIN sessions s ON s.number = t.session WHERE v.source IS NOT ? AND v.source IS NOT ? "
        "AND t.next_state IS NOT NULL ORDER BY v.number DESC LIMIT ?",
        (UNREAD, *_OTHER_SOURCES, _TURNS),
    )
    for row in rows:
        said = words_of(row["next_state"])
        if said and not said.endswith(_QUESTION_MARKS):
            messages[row["owner"]].append((said, bool(row["unread"])))
    for owner, all_said in messages.items():
        last = all_said[:_WINDOW]
        unread = [said for said, not_understood in last if not_understood]
        if len(last) >= _LEAST and len(unread) > _MOST_UNREAD * len(last):
            who = f" of {owner}" if owner and len(messages) > 1 else ""
            shown = " and ".join(f'"{shorten(said)}"' for said in list(dict.fromkeys(unread))[:_EXAMPLES])
            return (
                f"The rules did not understand {len(unread)} of the last {len(last)} messages{who} that are no "
                f'questions, for example {shown}. Say plainly what you want of answers ("shorter, please"), give '
                "feedback (POST /v1/feedback), or let a language model judge (--judge-base-url)."
            )
    return ""


def words_of(next_state: str) -> str:
    """What the user wrote in the messages that came next."""
    texts = (message_words(message) for message in json.loads(next_state) if message.get("role") == "user")
    return " ".join(" ".join(texts).split())


def shorten(said: str) -> str:
    return said if len(said) <= _MAX_CHARACTERS else f"{said[: _MAX_CHARACTERS - 1].rstrip()}…"
