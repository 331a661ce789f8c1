"""Request bodies: the fields of OpenAI's API that have an effect, and this server's.

Unknown fields have no effect here. Those of a chat request are kept for another API, which may know them.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SkipValidation,
    TypeAdapter,
    ValidationError,
    ValidatorFunctionWrapHandler,
    field_validator,
)
from pydantic_core import from_json, to_json
from typing_extensions import TypedDict

from openclaw_rl.api.errors import ApiError
from openclaw_rl.config.options import describe_problem
from openclaw_rl.rendering.chat import IMAGE_PART, images_in
from openclaw_rl.rendering.memo import Memo

#: The most stop strings in a request; OpenAI has the same limit.
MAX_STOPS = 4
#: The highest temperature; OpenAI has the same limit.
MAX_TEMPERATURE = 2
#: The names that clients give to text parts.
TEXT_PART_TYPES = ("text", "input_text", "output_text")
#: The most completions of one prompt; only a mistake would ask for more.
MAX_CHOICES = 128
#: The longest names of sessions, tasks and groups.
MAX_NAME_CHARACTERS = 256
#: Fields that are refused, because an answer that ignores them would be wrong; and what to do instead.
UNSUPPORTED = {
    "presence_penalty": "leave it out or set it to 0",
    "frequency_penalty": "leave it out or set it to 0",
    "logit_bias": "leave it out",
    "functions": "use tools",
    "function_call": "use tool_choice",
    "modalities": 'leave it out or set it to ["text"]',
    "audio": "leave it out",
}
#: Those of them, and others, that another API gets as they are.
PASSED_ON = (
    *("presence_penalty", "frequency_penalty", "logit_bias", "temperature", "top_p", "top_k", "seed", "stop"),
    *("parallel_tool_calls", "reasoning_effort", "chat_template_kwargs"),
)
#: Values of these fields that are accepted, because they ask for nothing special.
ACCEPTED_VALUES = {"modalities": ["text"]}
#: How much memory the items of conversations may take, for each kind of them.
MAX_KNOWN_ITEMS_BYTES = 32_000_000

Item = TypeVar("Item")
#: A list of which only the first wrong item is reported: a hostile one has thousands.
ListOf = Annotated[list[Item], Field(fail_fast=True)]


class KnownItems:
    """Lets a list keep the items that were valid in an earlier request: a client sends a conversation again and again.

    They are shared between requests: nobody changes them.
    """

    def __init__(self) -> None:
        self._valid = Memo[bytes, Any](MAX_KNOWN_ITEMS_BYTES, lambda key, _: 3 * len(key))

    def __call__(self, given: Any, validate: ValidatorFunctionWrapHandler) -> Any:
        if not isinstance(given, list) or not given:
            return validate(given)
        keys = [bytes_of(item) if isinstance(item, dict) else b"" for item in given]
        known = [self._valid.get(key) for key in keys]
        new = [item for item, valid in zip(given, known, strict=True) if valid is None]
        try:
            validated = iter(validate(new) if new else ())
        except ValidationError:
            # It must say which item of the whole list is wrong.
            return validate(given)
        items = [next(validated) if valid is None else valid for valid in known]
        for key, was_known, item in zip(keys, known, items, strict=True):
            if key and was_known is None:
                self._valid.put(key, item)
        return items


def bytes_of(item: Mapping[str, Any]) -> bytes:
    """JSON that only equal items have; empty if an item cannot be written as JSON."""
    try:
        return to_json(item)
    except ValueError:
        return b""


class WireModel(BaseModel):
    """Base of request bodies and their parts."""

    model_config = ConfigDict(extra="ignore")


class TextPart(WireModel):
    type: str
    text: str


class ImagePart(WireModel):
    """An image as OpenAI's API takes it. Only a model behind another API may see it."""

    type: Literal["image_url"]
    image_url: dict[str, Any]


class Function(WireModel):
    name: str
    arguments: str = "{}"


