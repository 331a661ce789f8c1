"""The formats in which families of models write tool calls, and which of them a model uses."""

import json
import logging
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from openclaw_rl.rendering.call_bodies import (
    Notation,
    Tagged,
    json_arguments,
    json_calls,
    json_calls_to_the_end,
    literal,
    maybe,
    maybe_id,
    name,
)
from openclaw_rl.rendering.call_history import PROBES
from openclaw_rl.rendering.tool_calls import ToolFormat

log = logging.getLogger(__name__)

_SECTION, _SECTION_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_BEGIN, _SEPARATOR, _END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_RECIPIENT = " to=functions."

#: By name, as `--tool-parser` takes it.
FORMATS: dict[str, ToolFormat] = {
    # <tool_call>{"name": …, "arguments": {…}}</tool_call>
    "hermes": ToolFormat(("<tool_call>",), ((json_calls,),), "</tool_call>"),
    # {"name": …, "parameters": {…}}; …
    "llama3": ToolFormat(("<|python_tag|>", ""), ((json_calls_to_the_end,),), fills_answer=True),
    # [TOOL_CALLS] [{"name": …, "arguments": {…}, "id": …}, …] or [TOOL_CALLS]name[CALL_ID]id[ARGS]{…}
    "mistral": ToolFormat(
        ("[TOOL_CALLS]",),
        ((json_calls,), (name, maybe_id("[CALL_ID]"), maybe("[ARGS]"), json_arguments)),
        markers=("[CALL_ID]", "[ARGS]"),
    ),
    # <tool_call><function=name><parameter=key>value</parameter>…</function></tool_call>
    "qwen3_coder": ToolFormat(
        ("<tool_call>", "<function="),
        (
            (
                maybe("<function="),
                name,
                literal(">"),
                Tagged("<parameter=", ">", "", "</parameter>", "</function>", on_lines=True),
                literal("</function>"),
            ),
        ),
        dropped=("</tool_call>",),
    ),
    # <tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value>…</tool_call>
    "glm": ToolFormat(
        ("<tool_call>",),
        ((name, Tagged("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "</tool_call>")),),
        "</tool_call>",
        markers=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    # <|channel|>commentary to=functions.name <|constrain|>json<|message|>{…}<|call|>
    "harmony": ToolFormat(
        (f"<|channel|>commentary{_RECIPIENT}", f"<|channel|>analysis{_RECIPIENT}", _RECIPIENT),
        (
            (
                name,
                maybe("<|channel|>commentary", "<|channel|>analysis"),
                maybe("<|constrain|>json", "json"),
                literal("<|message|>"),
                json_arguments,
            ),
        ),
        "<|call|>",
    ),
    # <|tool_call>call:name{key:<|"|>text<|"|>}<tool_call|>
    "gemma4": ToolFormat(
        ("<|tool_call>call:",), ((name, Notation('<|"|>')),), "<tool_call|>", markers=("<|tool_call>", '<|"|>')
    ),
    # <start_function_call>call:name{key:<escape>text<escape>}<end_function_call>
    "functiongemma": ToolFormat(
        ("<start_function_call>call:",),
        ((name, Notation("<escape>")),),
        "<end_function_call>",
        markers=("<start_function_call>", "<escape>"),
    ),
    # <|tool_call|>[{"name": …, "arguments": {…}}, …]<|/tool_call|> or functools[…]
    "phi4": ToolFormat(("<|tool_call|>", "functools"), ((json_calls,),), dropped=("<|/tool_call|>", "</|tool_call|>")),
    # <|tool_call|>[{"name": …, "arguments": {…}}, …]
    "granite": ToolFormat(("<|tool_call|>", "<tool_call>"), ((json_calls,),), dropped=("</tool_call>",)),
    # <｜tool▁call▁begin｜>name<｜tool▁sep｜>{…}<｜tool▁call▁end｜>, or with function<｜tool▁sep｜>name ```json {…} ```
    "deepseek": ToolFormat(
        (_SECTION + _BEGIN, _BEGIN),
        (
            (name, literal(_SEPARATOR), json_arguments),
            (literal("function"), literal(_SEPARATOR), name, literal("```json"), json_arguments, literal("```")),
        ),
        _END,
        dropped=(_SECTION_END,),
        markers=(_SECTION, _SEPARATOR),
    ),
}

#: What is one token in the vocabularies of many models.
_TAG = re.compile(r"<[^>]*>|\[\w+\]")


@dataclass(frozen=True, slots=True)
class CallFormat:
    """The fixed texts around a call's name and its arguments, which are JSON."""

    before_name: str
    before_arguments: str
    after: str
    separator: str | None = "\n"
    """What stands between two calls; None if an answer that is restricted to calls has only one."""

    def start(self, name: str) -> str:
        """The text of a call up to its arguments. Names are written as JSON without quotes."""
        return f"{self.before_name}{json.dumps(name, ensure_ascii=False)[1:-1]}{self.before_arguments}"

    def write(self, name: str, arguments: Any) -> str:
        return f"{self.start(name)}{json.dumps(arguments, ensure_ascii=False)}{self.after}"

    @property
    def trigger(self) -> str:
        """How every call begins: with its tag, if it has one."""
        tag = _TAG.match(self.before_name)
        return tag[0] if tag else self.before_name


#: How calls are written, if their arguments are JSON: by format, the usual way first.
WRITTEN: dict[str, tuple[CallFormat, ...]] = {
    "hermes": (CallFormat('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>"),),
    "llama3": (CallFormat('{"name": "', '", "parameters": ', "}", "; "),),
    "mistral": (
        CallFormat("[TOOL_CALLS]", "[ARGS]", "", ""),
        CallFormat('[TOOL_CALLS] [{"name": "', '", "arguments": ', "}]", None),
        CallFormat('[TOOL_CALLS][{"name": "', '", "arguments": ', "}]", None),
    ),
    "harmony": (CallFormat(f"<|channel|>commentary{_RECIPIENT}", " <|constrain|>json<|message|>", "", None),),
    "phi4": (
        CallFormat('<|tool_call|>[{"name": "', '", "arguments": ', "}]<|/tool_call|>", ""),
        CallFormat('<|tool_call|>{"name": "', '", "arguments": ', "}<|/tool_call|>", ""),
        CallFormat('functools[{"name": "', '", "arguments": ', "}]", None),
    ),
    "granite": (CallFormat('<|tool_call|>[{"name": "', '", "arguments": ', "}]", ""),),
    "deepseek": (
        CallFormat(_SECTION + _BEGIN, _SEPARATOR, _END + _SECTION_END, None),
        CallFormat(f"{_SECTION}{_BEGIN}function{_SEPARATOR}", "\n```json\n", f"\n```{_END}{_SECTION_END}", None),
    ),
}

#: The instruction for tool calls in Llama's templates that do not have the tag.
_LLAMA_INSTRUCTION = re.compile(r'"name":\s*[^",]+,\s*"parameters"')
#: What shows that a template's model uses a format: all of these texts. The first that fits counts.
_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("harmony", ("<|channel|>", "<|message|>")),
    ("gemma4", ("<|tool_call>",)),
    ("functiongemma", ("<start_function_call>",)),
    ("deepseek", (_BEGIN,)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("qwen3_coder", ("<function=", "<parameter=")),
    ("glm", ("<arg_key>",)),
    ("phi4", ("functools[",)),
    ("phi4", ("<|/tool_call|>",)),
    ("phi4", ("<|tool|>", "<|/tool|>")),
    ("granite", ("<|tool_call|>",)),
    ("hermes", ("<tool_call>",)),
    ("llama3", ("<|python_tag|>",)),
)


def format_in_text(template: str) -> str | None:
    """The name of the format that a chat template shows; None if it shows none that is known."""
    shown = next((format for format, signs in _SIGNS if all(sign in template for sign in signs)), None)
    return "llama3" if shown is None and _LLAMA_INSTRUCTION.search(template) else shown


def choose_format(template: str, added_tokens: Collection[str] = ()) -> str:
    """The name of the format that a model with tools uses, from its chat template or else from its added tokens."""
    known = format_in_text(template) or format_in_text("\n".join(added_tokens))
    if known is None:
        log.warning(
            "The model's chat template has tools, but shows no format of calls that is known: calls are read as "
            "<tool_call> blocks. --tool-parser names another format."
        )
    return known or "hermes"


def written_in(format: str, shown: str) -> CallFormat | None:
    """The way to write calls in a format that a text with the first probe's call uses; the usual one if it uses none.

    None if the format has no JSON.
    """
    name, arguments = PROBES[0]
    ways = WRITTEN.get(format, ())
    return next((way for way in ways if way.start(name) + json.dumps(arguments) in shown), ways[0] if ways else None)
