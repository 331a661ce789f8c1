"""Token ids and log-probs as bytes: four bytes each, little-endian on every machine. Messages as JSON.

Disks damage what they store. What cannot be unpacked raises ValueError, TypeError or LookupError, or DamagedTurn inside
`damage`. A turn's tokens are stored as what they add to those of an earlier turn.
"""

import contextlib
import json
import re
import sqlite3
import sys
from array import array
from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import Any, TypeVar

import numpy as np

from openclaw_rl.ledger.errors import DamagedTurn, UnknownTurn
from openclaw_rl.types import Numbers, TopTokens

Member = TypeVar("Member", bound=StrEnum)
Default = TypeVar("Default")
_HALF = re.compile("[\ud800-\udfff]")


@contextlib.contextmanager
def damage(turn: int) -> Iterator[None]:
    """Raise DamagedTurn where the record of a turn, which is unpacked inside, is not what was written."""
    try:
        yield
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        raise DamagedTurn(turn, f"what is stored of it cannot be read ({error})") from error


def pack_json(value: Any) -> str:
    """Compact JSON. A lone surrogate, which UTF-8 cannot encode, is escaped."""
    text = _ENCODER.encode(value)
    try:
        text.encode()
    except UnicodeEncodeError:
        return _HALF.sub(lambda half: f"\\u{ord(half[0]):04x}", text)
    return text


class DamagedText(str):
    """Text whose bytes were no UTF-8. They are replaced, so that it can be shown; it cannot be unpacked."""


def read_text(data: bytes) -> str:
    """The text of a column."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return DamagedText(data.decode(errors="replace"))


def unpack_json(text: str) -> Any:
    if isinstance(text, DamagedText):
        raise ValueError("it is no UTF-8")
    return json.loads(text)


def unpack_object(text: str | None) -> dict[str, Any]:
    """A JSON object; empty for None."""
    value = unpack_json(text) if text is not None else {}
    if not isinstance(value, dict):
        raise ValueError("it is no JSON object")
    return value


def unpack_message(text: str) -> dict[str, Any]:
    return _checked(unpack_json(text))


def unpack_messages(text: str | None) -> list[dict[str, Any]] | None:
    """A list of messages; None for None."""
    return None if text is None else [_checked(message) for message in unpack_json(text)]


def _checked(message: Any) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError("it is no message")
    return message


def known(kind: type[Member], value: Any, otherwise: Default) -> Member | Default:
    """A member of an enumeration; `otherwise` where a list must not end because one row is damaged."""
    try:
        return kind(value)
    except ValueError:
        return otherwise


def _listed(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")


_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=_listed)


def whole_text(text: str) -> str:
    """A text that UTF-8 can encode: a lone surrogate becomes a replacement character."""
    return _HALF.sub("\ufffd", text)


def pack_ids(ids: Sequence[int]) -> bytes:
    return _pack("i", ids)


def unpack_ids(data: bytes) -> list[int]:
    ids: list[int] = _unpack("i", data).tolist()
    if ids and min(ids) < 0:
        raise ValueError("a token is negative")
    return ids


def pack_floats(values: Sequence[float]) -> bytes:
    return _pack("f", values)


def unpack_floats(data: bytes) -> list[float]:
    values: list[float] = _unpack("f", data).tolist()
    return values


def pack_flags(flags: Sequence[bool]) -> bytes | None:
    """One bit for each flag; None if none is set."""
    return np.packbits(np.array(flags, np.bool_)).tobytes() if any(flags) else None


def unpack_flags(data: bytes | None, count: int) -> list[bool]:
    """The first `count` flags; empty if none was set."""
    if data is None:
        return []
    flags: list[bool] = np.unpackbits(np.frombuffer(data, np.uint8), count=count).astype(np.bool_).tolist()
    return flags


def pack_top(top: TopTokens | None) -> bytes | None:
    """The k likeliest tokens at each position; None where none were recorded."""
    if top is None:
        return None
    return pack_ids([top.ids.shape[1]]) + top.ids.astype("<i4").tobytes() + top.logprobs.astype("<f4").tobytes()


def unpack_top(data: bytes | None) -> TopTokens | None:
    if data is None:
        return None
    half = 4 + (len(data) - 4) // 2
    ids, logprobs = np.frombuffer(data[4:half], "<i4"), np.frombuffer(data[half:], "<f4")
    k = unpack_ids(data[:4])[0]
    return TopTokens(ids.reshape(-1, k), logprobs.reshape(-1, k))


def pack_table(table: Numbers | None) -> bytes | None:
    """The same count of numbers at each position; None where there are none."""
    return None if table is None else pack_ids([table.shape[1]]) + table.astype("<f4").tobytes()


def unpack_table(data: bytes | None) -> Numbers | None:
    return None if data is None else np.frombuffer(data[4:], "<f4").reshape(-1, unpack_ids(data[:4])[0])


def common_prefix(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many items, such as tokens, two sequences have in common from the start."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _pack(kind: str, values: Sequence[float]) -> bytes:
    packed = array(kind, values)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _unpack(kind: str, data: bytes) -> Any:
    values: Any = array(kind)
    values.frombytes(data)
    if sys.byteorder == "big":
        values.byteswap()
    return values


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


def responses(db: sqlite3.Connection, turn: int) -> list[list[int]]:
    """The responses of a turn and of those that it continues, the latest first. Raises UnknownTurn and DamagedTurn."""
    rows = db.execute(
        "WITH RECURSIVE line (number, parent, response, depth) AS ("
        " SELECT number, parent, response, 0 FROM turns WHERE number = ?"
        " UNION ALL SELECT t.number, t.parent, t.response, line.depth + 1"
        " FROM turns t JOIN line ON t.number = line.parent AND t.number < line.number)"
        " SELECT response FROM line ORDER BY depth",
        (turn,),
    ).fetchall()
    if not rows:
        raise UnknownTurn(f"there is no turn {turn}")
    with damage(turn):
        return [unpack_ids(row["response"]) for row in rows]
