"""A cache of token ids, bounded by the memory that it takes."""

import sys
import threading
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)

#: A list has a pointer for each id.
ID_BYTES = 8
#: What an entry takes besides its key and its ids.
ENTRY_BYTES = 200
#: No vocabulary has as many tokens. Without a bound, ids that clients make up would fill the memory.
MAX_SHARED_ID = 1 << 20

_SHARED_IDS: dict[int, int] = {}


class TokenCache(Generic[Key]):
    """Token ids by key, the least recently used forgotten first. Threads may share it.

    Equal ids in all caches are one object. So an id takes 8 bytes, and Python compares two long prompts without looking
    at the numbers.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._ids: OrderedDict[Key, list[int]] = OrderedDict()
        self._lock = threading.Lock()
        self.bytes = 0

    def __contains__(self, key: Key) -> bool:
        return key in self._ids

    def get(self, key: Key) -> list[int] | None:
        """The ids of a key. The list belongs to the cache: nobody changes it."""
        with self._lock:
            ids = self._ids.get(key)
            if ids is None:
                return None
            self._ids.move_to_end(key)
        return ids

    def put(self, key: Key, ids: Sequence[int], base: Key | None = None, keep: int = 0) -> None:
        """Remember ids. The first `keep` of them are those of `base`, if it is given."""
        with self._lock:
            known = self._ids.get(base, [])[:keep] if base is not None else []
        whole = [*known, *shared(ids[len(known) :])]
        with self._lock:
            if key in self._ids:
                self.bytes -= entry_bytes(key, self._ids.pop(key))
            self._ids[key] = whole
            self.bytes += entry_bytes(key, whole)
            while self.bytes > self._max_bytes:
                self.bytes -= entry_bytes(*self._ids.popitem(last=False))


def shared(ids: Sequence[int]) -> list[int]:
    """The same ids as objects that all caches use."""
    return [_SHARED_IDS.setdefault(id, id) if id < MAX_SHARED_ID else id for id in ids]


def entry_bytes(key: Hashable, ids: Sequence[int]) -> int:
    return sys.getsizeof(key) + ID_BYTES * len(ids) + ENTRY_BYTES
