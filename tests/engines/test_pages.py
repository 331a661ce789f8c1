"""The page pool against a simple model of it: no page has two owners, and nothing known is lost needlessly."""

from dataclasses import dataclass, field
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from openclaw_rl.engines.local.sampling.page_pool import EVICTION_SHARE, PAGE_SIZE, PagePool, chain
from support.properties import examples

ROOTS = (b"version0", b"version1")


def digests_of(root: bytes, letters: str) -> list[bytes]:
    """The digests of a text of one full page a letter."""
    return list(chain(root, [ord(letter) for letter in letters for _ in range(PAGE_SIZE)]))


@dataclass
class Held:
    """A sequence as its owner sees it: the digests of what it will hold, and its pages so far."""

    digests: list[bytes]
    pages: list[int] = field(default_factory=list)


class PoolMachine(RuleBasedStateMachine):
    """Sequences take up, grow, publish and release pages; `named` says which contents must still be known."""

    # A pool this small gives up one cached page at a time, so the model knows exactly what is left.
    @initialize(pages=st.integers(1, int(2 / EVICTION_SHARE) - 1))
    def start(self, pages: int) -> None:
        self.pool = PagePool(pages)
        self.held: list[Held] = []
        self.named: dict[bytes, int] = {}

    @property
    def in_use(self) -> set[int]:
        return {page for held in self.held for page in held.pages}

    @property
    def cached(self) -> set[int]:
        return set(self.named.values()) - self.in_use

    @property
    def free(self) -> set[int]:
        return set(range(self.pool.pages)) - self.in_use - self.cached

    @rule(root=st.sampled_from(ROOTS), letters=st.text("ab", min_size=1, max_size=6))
    def take_up(self, root: bytes, letters: str) -> None:
        digests = digests_of(root, letters)
        known = next((n for n, digest in enumerate(digests) if digest not in self.named), len(digests))
        pages = self.pool.match(digests)
        assert pages == [self.named[digest] for digest in digests[:known]]
        self.held.append(Held(digests, pages))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), publish=st.booleans())
    def grow(self, data: st.DataObject, publish: bool) -> None:
        held = data.draw(st.sampled_from(self.held))
        last = held.pages[-1] if held.pages else None
        page = self.pool.allocate(last)
        if page is None:
            assert len(self.in_use) == self.pool.pages
            return
        assert page in (self.free or self.cached), "in use, or known although a free page was there"
        if last is not None and last + 1 in self.free:
            assert page == last + 1
        self.named = {digest: named for digest, named in self.named.items() if named != page}
        held.pages.append(page)
        number = len(held.pages) - 1
        if publish and number < len(held.digests):
            self.pool.publish(page, held.digests[number])
            self.named.setdefault(held.digests[number], page)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        held = data.draw(st.sampled_from(self.held))
        self.held.remove(held)
        self.pool.release(held.pages)

    @rule(data=st.data(), root=st.sampled_from(ROOTS), letters=st.text("ab", min_size=1, max_size=6))
    def take_the_place_of_others(self, data: st.DataObject, root: bytes, letters: str) -> None:
        """What would be left is what then is left."""
        chosen = data.draw(st.lists(st.sampled_from(range(len(self.held))), unique=True) if self.held else st.just([]))
        leaving = [self.held[number] for number in chosen]
        digests = digests_of(root, letters)
        given_back = [page for held in leaving for page in held.pages]
        foreseen = self.pool.available_beside(digests[: self.pool.known(digests)], given_back)
        for held in leaving:
            self.held.remove(held)
            self.pool.release(held.pages)
        self.take_up(root, letters)
        assert self.pool.available == foreseen

    @rule()
    def forget(self) -> None:
        self.pool.forget()
        kept = self.in_use
        self.named = {digest: page for digest, page in self.named.items() if page in kept}

    @invariant()
    def every_page_is_in_use_or_available(self) -> None:
        assert self.pool.available + len(self.in_use) == self.pool.pages


PoolMachine.TestCase.settings = examples(120, stateful_step_count=40)
TestPool = PoolMachine.TestCase


