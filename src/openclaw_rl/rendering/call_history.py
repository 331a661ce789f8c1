"""Earlier tool calls and their results in the form that a chat template expects: found by trying.

Templates differ: in whether arguments are objects or text, in which ids they accept, in how many calls a message may
have. Some write no calls at all. So a short conversation with two calls is rendered in one form after another until
both calls and both results are in the text.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from hashlib import blake2b
from itertools import product
from typing import Any

from openclaw_rl.rendering.known import KnownMessage, last_remembered

Message = dict[str, Any]
#: A template's text for a conversation; None if the template refuses it.
Render = Callable[[Sequence[Message]], str | None]

#: Names, arguments and results that no template contains.
PROBES = (("probe_one", {"probe_key": "probe 1"}), ("probe_two", {"probe_key": "probe 2"}))
RESULTS = ("first result", "second result")
QUESTION: Message = {"role": "user", "content": "Hello"}
_NINE = re.compile(r"[A-Za-z0-9]{9}")
#: A field of some templates for the results of a message's calls.
_EMBEDDED = "tool_responses"


@dataclass(frozen=True, slots=True)
class HistoryForm:
    """What a template needs besides what most templates take."""

    arguments_as_text: bool = False
    nine_character_ids: bool = False
    no_empty_content: bool = False
    """Whether a message that has only calls must have no content, and not an empty one."""
    one_call: bool = False
    """Whether a message has at most one call."""
    embedded_results: bool = False
    """Whether results are a field of the message with the calls."""
    joined_reasoning: bool = False
    """Whether a message with calls has either content or reasoning."""

    def apply(self, chat: Sequence[Message]) -> list[Message]:
        """A conversation in this form. Every call gets an id, and every result its call's name and id."""
        linked = list(with_links(chat))
        if self.one_call:
            linked = list(one_call_each(linked))
        if self.embedded_results:
            linked = list(with_embedded_results(linked))
        return [self._message(message) for message in linked]

    @last_remembered
    def _message(self, message: Message) -> Message:
        shortens = self.nine_character_ids and "tool_call_id" in message
        if not shortens and not message.get("tool_calls"):
            return message
        expected = KnownMessage(message)
        if shortens:
            expected["tool_call_id"] = nine_characters(message["tool_call_id"])
        if calls := message.get("tool_calls"):
            expected["tool_calls"] = [self._call(call) for call in calls]
            thoughts = message.get("reasoning_content")
            if self.joined_reasoning and thoughts and message["content"]:
                expected |= {"content": "", "reasoning_content": f"{thoughts}\n\n{message['content']}"}
            if self.no_empty_content and not expected["content"]:
                expected["content"] = None
        return expected

    def _call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        function = dict(call["function"])
        if not self.arguments_as_text:
            function["arguments"] = decoded(function["arguments"])
        id = nine_characters(call["id"]) if self.nine_character_ids else call["id"]
        return {**call, "id": id, "type": "function", "function": function}


def decoded(arguments: Any) -> Any:
    """Arguments as an object. A client sends back what the model wrote, which may be anything: it stays text then."""
    try:
        return json.loads(arguments)
    except (ValueError, TypeError, RecursionError):
        return arguments


