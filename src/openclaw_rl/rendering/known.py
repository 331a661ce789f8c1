"""What is known of messages and tools: a conversation comes again with each of its requests.

Equal messages are the same object again (`KnownMessages`), which carries what was derived of it.
"""

import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import wraps
from itertools import count
from typing import Any, Generic, NamedTuple, TypeVar

from pydantic_core import to_json

from openclaw_rl.rendering.memo import Memo

#: How much memory a message takes with what is derived of it: for each byte of its text (it is kept as it came, guarded
#: and as it is recorded), for each value of JSON in it (Python's objects are larger than their text), and besides.
DERIVED_SIZE, VALUE_BYTES, DERIVED_BYTES = 4, 80, 2000
#: Before each value of an object or a list stands one of these.
SEPARATORS = b",[{"
#: How much memory may be taken by what is derived of other data than known ones.
MAX_OTHER_BYTES = 8_000_000
#: What a message takes in `Beginnings`: its number and its digest.
BYTES_PER_MESSAGE = 128
#: How many messages a request has at most that continues another: an agent's step adds fewer.
LIKELY_NEW = 16

Message = Mapping[str, Any]
SomeMessage = TypeVar("SomeMessage", bound=Mapping[str, Any])
Argument = TypeVar("Argument")
Json = TypeVar("Json", bound=Mapping[str, Any] | Sequence[Any])
Shared = TypeVar("Shared", bound="KnownMessage | KnownTools")
Value = TypeVar("Value")


def size_of(key: Hashable) -> int:
    """About how much memory a key of `key_of` takes."""
    return sys.getsizeof(key[1] if type(key) is tuple else key)


def known_size(key: Hashable) -> int:
    """About how much memory the known data of a key take with what is derived of them."""
    values = separators(key) if isinstance(key, bytes) else 0
    return DERIVED_BYTES + DERIVED_SIZE * size_of(key) + VALUE_BYTES * values


def separators(text: bytes) -> int:
    """How many values a JSON text has at most."""
    # One pass, where a count of each would take three.
    return len(text) - len(text.translate(None, SEPARATORS))


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


