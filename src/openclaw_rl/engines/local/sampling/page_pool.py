"""Which page of the key-value cache belongs to which sequence. Bookkeeping only: no tensors here.

A page holds the keys and values of PAGE_SIZE consecutive tokens. Sequences of one owner with a common prefix share its
pages.
The pages of finished sequences are kept until their room is needed (the least recently used go first), so that a
request that extends an earlier one computes only its new tokens.
"""

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b

#: Small, because up to a page of tokens is computed again when a sequence is extended; a power of two for kernels.
PAGE_SIZE = 16

#: The cache evicts this share of its pages at a time: single pages would leave holes instead of runs.
EVICTION_SHARE = 1 / 16

Digest = bytes


def chain(root: Digest, tokens: Sequence[int]) -> Iterator[Digest]:
    """A digest for each full page of `tokens`; equal digests mean equal roots and equal tokens from the very start."""
    digest = root
    for start in range(0, len(tokens) - PAGE_SIZE + 1, PAGE_SIZE):
        digest = next_digest(digest, tokens[start : start + PAGE_SIZE])
        yield digest


def chain_root(version: int, owner: str) -> Digest:
    """Where a chain of digests begins. Only sequences of one policy version and one owner share pages.

    Keys and values depend on the version. Owners are kept apart because whoever shares a page notices it, by the count
    of cached tokens or by the time to the first token, and could guess the prompts of others piece by piece.
    """
    return blake2b(owner.encode(errors="surrogatepass"), key=version.to_bytes(8, "big"), digest_size=16).digest()


def next_digest(parent: Digest, page: Sequence[int]) -> Digest:
    """The digest of a page, given that of the page before it."""
    return blake2b(array("q", page).tobytes(), key=parent, digest_size=16).digest()


class PagePool:
    """Hands out pages, and remembers what released pages hold.

    A page is free, in use (one or more sequences refer to it), or cached (no sequence refers to it, but its content
    is known by digest and can be used again). If `consecutive`, `allocate` prefers the page right after the
    sequence's last one: a sequence whose pages are consecutive can be read without gathering them.
    """

    def __init__(self, pages: int, consecutive: bool = True) -> None:
        self.pages = pages
        self._consecutive = consecutive
        self._free = set(range(pages))
        self._references: Counter[int] = Counter()
        self._page_of: dict[Digest, int] = {}
        self._digest_of: dict[int, Digest] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        """Pages that `allocate` can still give."""
        return len(self._free) + len(self._cached)

    def known(self, digests: Sequence[Digest]) -> int:
        """How many pages from the start are known."""
        return next((i for i, digest in enumerate(digests) if digest not in self._page_of), len(digests))

    def available_beside(self, digests: Sequence[Digest], given_back: Iterable[int] = ()) -> int:
        """Pages that `allocate` could still give after `given_back` was released and `digests` were matched."""
        freed = {page for page, count in Counter(given_back).items() if count == self._references[page]}
        taken = [self._page_of[digest] for digest in digests]
        return self.available + len(freed) - sum(page in self._cached or page in freed for page in taken)

    def match(self, digests: Iterable[Digest]) -> list[int]:
        """Refer to the longest known run of pages from the start."""
        pages: list[int] = []
        for digest in digests:
            page = self._page_of.get(digest)
            if page is None:
                break
            self._references[page] += 1
            self._cached.pop(page, None)
            pages.append(page)
        return pages

    def allocate(self, after: int | None = None) -> int | None:
        """A page with unknown content for the caller to fill, or None when all are in use."""
        if not self._free:
            self._evict()
        if not self._free:
            return None
        page = self._choose(after)
        self._free.remove(page)
        self._references[page] = 1
        return page

    def publish(self, page: int, digest: Digest) -> None:
        """The page is filled, and others may share it. The first page with some content keeps the digest."""
        if digest not in self._page_of and page not in self._digest_of:
            self._page_of[digest] = page
            self._digest_of[page] = digest

    def release(self, pages: Sequence[int]) -> None:
        """The caller no longer refers to these pages, given in order from the sequence's start."""
        # The end of a sequence is the least likely to be used again, so it is evicted first.
        for page in reversed(pages):
            self._references[page] -= 1
            if self._references[page]:
                continue
            del self._references[page]
            if page in self._digest_of:
                self._cached[page] = None
            else:
                self._free.add(page)

    def forget(self) -> None:
        """Evict every cached page."""
        self._evict(len(self._cached))

    def _evict(self, count: int | None = None) -> None:
        for _ in range(count if count is not None else max(1, int(self.pages * EVICTION_SHARE))):
            if not self._cached:
                return
            page, _none = self._cached.popitem(last=False)
            del self._page_of[self._digest_of.pop(page)]
            self._free.add(page)

    def _choose(self, after: int | None) -> int:
        if not self._consecutive:
            return next(iter(self._free))
        return after + 1 if after is not None and after + 1 in self._free else self._roomiest()

    def _roomiest(self) -> int:
        """The middle of the longest run of free pages, so that both neighbours have room to grow."""
        best_start = -1
        best_length = 0
        start = -1
        previous = -2
        for page in sorted(self._free):
            if page != previous + 1:
                start = page
            previous = page
            if page - start + 1 > best_length:
                best_start = start
                best_length = page - start + 1
        return best_start if best_length == self.pages else best_start + best_length // 2