def nine_characters(id: str) -> str:
    """An id of nine letters and digits for each id."""
    return id if _NINE.fullmatch(id) else blake2b(id.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()[:9]


def with_links(chat: Sequence[Message]) -> Iterator[Message]:
    """The messages, with ids and names that say which call a result belongs to, where the client leaves them out."""
    waiting: list[tuple[str, str]] = []
    number = 0
    for message in chat:
        if calls := message.get("tool_calls"):
            if not all(call.get("id") for call in calls):
                calls = [
                    {**call, "id": call.get("id") or f"call{place:05d}"} for place, call in enumerate(calls, number + 1)
                ]
                message = {**message, "tool_calls": calls}
            number += len(calls)
            waiting = [(call["id"], call["function"]["name"]) for call in calls]
        elif message["role"] == "tool":
            given = message.get("tool_call_id")
            at = next((place for place, (id, _) in enumerate(waiting) if id == given), 0)
            if waiting and (not given or waiting[at][0] == given):
                message = linked(waiting.pop(at), message)
            elif not given:
                message = {**message, "tool_call_id": "call00000"}
        yield message


@last_remembered
def linked(call: tuple[str, str], message: Message) -> Message:
    """A result with the id and the name of its call."""
    id, name = call
    return KnownMessage({**message, "tool_call_id": id, "name": message.get("name") or name})


def results_after(chat: Sequence[Message], start: int) -> list[Message]:
    """The results that follow at once."""
    end = next((place for place in range(start, len(chat)) if chat[place]["role"] != "tool"), len(chat))
    return list(chat[start:end])


def one_call_each(chat: Sequence[Message]) -> Iterator[Message]:
    """Messages with several calls as several messages, each followed by its call's result."""
    place = 0
    while place < len(chat):
        message = chat[place]
        place += 1
        calls = message.get("tool_calls") or []
        if len(calls) < 2:
            yield message
            continue
        results = results_after(chat, place)
        place += len(results)
        for number, call in enumerate(calls):
            said = message if number == 0 else {"role": message["role"], "content": ""}
            yield {**said, "tool_calls": [call]}
            is_last = number == len(calls) - 1
            own = [result for result in results if is_last or result["tool_call_id"] == call["id"]]
            yield from own
            results = [result for result in results if result not in own]


def with_embedded_results(chat: Sequence[Message]) -> Iterator[Message]:
    """Messages with calls that have the results in a field."""
    place = 0
    while place < len(chat):
        message = chat[place]
        place += 1
        if message.get("tool_calls") and (results := results_after(chat, place)):
            place += len(results)
            responses = [{"name": each.get("name", ""), "response": each["content"]} for each in results]
            message = {**message, _EMBEDDED: responses}
        yield message


def probe(count: int = len(PROBES)) -> list[Message]:
    """A conversation with calls and their results."""
    calls = [
        {"id": f"callProbe{number:019d}", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for number, (name, arguments) in enumerate(PROBES[:count])
    ]
    results = [
        {"role": "tool", "content": result, "tool_call_id": call["id"]}
        for call, result in zip(calls, RESULTS, strict=False)
    ]
    return [QUESTION, {"role": "assistant", "content": "", "tool_calls": calls}, *results]


def find_form(render: Render, template: str) -> HistoryForm | None:
    """The form that a template needs, the simplest that works; None if it writes calls in none."""
    names = 2 if _EMBEDDED in template else 1
    embeds = (False, True) if _EMBEDDED in template else (False,)
    forms = [HistoryForm(*flags) for flags in product(*[(False, True)] * 4, embeds)]

    def shown(form: HistoryForm) -> str | None:
        text = render(form.apply(probe()))
        return text if text is not None and is_complete(text, names) else None

    found = next((form for form in sorted(forms, key=lambda form: sum(astuple(form))) if shown(form)), None)
    if found is None:
        return None
    # Where empty content makes a difference, the template writes it as an answer of its own.
    without = replace(found, no_empty_content=True)
    if len(shown(without) or "") < len(shown(found) or "") and shown(without):
        found = without
    return replace(found, joined_reasoning=refuses_both(render, found))


def is_complete(text: str, names: int) -> bool:
    """Whether a text has both calls and both results, with each name at least so often."""
    values = [*(arguments["probe_key"] for _, arguments in PROBES), *RESULTS]
    named = all(text.count(name) >= names for name, _ in PROBES)
    # As Python writes a dict, no model was trained on it.
    return named and all(value in text for value in values) and "{'probe_key'" not in text


def refuses_both(render: Render, form: HistoryForm) -> bool:
    """Whether a template refuses content and reasoning in one message with calls."""
    question, answer, *results = form.apply(probe())
    thoughts = {"reasoning_content": "Hm."}
    both = [question, {**answer, **thoughts, "content": "I look."}, *results]
    return render(both) is None and render([question, {**answer, **thoughts}, *results]) is not None
