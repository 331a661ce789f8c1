"""How a model writes tool calls: the text around a call's name and its arguments, as its chat template writes it."""

import json

from openclaw_rl.rendering.call_history import PROBES, QUESTION
from openclaw_rl.rendering.chat import ChatError, ChatRenderer
from openclaw_rl.rendering.tool_calls import ParsedToolCall, ToolParser
from openclaw_rl.rendering.tool_formats import FORMATS, CallFormat, written_in

#: What a call begins and ends with in the formats whose spaces and line breaks are read from the template.
EDGES = {"hermes": ("<tool_call>", "</tool_call>"), "llama3": ("{", "}")}


def call_format(renderer: ChatRenderer, parser: str) -> CallFormat | None:
    """How the template writes calls; the usual format of the parser if the template writes none that it can read.

    None if the format has no JSON.
    """
    try:
        shown = shown_calls(renderer)
    except ChatError:
        shown = ""
    usual = written_in(parser, shown)
    found = read_format(shown, parser, usual) if usual is not None and parser in EDGES else None
    return found if found is not None and is_readable(found, parser) else usual


def shown_calls(renderer: ChatRenderer) -> str:
    """A conversation whose last message is an answer with calls, as the template writes it. Raises ChatError."""
    probes = PROBES[:1] if renderer.history_form.one_call else PROBES
    calls = [
        {"id": f"call{number:05d}", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for number, (name, arguments) in enumerate(probes)
    ]
    return renderer.text([QUESTION, {"role": "assistant", "content": None, "tool_calls": calls}], answer=False)


def read_format(text: str, parser: str, usual: CallFormat) -> CallFormat | None:
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
        text[end:following] if has_next else usual.separator,
    )


def is_readable(found: CallFormat, parser: str) -> bool:
    """Whether the parser reads two calls in this format."""
    calls = (found.separator or "").join(found.write(name, arguments) for name, arguments in PROBES)
    reader = ToolParser(FORMATS[parser])
    parsed = [*reader.push(calls), *reader.flush()]
    names = [call.name for call in parsed if isinstance(call, ParsedToolCall)]
    return len(parsed) == len(names) and names == [name for name, _ in PROBES]
