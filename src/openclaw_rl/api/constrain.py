"""What a request demands of its answer: JSON, JSON that fits a schema, or tool calls."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from openclaw_rl.api.errors import ApiError
from openclaw_rl.api.wire import ChatRequest, JsonSchemaFormat, NamedTool
from openclaw_rl.rendering.call_format import CallFormat
from openclaw_rl.rendering.chat import RenderedPrompt
from openclaw_rl.types import Constraint, JsonForm, Thinking

#: The largest schema, as JSON, and how deeply it may be nested. The engine bounds what a schema of this size may cost.
MAX_SCHEMA_BYTES = 100_000
MAX_SCHEMA_DEPTH = 60
ANY_OBJECT = '{"type": "object"}'


class AnswerRules:
    """Reads what requests demand, for one model.

    - A demand that cannot be met is refused with a 400 that names the field.
    - Tool calls have the format in which the model's template writes them.
    """

    def __init__(self, calls: CallFormat, thinks: bool, constrains: bool) -> None:
        """`thinks`: whether the model may begin with reasoning; `constrains`: whether the sampler can constrain."""
        self.calls = calls
        self.thinks = thinks
        self.constrains = constrains

    def constraint(self, request: ChatRequest) -> Constraint | None:
        """The constraint of a request's answers, without regard to reasoning; None if they are free."""
        if request.response_format is None and not request.tools and not must_call(request):
            return None
        content = content_form(request)
        tools = self._demanded_tools(request, content is not None)
        if content is None and not tools:
            return self._strict_calls(request)
        field = "response_format" if content else "tool_choice"
        if not self.constrains:
            raise ApiError(400, f"This server's engine cannot restrict answers; leave {field} out.", param=field)
        one = isinstance(request.tool_choice, NamedTool) or request.parallel_tool_calls is False
        forms = tuple(self._call_form(tool) for tool in tools)
        return Constraint(None if must_call(request) else content, forms, None if one else self.calls.separator)

    def _strict_calls(self, request: ChatRequest) -> Constraint | None:
        """The constraint of free answers whose calls of strict tools must fit; None if no tool is strict.

        Where the engine cannot constrain, calls are free, as those of other tools are: clients ask for strict tools by
        default.
        """
        tools = [tool["function"] for tool in request.offered_tools]
        if not self.constrains or not any(tool.get("strict") is True for tool in tools):
            return None
        forms = tuple(self._call_form(tool if tool.get("strict") is True else {"name": tool["name"]}) for tool in tools)
        separator = None if request.parallel_tool_calls is False else self.calls.separator
        return Constraint(None, forms, separator, trigger=self.calls.trigger)

    def for_prompt(self, constraint: Constraint, prompt: RenderedPrompt) -> Constraint:
        """The constraint with the reasoning that a prompt leaves room for."""
        if prompt.opens_reasoning:
            return replace(constraint, thinking=Thinking.BEGUN)
        thinking = Thinking.OPTIONAL if self.thinks and not prompt.ends_reasoning else Thinking.NONE
        return replace(constraint, thinking=thinking)

    def _demanded_tools(self, request: ChatRequest, restricted: bool) -> Sequence[Mapping[str, Any]]:
        """The functions that the answer may call, if it must call one or is restricted otherwise. Raises ApiError."""
        tools = [tool["function"] for tool in request.offered_tools]
        choice = request.tool_choice
        if must_call(request) and not tools:
            raise ApiError(400, "tool_choice demands a call, but there are no tools.", param="tool_choice")
        if isinstance(choice, NamedTool):
            chosen = [tool for tool in tools if tool["name"] == choice.function.name]
            if not chosen:
                name = choice.function.name
                raise ApiError(400, f"tool_choice names {name!r}, which is not one of the tools.", param="tool_choice")
            return chosen
        return tools if must_call(request) or restricted else []

    def _call_form(self, tool: Mapping[str, Any]) -> JsonForm:
        parameters = tool.get("parameters") or {"type": "object", "properties": {}}
        if not isinstance(parameters, dict):
            raise ApiError(400, f"The parameters of {tool['name']!r} are not a JSON schema.", param="tools")
        # Arguments are always an object, whatever the schema leaves out.
        schema = schema_text({"type": "object", **parameters}, "tools")
        return JsonForm(schema, self.calls.start(tool["name"]), self.calls.after, strict=tool.get("strict") is True)


def must_call(request: ChatRequest) -> bool:
    return request.tool_choice not in (None, "none", "auto")


def content_form(request: ChatRequest) -> JsonForm | None:
    """The form of the answer's text; None if it is free."""
    wanted = request.response_format
    if wanted is None or wanted.type == "text":
        return None
    if not isinstance(wanted, JsonSchemaFormat):
        return JsonForm(ANY_OBJECT)
    given = wanted.json_schema
    strict = given.strict is True
    return JsonForm(schema_text(given.schema_ or {"type": "object"}, "response_format"), strict=strict)


def schema_text(schema: Mapping[str, Any], param: str) -> str:
    """A schema as JSON. Raises ApiError for one that is too large."""
    if depth_of(schema) > MAX_SCHEMA_DEPTH:
        raise ApiError(400, f"The schema is nested deeper than {MAX_SCHEMA_DEPTH} levels.", param=param)
    text = json.dumps(schema)
    if len(text) > MAX_SCHEMA_BYTES:
        raise ApiError(400, f"The schema is larger than {MAX_SCHEMA_BYTES // 1000} KB.", param=param)
    return text


def depth_of(value: Any) -> int:
    """How deeply a value is nested; stops counting when it is certain that it is too deep."""
    depth = 0
    level = [value]
    while level and depth <= MAX_SCHEMA_DEPTH:
        depth += 1
        parts = [part.values() if isinstance(part, dict) else part for part in level if isinstance(part, dict | list)]
        level = [item for part in parts for item in part]
    return depth
