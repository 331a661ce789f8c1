"""Remembers what was derived from texts and turns."""

import sys
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

#: What an entry takes besides its key and its value.
ENTRY_BYTES = 200
#: A list has a pointer for each id.
ID_BYTES = 8
#: No vocabulary has as many tokens. Without a bound, ids that clients make up would fill the memory.
MAX_SHARED_ID = 1 << 20
_SHARED_IDS: dict[int, int] = {}

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


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
