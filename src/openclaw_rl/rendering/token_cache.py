"""A cache of token ids, bounded by the memory that it takes."""

import sys
import threading
from array import array
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)

#: Four bytes for each id.
UNSIGNED = "I"
#: What an entry takes besides its key and its ids.
ENTRY_BYTES = 200


class TokenCache(Generic[Key]):
    """Token ids by key, the least recently used forgotten first. Threads may share it."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._ids: OrderedDict[Key, array[int]] = OrderedDict()
        self._lock = threading.Lock()
        self.bytes = 0

    def __contains__(self, key: Key) -> bool:
        return key in self._ids

    def get(self, key: Key) -> list[int] | None:
        with self._lock:
            ids = self._ids.get(key)
            if ids is None:
                return None
            self._ids.move_to_end(key)
        return ids.tolist()

    def put(self, key: Key, ids: Sequence[int]) -> None:
        with self._lock:
            if key in self._ids:
                self.bytes -= entry_bytes(key, self._ids.pop(key))
            self._ids[key] = array(UNSIGNED, ids)
            self.bytes += entry_bytes(key, self._ids[key])
            while self.bytes > self._max_bytes:
                self.bytes -= entry_bytes(*self._ids.popitem(last=False))


def entry_bytes(key: Hashable, ids: "array[int]") -> int:
    return sys.getsizeof(key) + ids.itemsize * len(ids) + ENTRY_BYTES
