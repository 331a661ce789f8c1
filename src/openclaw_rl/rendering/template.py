"""A model's chat template: Jinja in a sandbox, set up as Transformers sets it up for chat templates.

The import of Transformers takes seconds of every start. A test compares the two.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

#: Variables that the renderer sets, and arguments of Transformers that a client could expect to work.
RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "chat_template", "continue_final_message"})
#: The fields in which clients send a message's reasoning. Templates read the first two.
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """One compiled template. Raises TemplateSyntaxError for a text that is no template.

    * The template reads and calls only what Jinja's sandbox allows, and changes none of the values that it is given.
    * The values must be JSON data: the sandbox does not know which methods of other objects are dangerous.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = to_json
        environment.globals |= {
            "raise_exception": raise_exception,
            "strftime_now": strftime_now,
            "dict": TemplateDict(),
            "namespace": TemplateNamespace,
        }
        self._compiled = environment.from_string(text)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        *,
        answer: bool,
    ) -> str:
        """The chat as text; with `answer`, up to where the assistant's answer begins."""
        if reserved := RESERVED & variables.keys():
            raise ValueError(f"{min(reserved)} cannot be set by a request")
        return self._compiled.render(
            {
                "documents": None,
                **variables,
                "messages": [with_reasoning(message) for message in messages],
                "tools": tools or None,
                "add_generation_prompt": answer,
            }
        )


def with_reasoning(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message with its reasoning in the fields that templates read."""
    reasoning = next((message[name] for name in REASONING_FIELDS if message.get(name) is not None), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


class GenerationTag(Extension):
    """`{% generation %}` marks what a model wrote, for libraries that train on rendered chats. Here it does nothing."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_render_body"), [], [], body).set_lineno(line)

    def _render_body(self, caller: Macro) -> str:
        return caller()


class TemplateDict:
    """`dict` in a template, without the attributes of the class."""

    def __call__(self, *items: Any, **values: Any) -> dict[Any, Any]:
        return dict(*items, **values)

    def fromkeys(self, *arguments: Any) -> dict[Any, Any]:
        return dict.fromkeys(*arguments)


class TemplateNamespace(Namespace):
    """`namespace` in a template. It stores no name that begins with an underscore."""

    # `self` is taken by position, so that a template may store a value of that name.
    def __init__(*arguments: Any, **values: Any) -> None:
        self, *items = arguments
        attributes = dict(*items, **values)
        for name in attributes:
            check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        check_name(name)
        super().__setitem__(name, value)


def check_name(name: object) -> None:
    """Raise SecurityError for a name with an underscore. A mapping given to a namespace may have keys of any type."""
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a chat template cannot store {name!r} in a namespace: it begins with an underscore")


def raise_exception(message: str) -> None:
    raise TemplateError(message)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's filter escapes HTML, which models were not trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
