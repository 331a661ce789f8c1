"""Messages that came before are the same objects again, and what is derived of them is derived once."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from openclaw_rl.rendering.known import Beginnings, Known, KnownMessages, KnownTools, last_remembered, remembered
from support.properties import examples

roles = st.sampled_from(["system", "user", "assistant"])
plain = st.fixed_dictionaries({"role": roles, "content": st.sampled_from(["yes", "no", "\ud800"])})
images = st.fixed_dictionaries({"role": roles, "content": st.sampled_from([[{"n": n}] for n in (1, 1.0, True, "1")])})
calls = st.fixed_dictionaries({"role": roles, "tool_calls": st.sampled_from([[{"id": "1"}], [{"id": "2"}]])})
conversations = st.lists(plain | images | calls, min_size=1, max_size=4)
#: Requests that continue one another, or go back and take another way.
requests = st.lists(st.tuples(st.integers(0, 3), conversations), min_size=1, max_size=8)


def written(data: Any) -> str:
    """JSON, because Python takes 1, 1.0 and True for equal."""
    return json.dumps(data, sort_keys=True)


@given(requests, st.sampled_from([3_000, 1_000_000]))
@examples(200)
def test_known_messages_say_exactly_what_was_given(steps: list[tuple[int, Any]], max_bytes: int) -> None:
    known = KnownMessages(max_bytes)
    messages: list[dict[str, Any]] = []
    for cut, more in steps:
        messages = [*messages[: len(messages) - cut], *more]
        assert written(known([dict(message) for message in messages])) == written(messages)


def test_equal_messages_of_requests_are_one_object() -> None:
    known = KnownMessages(1_000_000)
    question, answer = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}
    image = {"role": "user", "content": [{"detail": 1}]}
    first = known([question, image])
    second = known([dict(question), dict(image), answer])
    forked = known([dict(answer), dict(question)])
    assert first[0] is second[0] is forked[1]
    assert first[1] is second[1]
    assert second[2] is forked[0]
    assert known([{"role": "user", "content": [{"detail": True}]}])[0] is not first[1]


def test_what_is_derived_of_a_known_message_is_derived_once() -> None:
    made: list[Any] = []

    @remembered
    def length(message: Any) -> int:
        made.append(message)
        return len(message)

    @last_remembered
    def with_number(number: int, message: Any) -> Any:
        made.append(number)
        return {**message, "number": number}

    known = KnownMessages(1_000_000)
    message = {"role": "user", "content": "x", "name": "me"}
    tools = Known(KnownTools, 1_000_000)
    for _ in range(3):
        assert length(known([dict(message)])[0]) == 3
        assert length(tools([{"type": "function"}])) == 1
        assert with_number(7, known([dict(message)])[0])["number"] == 7
    assert made == [message, [{"type": "function"}], 7]
    assert with_number(8, known([message])[0])["number"] == 8
    assert [with_number(9, dict(message))["number"] for _ in range(2)] == [9, 9]
    assert made[3:] == [8, 9, 9]


@given(requests, st.booleans())
@examples(200)
def test_the_beginning_of_a_conversation_makes_no_difference(steps: list[tuple[int, Any]], are_known: bool) -> None:
    seen: list[int] = []

    def extend(before: str, messages: Any) -> str:
        seen.append(len(messages))
        return before + "".join(map(written, messages))

    known = KnownMessages(1_000_000)
    value = Beginnings(1_000_000, lambda context: context, extend)
    messages: list[Any] = []
    for cut, more in steps:
        messages = [*messages[: len(messages) - cut], *more]
        given_so = known(messages) if are_known else messages
        for context in ("mine", "theirs"):
            made = value(context, given_so)
            assert made == context + "".join(map(written, messages))
            seen.clear()
            assert value(context, given_so) == made
            assert seen == ([] if are_known else [len(messages)])
