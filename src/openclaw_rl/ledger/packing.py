"""Token ids and log-probs as bytes: four bytes each, little-endian, whatever machine wrote them. Messages as JSON."""

import json
import re
import sys
from array import array
from collections.abc import Sequence
from typing import Any

_HALF = re.compile("[\ud800-\udfff]")


def pack_json(value: Any) -> str:
    """JSON in as few bytes as can be read; half a character, which no file can hold, is escaped."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return _HALF.sub(lambda half: f"\\u{ord(half[0]):04x}", text)


def whole_text(text: str) -> str:
    """A text that a file can hold: half a character becomes a mark."""
    return _HALF.sub("\ufffd", text)


def pack_ids(ids: Sequence[int]) -> bytes:
    return _pack("i", ids)


def unpack_ids(data: bytes) -> list[int]:
    ids: list[int] = _unpack("i", data).tolist()
    return ids


def pack_floats(values: Sequence[float]) -> bytes:
    return _pack("f", values)


def unpack_floats(data: bytes) -> list[float]:
    values: list[float] = _unpack("f", data).tolist()
    return values


def pack_top(top: Sequence[Sequence[tuple[int, float]]]) -> bytes | None:
    """The k likeliest tokens at each position, for one k throughout; None where none were asked for."""
    if not top or not top[0]:
        return None
    ids = [id for position in top for id, _value in position]
    values = [value for position in top for _id, value in position]
    return pack_ids([len(top[0])]) + pack_ids(ids) + pack_floats(values)


def unpack_top(data: bytes | None) -> list[tuple[tuple[int, float], ...]]:
    if data is None:
        return []
    k = unpack_ids(data[:4])[0]
    half = 4 + (len(data) - 4) // 2
    pairs = list(zip(unpack_ids(data[4:half]), unpack_floats(data[half:]), strict=True))
    return [tuple(pairs[start : start + k]) for start in range(0, len(pairs), k)]


def pack_rows(rows: Sequence[Sequence[float]]) -> bytes | None:
    """Numbers at each position, as many at each; None where there are none."""
    if not rows or not rows[0]:
        return None
    return pack_ids([len(rows[0])]) + pack_floats([value for row in rows for value in row])


def unpack_rows(data: bytes | None) -> list[list[float]]:
    if data is None:
        return []
    k, values = unpack_ids(data[:4])[0], unpack_floats(data[4:])
    return [values[start : start + k] for start in range(0, len(values), k)]


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two sequences have in common from the start."""
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
