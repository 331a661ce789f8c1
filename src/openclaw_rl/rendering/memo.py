"""Remembers what was derived from texts, messages and turns: a conversation comes again with each of its requests."""

import sys
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import wraps
from typing import Any, Generic, TypeVar

from pydantic_core import to_json

#: What an entry takes besides its key and its value.
ENTRY_BYTES = 200
#: A list has a pointer for each id.
ID_BYTES = 8
#: No vocabulary has as many tokens. Without a bound, ids that clients make up would fill the memory.
MAX_SHARED_ID = 1 << 20
_SHARED_IDS: dict[int, int] = {}

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")
Json = TypeVar("Json", bound=Mapping[str, Any] | Sequence[Any])


class Memo(Generic[Key, Value]):
    """Values by key, bounded by the memory that they take. None is no value.

    - What was used lately stays: entries are forgotten that were not used while half of the memory was filled anew.
    - Threads may share it. A look-up takes no lock.
    """

    def __init__(self, max_bytes: int, size: Callable[[Key, Value], int]) -> None:
        self._half = max_bytes // 2
        self._size = size
        self._lock = threading.Lock()
        self._new: dict[Key, Value] = {}
        self._old: dict[Key, Value] = {}
        self._new_bytes = self._old_bytes = 0

    @property
    def bytes(self) -> int:
        return self._new_bytes + self._old_bytes

    def get(self, key: Key) -> Value | None:
        """The value belongs to the memo: nobody changes it."""
        value = self._new.get(key)
        if value is None and (value := self._old.get(key)) is not None:
            self.put(key, value)
        return value

    def put(self, key: Key, value: Value) -> None:
        """Remember a value, unless it is larger than half of the memory."""
        size = self._size(key, value) + ENTRY_BYTES
        if size > self._half:
            return
        with self._lock:
            if key in self._new:
                return
            if self._new_bytes + size > self._half:
                self._old, self._old_bytes = self._new, self._new_bytes
                self._new, self._new_bytes = {}, 0
            self._new[key] = value
            self._new_bytes += size


class TokenCache(Memo[Key, list[int]]):
    """Token ids by key.

    Equal ids in all caches are one object. So an id takes 8 bytes, and Python compares two long prompts without looking
    at the numbers.
    """

    def __init__(self, max_bytes: int) -> None:
        super().__init__(max_bytes, lambda key, ids: sys.getsizeof(key) + ID_BYTES * len(ids))


def shared(ids: Sequence[int]) -> list[int]:
    """The same ids as objects that all caches use."""
    return [_SHARED_IDS.setdefault(id, id) if id < MAX_SHARED_ID else id for id in ids]


def key_of(value: Mapping[str, Any] | Sequence[Any]) -> Hashable:
    """A key that only equal JSON data have; None for data that have none, because they contain half a character."""
    if len(value) == 2 and isinstance(value, dict):
        role, content = value.get("role"), value.get("content")
        if isinstance(content, str) and isinstance(role, str):
            return role, content
    try:
        return to_json(value)
    except ValueError:
        return None


def remembered(max_bytes: int) -> Callable[[Callable[[Json], Value]], Callable[[Json], Value]]:
    """Let a function of JSON data, whose results take about as much memory as the data, remember its results."""

    def of(make: Callable[[Json], Value]) -> Callable[[Json], Value]:
        memo = Memo[Hashable, Value](max_bytes, lambda key, _: 2 * sys.getsizeof(key[1] if type(key) is tuple else key))

        @wraps(make)
        def known_or_made(value: Json) -> Value:
            key = key_of(value)
            if key is None:
                return make(value)
            made = memo.get(key)
            if made is None:
                made = make(value)
                memo.put(key, made)
            return made

        return known_or_made

    return of