def fill(pool: PagePool, letters: str, root: bytes = ROOTS[0]) -> list[int]:
    """A sequence of new pages, published."""
    pages: list[int] = []
    for digest in digests_of(root, letters):
        page = pool.allocate(pages[-1] if pages else None)
        assert page is not None
        pool.publish(page, digest)
        pages.append(page)
    return pages


def known(pool: PagePool, letters: str) -> int:
    """How many pages of a text the pool knows."""
    pages = pool.match(digests_of(ROOTS[0], letters))
    pool.release(pages)
    return len(pages)


@given(st.integers(1, 200))
def test_a_fresh_pool_gives_consecutive_pages_to_a_growing_sequence(pages: int) -> None:
    given_out = fill(PagePool(pages), "a" * pages)
    assert given_out == list(range(given_out[0], given_out[0] + pages))


@given(st.integers(4, 200))
def test_two_growing_sequences_both_have_room(pages: int) -> None:
    pool = PagePool(pages)
    one, other = fill(pool, "a"), fill(pool, "b")
    for _ in range(pages // 4 - 1):
        for mine in (one, other):
            page = pool.allocate(mine[-1])
            assert page == mine[-1] + 1
            mine.append(page)


def test_a_shared_page_is_in_use_until_its_last_owner_lets_go() -> None:
    pool = PagePool(1)
    pages = fill(pool, "a")
    assert pool.match(digests_of(ROOTS[0], "a")) == pages
    pool.release(pages)
    assert (pool.available, pool.allocate()) == (0, None)
    pool.release(pages)
    assert (pool.available, pool.allocate()) == (1, pages[0])


def test_the_first_page_of_a_content_keeps_the_name() -> None:
    pool = PagePool(4)
    first, second = fill(pool, "a"), fill(pool, "a")
    assert pool.match(digests_of(ROOTS[0], "a")) == first
    pool.release(second)
    assert known(pool, "a") == 1


@pytest.mark.parametrize(("needed", "left"), [*enumerate([(2, 2), (1, 2), (0, 2), (0, 1), (0, 0)])])
def test_the_least_recently_used_goes_first_and_of_a_sequence_its_end(needed: int, left: tuple[int, int]) -> None:
    pool = PagePool(4)
    pool.release(fill(pool, "ab"))
    pool.release(fill(pool, "cd"))
    assert known(pool, "ab") == 2, "being looked up makes it the more recent one"
    for _ in range(needed):
        pool.allocate()
    assert (known(pool, "cd"), known(pool, "ab")) == left


def test_a_large_pool_gives_up_a_share_of_its_cache_at_once() -> None:
    pool = PagePool(64)
    pool.release(fill(pool, "x" * 64))
    page = pool.allocate()
    assert page is not None
    assert known(pool, "x" * 64) == 64 - 64 * EVICTION_SHARE
    assert pool.allocate(page) == page + 1, "so that the newcomer finds a run"


def test_forget_leaves_what_is_in_use() -> None:
    pool = PagePool(8)
    pool.release(fill(pool, "ab"))
    using = fill(pool, "c")
    pool.forget()
    assert (known(pool, "ab"), known(pool, "c"), pool.available) == (0, 1, 7)
    pool.release(using)
    pool.forget()
    assert (known(pool, "c"), pool.available) == (0, 8)


texts = st.tuples(st.sampled_from(ROOTS), st.lists(st.sampled_from((0, 1, 70_000)), max_size=3 * PAGE_SIZE))


@given(texts, texts, st.integers(0, 3 * PAGE_SIZE))
@examples(300)
def test_equal_digests_mean_equal_tokens_from_the_start_and_one_root(
    one: tuple[bytes, list[int]], other: tuple[bytes, list[int]], common: int
) -> None:
    (root, tokens), (other_root, other_tokens) = one, other
    other_tokens = tokens[:common] + other_tokens[common:]
    first, second = list(chain(root, tokens)), list(chain(other_root, other_tokens))
    assert (len(first), len(second)) == (len(tokens) // PAGE_SIZE, len(other_tokens) // PAGE_SIZE)
    for (m, mine), (n, theirs) in product(enumerate(first, 1), enumerate(second, 1)):
        same = root == other_root and tokens[: m * PAGE_SIZE] == other_tokens[: n * PAGE_SIZE]
        assert (mine == theirs) == same