class KnownMessage(dict[str, Any]):
    """A message that requests share: nobody changes it. It carries what was derived of it."""

    __slots__ = ("derived", "number")
    _numbers = count()

    def __init__(self, message: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.number = next(self._numbers)
        """No other message has it."""
        self.derived: dict[object, Any] = {}
        """By the function that derives it."""


class KnownTools(list[Any]):
    """The tools of requests, likewise."""

    __slots__ = ("derived",)

    def __init__(self, tools: Sequence[Any]) -> None:
        super().__init__(tools)
        self.derived: dict[object, Any] = {}


KNOWN = (KnownMessage, KnownTools)


class Known(Generic[Shared]):
    """Makes equal data of requests one object, which carries what is derived of it, as far as memory allows."""

    def __init__(self, share: Callable[[Any], Shared], max_bytes: int) -> None:
        self._share = share
        self._known = Memo[Hashable, Shared](max_bytes, lambda key, _: known_size(key))

    def __call__(self, data: Mapping[str, Any] | Sequence[Any]) -> Shared:
        key = key_of(data)
        known = self._known.get(key) if key is not None else None
        if known is None:
            known = self._share(data)
            if key is not None:
                self._known.put(key, known)
        return known


class KnownMessages:
    """Makes the messages of a server's requests known ones."""

    def __init__(self, max_bytes: int) -> None:
        self._messages = Known(KnownMessage, max_bytes)
        self._conversations = Memo[tuple[int, Hashable], KnownConversation](max_bytes, lambda _, known: known.bytes)

    def __call__(self, messages: Sequence[Message]) -> list[KnownMessage]:
        """The same messages. A request that continues another is compared with it as a whole, which takes no time."""
        known = self._beginning(messages)
        if len(known.messages) < len(messages):
            new = messages[len(known.messages) :]
            size = known.bytes + sum(known_size(key_of(message)) for message in new)
            is_text = all(map(has_only_text, new))
            known = KnownConversation([*known.messages, *map(self._messages, new)], size)
            if is_text:
                self._conversations.put(end_of(messages), known)
        return known.messages

    def _beginning(self, messages: Sequence[Message]) -> "KnownConversation":
        """The longest conversation that these messages continue and that is known."""
        for covered in range(len(messages), max(0, len(messages) - LIKELY_NEW), -1):
            beginning = messages[:covered]
            known = self._conversations.get(end_of(beginning))
            if known is not None and known.messages == beginning:
                return known
        return KnownConversation([], 0)


class KnownConversation(NamedTuple):
    messages: list[KnownMessage]
    bytes: int


def end_of(messages: Sequence[Message]) -> tuple[int, Hashable]:
    """What a conversation is found by. Conversations that have it in common need not be equal."""
    return len(messages), key_of(messages[-1])


def has_only_text(value: Any) -> bool:
    """Whether JSON data have no numbers and no truth values, which Python takes for equal: 1, 1.0 and true."""
    if isinstance(value, dict):
        return all(map(has_only_text, value.values()))
    return all(map(has_only_text, value)) if isinstance(value, list) else value is None or isinstance(value, str)


def remembered(make: Callable[[Json], Value]) -> Callable[[Json], Value]:
    """Let a function of JSON data, whose results take about as much memory as the data, remember its results.

    Known messages and tools carry them. Those of other data take at most `MAX_OTHER_BYTES`.
    """
    memo = Memo[Hashable, Value](MAX_OTHER_BYTES, lambda key, _: 2 * size_of(key))

    @wraps(make)
    def known_or_made(value: Json) -> Value:
        if isinstance(value, KNOWN):
            derived: Value | None = value.derived.get(memo)
            if derived is None:
                derived = value.derived[memo] = make(value)
            return derived
        key = key_of(value)
        if key is None:
            return make(value)
        made = memo.get(key)
        if made is None:
            made = make(value)
            memo.put(key, made)
        return made

    return known_or_made


def last_remembered(make: Callable[[Argument, SomeMessage], Value]) -> Callable[[Argument, SomeMessage], Value]:
    """Let a function of something and a message remember its last result for each known message."""

    @wraps(make)
    def known_or_made(argument: Argument, message: SomeMessage) -> Value:
        if not isinstance(message, KnownMessage):
            return make(argument, message)
        last: tuple[Argument, Value] | None = message.derived.get(make)
        if last is None or (last[0] is not argument and last[0] != argument):
            last = message.derived[make] = argument, make(argument, message)
        return last[1]

    return known_or_made


class Beginnings(Generic[Value]):
    """What was made of conversations: the next request of one has a few messages more.

    Only conversations of known messages are remembered.
    """

    def __init__(
        self, max_bytes: int, start: Callable[[str], Value], extend: Callable[[Value, Sequence[Message]], Value]
    ) -> None:
        """`start` makes the value of no messages in a context, and `extend` that with these messages more."""
        self._start, self._extend = start, extend
        self._memo = Memo[tuple[str | int, ...], Value](max_bytes, lambda key, _: BYTES_PER_MESSAGE * len(key))

    def __call__(self, context: str, messages: Sequence[Message]) -> Value:
        numbers = [message.number for message in messages if type(message) is KnownMessage]
        if len(numbers) < len(messages):
            return self._extend(self._start(context), messages)
        key: tuple[str | int, ...] = (context, *numbers)
        for covered in range(len(messages), max(0, len(messages) - LIKELY_NEW), -1):
            value = self._memo.get(key[: covered + 1])
            if value is not None:
                break
        else:
            covered, value = 0, self._start(context)
        if covered < len(messages):
            value = self._extend(value, messages[covered:])
            self._memo.put(key, value)
        return value