class ToolCallPart(WireModel):
    id: str = ""
    type: Literal["function"] = "function"
    function: Function


class ChatMessage(WireModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | ListOf[TextPart | ImagePart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: ListOf[ToolCallPart] | None = None
    tool_call_id: str | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _known_parts(cls, content: Any) -> Any:
        if not isinstance(content, list):
            return content
        kinds = [part.get("type") for part in content if isinstance(part, dict)]
        other = next((kind for kind in kinds if kind not in (*TEXT_PART_TYPES, IMAGE_PART)), None)
        if other is not None:
            raise ValueError(f"content parts of type {other!r} are not supported, only text")
        images = [
            part.get("image_url") for part in content if isinstance(part, dict) and part.get("type") == IMAGE_PART
        ]
        if not all(isinstance(image, dict) and image.get("url") and isinstance(image["url"], str) for image in images):
            raise ValueError('an image is {"type": "image_url", "image_url": {"url": "data:image/png;base64,…"}}')
        return content


def named(function: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(function.get("name"), str):
        raise ValueError("a function needs a name")
    return function


# A dict rather than a model: it is used as it is.
class Tool(TypedDict):
    # Extra fields are kept: the chat template shows the model all that the client says about a tool.
    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]

    type: Literal["function"]
    function: Annotated[dict[str, Any], AfterValidator(named)]


#: All messages of a request at once: a call for each would take twice as long.
MESSAGES = TypeAdapter(list[ChatMessage])


class StreamOptions(WireModel):
    model_config = ConfigDict(strict=True)

    include_usage: bool = False


class ToolName(WireModel):
    name: str


class NamedTool(WireModel):
    """A value of `tool_choice`: the answer must call this function."""

    type: Literal["function"]
    function: ToolName


class PlainFormat(WireModel):
    type: Literal["text", "json_object"]


class NamedSchema(WireModel):
    model_config = ConfigDict(extra="allow")

    name: str = ""
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class JsonSchemaFormat(WireModel):
    """A value of `response_format`: the answer is JSON that fits this schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


class CaptureFields(WireModel):
    """What a request may say about its session and its recording, on every wire."""

    session_id: str | None = None
    # Clients also send the values of the header X-Session-Done, such as "1".
    session_done: Annotated[bool, Field(strict=False)] | None = None
    turn_type: str | None = None
    prompt_cache_key: str | None = None
    store: bool | None = None


class ChatRequest(CaptureFields):
    """The body of POST /v1/chat/completions. Requests of other wires are translated into one."""

    # OpenAI refuses numbers in quotes too.
    model_config = ConfigDict(strict=True, extra="allow")

    messages: ListOf[ChatMessage] = Field(min_length=1)
    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    tools: ListOf[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=MAX_TEMPERATURE)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    seed: int | None = None
    stop: str | ListOf[str] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Any = None
    response_format: Annotated[PlainFormat | JsonSchemaFormat, Field(discriminator="type")] | None = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None

    def message_dicts(self) -> list[dict[str, Any]]:
        """The messages as templates and the ledger take them."""
        return MESSAGES.dump_python(self.messages, exclude_none=True)  # type: ignore[no-any-return]

    @property
    def stops(self) -> list[str]:
        given = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [stop for stop in given if stop]

    @property
    def offered_tools(self) -> Sequence[Mapping[str, Any]]:
        """The tools that the model may use."""
        return [] if self.tool_choice == "none" or not self.tools else self.tools

    @property
    def top_logprobs_wanted(self) -> int | None:
        """How many likeliest tokens to list at each position; None if the answer has no log-probs at all."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class TranslatedRequest(ChatRequest):
    """A request of another wire, whose translator has checked its messages."""

    messages: ListOf[ChatMessage] = Field(default_factory=list)
    translated: SkipValidation[list[dict[str, Any]]]
    details: SkipValidation[dict[str, Any]] = Field(default_factory=dict)
    """What is recorded with the answer, so that the wire can give it again."""

    def message_dicts(self) -> list[dict[str, Any]]:
        return self.translated


class TextRequest(ChatRequest):
    """A text that is continued as it is, without the chat template. Its only message is the text."""

    prompt: str | list[int]
    """As the client gave it: text, or token ids."""


Body = TypeVar("Body", bound=WireModel)


def parse(model: type[Body], body: bytes) -> Body:
    """Read a request body; raises 400 if it is not such a request or a field has a wrong value."""
    try:
        # In two steps, because pydantic needs twice the time to do both at once.
        return model.model_validate(from_json(body))
    except ValueError:
        pass
    try:
        # It says where in the JSON the fault is, and calls what it is by its name in JSON.
        return model.model_validate_json(body)
    except ValidationError as error:
        raise malformed(error) from None


def check_supported(request: ChatRequest, messages: Sequence[Mapping[str, Any]], *, passed_on: bool) -> None:
    """Raise 400 for what is not supported. If the request is `passed_on` to another API, that API says the rest."""
    for name in filter(request.model_fields_set.__contains__, UNSUPPORTED):
        value = getattr(request, name)
        if value and value != ACCEPTED_VALUES.get(name) and not (passed_on and name in PASSED_ON):
            raise ApiError(400, f"{name} is not supported; {UNSUPPORTED[name]}.", param=name)
    for index, message in enumerate(messages):
        if not passed_on and images_in(message.get("content")):
            reason = "this model cannot see images; send text only"
            raise ApiError(400, f"messages.{index}.content: {reason}.", param=f"messages.{index}.content")
    if len(request.stops) > MAX_STOPS and not passed_on:
        raise ApiError(400, f"stop takes at most {MAX_STOPS} strings.", param="stop")
    if request.top_logprobs and not request.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs to be true.", param="top_logprobs")
    if passed_on and request.logprobs:
        raise ApiError(400, "This server passes no log-probs on; leave logprobs out.", param="logprobs")


def malformed(error: ValidationError) -> ApiError:
    """The error for the first thing that is wrong with a body."""
    errors = error.errors(include_url=False)
    first = errors[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"The body is not valid JSON: {first['msg'].removeprefix('Invalid JSON: ')}.")
    place = place_of(first["loc"])
    # Where a field allows several types, the one that fits best fails furthest inside.
    same_field = [other for other in errors if place_of(other["loc"])[: len(place)] == place]
    first = max(same_field, key=lambda other: len(place_of(other["loc"])))
    param = ".".join(place_of(first["loc"])) or None
    message = describe_problem(first)
    if first["type"] == "union_tag_invalid":
        message = "{tag!r} is not supported, only {expected_tags}".format(**first["ctx"])
    elif first["type"] == "literal_error" and param and param.endswith(".type"):
        message = f"{first['input']!r} is not supported, only {first['ctx']['expected']}"
    if not param:
        if first["type"] == "value_error":
            return ApiError(400, f"{message[0].upper()}{message[1:]}.")
        return ApiError(400, "The body must be a JSON object.")
    return ApiError(400, f"{param}: {message}.", param=param)


def place_of(location: Sequence[int | str]) -> list[str]:
    """A field's names and indices, without the types that pydantic adds where a field allows several."""
    return [part for part in map(str, location) if part != "str" and not part.startswith(("list[", "function-wrap["))]


def body_schema(model: type[BaseModel]) -> dict[str, Any]:
    """What `openapi_extra` of a route says about its request body."""
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    definitions = schema.pop("$defs", {})
    content = {"application/json": {"schema": inline(schema, definitions)}}
    return {"requestBody": {"required": True, "content": content}}


def inline(schema: Any, definitions: dict[str, Any]) -> Any:
    """A JSON schema without references."""
    if isinstance(schema, list):
        return [inline(item, definitions) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return inline(definitions[schema["$ref"].rsplit("/", 1)[-1]], definitions)
    # A discriminator names its alternatives by reference.
    return {key: inline(value, definitions) for key, value in schema.items() if key != "discriminator"}
