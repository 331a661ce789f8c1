"""The tokens of turns. A turn is stored as what it adds to the tokens of an earlier one."""

import sqlite3

from openclaw_rl.ledger.errors import UnknownTurn, damage
from openclaw_rl.ledger.packing import unpack_ids


def sequence(db: sqlite3.Connection, turn: int) -> tuple[list[int], int]:
    """A turn's tokens, prompt and response in one list, and the length of the prompt.

    Raises UnknownTurn and DamagedTurn.
    """
    packed, prompt_length = packed_sequence(db, turn)
    with damage(turn):
        return unpack_ids(packed), prompt_length


def packed_sequence(db: sqlite3.Connection, turn: int) -> tuple[bytes, int]:
    """The same, as the bytes that are stored.

    Raises UnknownTurn and DamagedTurn.
    """
    rows = db.execute(
        "WITH RECURSIVE line (number, base, keep, added, response, prompt_length, depth) AS ("
        " SELECT number, base, keep, added, response, prompt_length, 0 FROM turns WHERE number = ?"
        " UNION ALL SELECT t.number, t.base, t.keep, t.added, t.response, t.prompt_length, line.depth + 1"
        " FROM turns t JOIN line ON t.number = line.base AND t.number < line.number)"
        " SELECT base, keep, added, response, prompt_length FROM line ORDER BY depth DESC",
        (turn,),
    ).fetchall()
    if not rows:
        raise UnknownTurn(f"there is no turn {turn}")
    tokens = b""
    with damage(turn):
        if rows[0]["base"] is not None:
            raise ValueError("an earlier turn is missing")
        for row in rows:
            prompt = tokens[: 4 * row["keep"]] + row["added"]
            if len(prompt) != 4 * row["prompt_length"]:
                raise ValueError("tokens are missing")
            tokens = prompt + row["response"]
        return tokens, int(rows[-1]["prompt_length"])


def sequence_without_notes(db: sqlite3.Connection, turn: int) -> list[int]:
    """A turn's tokens, prompt and response, as they are without notes in the prompt. Raises UnknownTurn."""
    tokens, prompt_length = sequence(db, turn)
    plain = prompt_without_notes(db, turn, tokens[:prompt_length])
    return tokens if plain is None else [*plain, *tokens[prompt_length:]]


def prompt_without_notes(db: sqlite3.Connection, turn: int, prompt: list[int]) -> list[int] | None:
    """A turn's prompt without notes; None if its prompt has none."""
    row = db.execute("SELECT * FROM prompts_without_notes WHERE turn = ?", (turn,)).fetchone()
    if row is None:
        return None
    with damage(turn):
        return [*prompt[: row["start"]], *unpack_ids(row["added"]), *prompt[row["stop"] :]]


def response(db: sqlite3.Connection, turn: int) -> list[int]:
    """The tokens of a turn's response. Raises UnknownTurn and DamagedTurn."""
    row = db.execute("SELECT response FROM turns WHERE number = ?", (turn,)).fetchone()
    if row is None:
        raise UnknownTurn(f"there is no turn {turn}")
    with damage(turn):
        return unpack_ids(row["response"])


def earlier_responses(db: sqlite3.Connection, turn: int) -> list[list[int]]:
    """The responses of the turns that a turn continues, the latest first."""
    rows = db.execute(
        "WITH RECURSIVE line (number, parent, response, depth) AS ("
        " SELECT number, parent, response, 0 FROM turns WHERE number = ?"
        " UNION ALL SELECT t.number, t.parent, t.response, line.depth + 1"
        " FROM turns t JOIN line ON t.number = line.parent AND t.number < line.number)"
        " SELECT response FROM line WHERE depth > 0 ORDER BY depth",
        (turn,),
    )
    with damage(turn):
        return [unpack_ids(row["response"]) for row in rows]
