"""How a model writes tool calls: the text around a call's name and its arguments, as its chat template writes it."""

import json
from dataclasses import dataclass

from openclaw_rl.rendering.chat import ChatError, ChatRenderer, Message
from openclaw_rl.rendering.tool_calls import PARSERS, ParsedToolCall

#: Names and arguments that no template contains.
PROBES = (("probe_one", {"probe_key": "probe 1"}), ("probe_two", {"probe_key": "probe 2"}))
QUESTION: Message = {"role": "user", "content": "Hello"}


@dataclass(frozen=True, slots=True)
class CallFormat:
    """The fixed texts of a call. Names are written as JSON without quotes."""

    before_name: str
    before_arguments: str
    after: str
    separator: str = "\n"

    def start(self, name: str) -> str:
        """The text of a call up to its arguments."""
        return f"{self.before_name}{json.dumps(name, ensure_ascii=False)[1:-1]}{self.before_arguments}"

    @property
    def trigger(self) -> str:
        """How every call begins: with its tag, if it has one."""
        tag, is_closed, _rest = self.before_name.partition(">")
        return f"{tag}>" if tag.startswith("<") and is_closed else self.before_name


#: The formats of the parsers, for templates that show no calls or several in another way.
FORMATS = {
    "hermes": CallFormat('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>"),
    "llama3": CallFormat('{"name": "', '", "parameters": ', "}", "; "),
}
#: What a call begins and ends with, by parser.
EDGES = {"hermes": ("<tool_call>", "</tool_call>"), "llama3": ("{", "}")}


def call_format(renderer: ChatRenderer, parser: str) -> CallFormat:
    """How the template writes calls; the usual format of the parser if the template writes none that it can read."""
    usual = FORMATS[parser]
    try:
        found = read_format(shown_calls(renderer, PROBES), parser)
    except ChatError:
        # Some templates refuse several calls in one answer.
        try:
            found = read_format(shown_calls(renderer, PROBES[:1]), parser)
        except ChatError:
            return usual
    return found if found is not None and is_readable(found, parser) else usual


def shown_calls(renderer: ChatRenderer, probes: tuple[tuple[str, dict[str, str]], ...]) -> str:
    """A conversation whose last message is an answer with calls, as the template writes it. Raises ChatError."""
    calls = [
        {"id": "call00001", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for name, arguments in probes
    ]
    return renderer.text([QUESTION, {"role": "assistant", "content": None, "tool_calls": calls}], answer=False)


def read_format(text: str, parser: str) -> CallFormat | None:
    """The format of the calls in a text; None if they are not there or written differently from JSON."""
    opening, closing = EDGES[parser]
    (name, arguments), (next_name, _) = ((name, json.dumps(arguments)) for name, arguments in PROBES)
    at_name = text.rfind(name) if next_name not in text else text.rfind(name, 0, text.rfind(next_name))
    at_arguments = text.find(arguments, at_name)
    begin = text.rfind(opening, 0, max(at_name, 0))
    end = text.find(closing, at_arguments + len(arguments))
    if min(at_name, at_arguments, begin, end) < 0:
        return None
    end += len(closing)
    following = text.find(opening, end)
    has_next = text.find(next_name, end) > following >= 0
    return CallFormat(
        text[begin:at_name],
        text[at_name + len(name) : at_arguments],
        text[at_arguments + len(arguments) : end],
        text[end:following] if has_next else FORMATS[parser].separator,
    )


def is_readable(found: CallFormat, parser: str) -> bool:
    """Whether the parser reads two calls in this format."""
    calls = [f"{found.start(name)}{json.dumps(arguments)}{found.after}" for name, arguments in PROBES]
    reader = PARSERS[parser]()
    parsed = [*reader.push(found.separator.join(calls)), *reader.flush()]
    names = [call.name for call in parsed if isinstance(call, ParsedToolCall)]
    return len(parsed) == len(names) and names == [name for name, _ in PROBES]
