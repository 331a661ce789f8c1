"""What is remembered is bounded by bytes, and what was used lately stays."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from openclaw_rl.rendering.known import key_of, remembered
from openclaw_rl.rendering.memo import ENTRY_BYTES, Memo, TokenCache, shared

texts = st.text("abc狐", min_size=1, max_size=6)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner), max_leaves=4
)
messages = st.dictionaries(st.sampled_from(["role", "content", "name"]), values, min_size=1)


@given(st.integers(0, 2400), st.lists(st.tuples(st.booleans(), texts)))
def test_what_was_used_while_half_of_the_memory_was_filled_is_there(limit: int, steps: list[tuple[bool, str]]) -> None:
    memo = Memo[str, str](limit, lambda key, value: len(key) + len(value))
    used: list[str] = []
    for writes, text in steps:
        if writes:
            memo.put(text, text.upper())
        if writes or memo.get(text):
            used = [other for other in used if other != text] + [text]
        assert memo.get(text) in (None, text.upper())
        assert memo.bytes <= limit
        room = limit // 2
        for recent in reversed(used):
            room -= 2 * len(recent) + ENTRY_BYTES
            if room < 0:
                break
            assert memo.get(recent) == recent.upper()


def test_many_small_and_a_few_large_entries_take_no_more_than_the_limit() -> None:
    cache = TokenCache[str](2_000_000)
    for number in range(20_000):
        cache.put(f"text {number}", [number])
        assert cache.bytes <= 2_000_000
    cache.put("large", list(range(120_000)))
    assert cache.get("large") == list(range(120_000))
    assert cache.get("text 100") is None
    cache.put("too large", list(range(125_000)))
    assert cache.get("too large") is None
    assert cache.bytes <= 2_000_000


def test_equal_ids_are_one_object_everywhere() -> None:
    first, second = shared([int("70001"), int("70002")]), shared([int("70001"), int("70002")])
    assert first == second == [70001, 70002]
    assert all(one is other for one, other in zip(first, second, strict=True))


@given(messages, messages)
def test_only_equal_data_have_the_same_key(one: dict[str, Any], other: dict[str, Any]) -> None:
    key = key_of(one)
    assert key is None or key_of(dict(one)) == key
    if key is not None and key == key_of(other):
        assert repr(one) == repr(other) or one == other
    assert (key is None) == any(is_broken(value) for value in one.values()) or isinstance(key, tuple)


def is_broken(value: Any) -> bool:
    """Whether a text in a value has half a surrogate pair."""
    if isinstance(value, list):
        return any(map(is_broken, value))
    return isinstance(value, str) and any("\ud800" <= letter <= "\udfff" for letter in value)


def test_a_result_is_made_once_for_equal_data() -> None:
    made: list[Any] = []

    @remembered
    def size(value: dict[str, Any]) -> int:
        made.append(value)
        return len(value)

    long, short = {"role": "user", "content": "hi", "name": "me"}, {"role": "user", "content": "hi"}
    assert [size(dict(value)) for value in (long, short, long, short)] == [3, 2, 3, 2]
    assert made == [long, short]
    half = {"role": "user", "content": ["\ud800"]}
    assert [size(half), size(half)] == [2, 2]
    assert made[2:] == [half, half]
