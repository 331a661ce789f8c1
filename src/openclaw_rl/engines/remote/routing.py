"""Chooses the server for a request."""

import zlib
from collections import OrderedDict
from collections.abc import Sequence
from itertools import count

import numpy as np

from openclaw_rl.engines.remote.replica import Replica

#: Tokens whose beginning is remembered as one piece; servers cache pieces of 16 or more.
BLOCK_TOKENS = 64
#: Pieces that are remembered in all, so that memory stays bounded.
MAX_REMEMBERED = 100_000
#: A server with this many more requests than the least loaded one gets no more, whatever it has cached.
MAX_IMBALANCE = 8


class Router:
    """Sends a prompt where the longest beginning of it was sent last, and others to the server with the least to do.

    A session's next request extends its last one, so it goes to the same server, as do the judge and the teacher.
    """

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self.replicas = replicas
        self._seen: OrderedDict[int, Replica] = OrderedDict()
        self._turns = count()

    def choose(self, prompt_ids: Sequence[int], model: str) -> Replica | None:
        """The server for a prompt; None if none is up."""
        up = [replica for replica in self.replicas if replica.up]
        if not up:
            return None
        if len(self.replicas) == 1:
            return up[0]
        blocks = block_hashes(prompt_ids, model)
        least = min(replica.running for replica in up)
        cached = next((self._seen[block] for block in reversed(blocks) if block in self._seen), None)
        if cached is None or not cached.up or cached.running > least + MAX_IMBALANCE:
            idle = [replica for replica in up if replica.running == least]
            cached = idle[next(self._turns) % len(idle)]
        self._remember(blocks, cached)
        return cached

    def _remember(self, blocks: Sequence[int], replica: Replica) -> None:
        for block in blocks:
            self._seen[block] = replica
            self._seen.move_to_end(block)
        while len(self._seen) > MAX_REMEMBERED:
            self._seen.popitem(last=False)


def block_hashes(ids: Sequence[int], model: str) -> list[int]:
    """A number for each beginning of a prompt that is a whole number of blocks, the shortest first."""
    data = np.asarray(ids, np.int32).tobytes()
    step, value, hashes = BLOCK_TOKENS * 4, hash(model), []
    for start in range(0, len(data) - step + 1, step):
        value = hash((value, zlib.crc32(data[start : start + step])))
        hashes.append(value)
    return hashes
