"""The cache of token ids is bounded by bytes, and forgets the least recently used first."""

from hypothesis import given
from hypothesis import strategies as st

from openclaw_rl.rendering.tokenizer import TokenCache, entry_bytes

texts = st.text("abc狐", min_size=1, max_size=6)


def size(text: str) -> int:
    return entry_bytes(text, ids(text))


def ids(text: str) -> list[int]:
    return [1 << 20] * len(text)


@given(st.integers(0, 1200), st.lists(st.tuples(st.booleans(), texts)))
def test_it_keeps_what_fits_of_the_latest(limit: int, steps: list[tuple[bool, str]]) -> None:
    cache = TokenCache[str](limit)
    recent: list[str] = []
    for writes, text in steps:
        if writes:
            cache.put(text, ids(text))
        if writes or text in recent:
            recent = [other for other in recent if other != text] + [text]
        # Older entries are never kept in place of newer ones.
        while sum(map(size, recent)) > limit:
            recent.pop(0)
        assert cache.get(text) == (ids(text) if text in recent else None)
        assert {t for _, t in steps if t in cache} == set(recent)
        assert cache.bytes == sum(map(size, recent))


def test_many_small_and_a_few_large_entries_take_no_more_than_the_limit() -> None:
    cache = TokenCache[str](1_000_000)
    for number in range(20_000):
        cache.put(f"text {number}", [number])
        assert cache.bytes <= 1_000_000
    cache.put("large", list(range(120_000)))
    assert "large" in cache
    assert "text 19000" not in cache
    cache.put("too large", list(range(125_000)))
    assert cache.bytes == 0


def test_equal_ids_are_one_object_in_every_cache() -> None:
    segments, sequences = TokenCache[str](10_000), TokenCache[int](10_000)
    segments.put("a", [int("70001"), int("70002")])
    sequences.put(1, [int("70001")])
    sequences.put(2, [int("70001"), int("70002")], base=1, keep=1)
    first, second = segments.get("a") or [], sequences.get(2) or []
    assert first == second == [70001, 70002]
    assert all(one is other for one, other in zip(first, second, strict=True))
