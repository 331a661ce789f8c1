"""From a conversation to a prompt: the model's chat template, and tools also for templates that do not support them."""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import TemplateError, TemplateSyntaxError
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.runtime import LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from openclaw_rl.models import BadModelFolder
from openclaw_rl.rendering.call_history import QUESTION, RESULTS, HistoryForm, decoded, find_form, probe
from openclaw_rl.rendering.known import KnownMessage, remembered
from openclaw_rl.rendering.memo import shared
from openclaw_rl.rendering.response import reasoning_of
from openclaw_rl.rendering.tokenizer import NO_CHAT, ChatTokenizer, Detokenizer, EncodedChat, TooLong
from openclaw_rl.rendering.tool_formats import WRITTEN, CallFormat, choose_format, written_in

log = logging.getLogger(__name__)

Message = dict[str, Any]

#: The type of content parts that are images, as OpenAI writes them.
IMAGE_PART = "image_url"
#: English text has about so many, whatever the tokenizer.
CHARACTERS_PER_TOKEN = 4

#: Used if the model folder has no template. Most chat models without one were trained on this format.
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
#: Marks where a template writes the system message. A Unicode noncharacter, which no template contains.
SYSTEM_MARK = "\ufdd0"
#: A tool, to see whether a template shows it.
PROBE_TOOL: dict[str, Any] = {"type": "function", "function": {"name": "a_probe", "description": "", "parameters": {}}}
#: Where a loop of a template stands.
LOOP_FIELDS = frozenset({"first", "last", "index", "index0", "length"})
DICT_ATTRIBUTES = frozenset(dir(dict))
#: Variables that the renderer sets, and arguments of Transformers that a client could expect to work.
RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "chat_template", "continue_final_message"})
#: The fields in which clients send a message's reasoning. Templates read the first two.
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
#: Added to the system prompt if the model's template does not support tools.
TOOL_INSTRUCTIONS = """You can call functions. These are available, one JSON schema a line:
<tools>
{schemas}
</tools>
To call one, write its name and arguments as JSON between tags, and nothing else:
{example}"""


class ChatError(ValueError):
    """The conversation cannot be rendered for this model; the message says why."""


class TemplateInput(NamedTuple):
    """All input of a chat template."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    options: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A prompt as token ids."""

    ids: list[int]
    opens_reasoning: bool
    """Whether the prompt ends inside a `<think>` block, so that the response begins with reasoning."""
    ends_reasoning: bool = False
    """Whether the prompt ends with a `<think>` block, so that the response has no reasoning."""
    chat: TemplateInput | None = None
    """The chat itself, for a model that is given messages; there are no ids then."""
    earlier: EncodedChat = NO_CHAT
    """An earlier chat, with whose `known_ids` first ids it begins."""

    def begins_with(self, *parts: Sequence[int]) -> bool:
        """Whether it begins with these ids. Those of the earlier chat are not compared again."""
        start = 0
        for part in parts:
            same = self.earlier.known_ids if part is self.earlier.ids and not start else 0
            if self.ids[start + same : start + len(part)] != part[same:]:
                return False
            start += len(part)
        return True

    @property
    def length(self) -> int:
        """Its tokens; of a chat, about how many they are."""
        return len(self.ids) if self.chat is None else estimated_tokens(self.chat)


class ChatRenderer:
    """Renders conversations for one model.

    - Only the template can write control tokens. A message that contains their spelling is rendered as ordinary text.
    - A conversation that the template does not accept raises `ChatError`; nothing is left out or changed silently.
    - Tools work with every template. If a template does not support them, they become ordinary messages.
    - Earlier calls and their results are given to a template in the form that it needs.
    """

    def __init__(self, folder: Path) -> None:
        self.tokenizer = ChatTokenizer(folder)
        self.detokenizer = Detokenizer(self.tokenizer.backend)
        try:
            self.template = ChatTemplate(self.tokenizer.template or CHATML)
        except TemplateSyntaxError as error:
            raise BadModelFolder(f"The chat template in {folder} is broken: {error}.") from None
        if not self.tokenizer.template:
            known = self.tokenizer.backend.token_to_id("<|im_start|>") is not None
            log.warning(
                "%s has no chat template, so ChatML is used, which its tokenizer %s: put the template that the model "
                "was trained with there, as chat_template.jinja, or expect poor answers.",
                folder,
                "knows" if known else "does not know",
            )
        self.reasoning = reasoning_of(self.template.text)
        self._guarded = remembered(self._guard_message)
        self._guarded_tools = remembered(self._guard_tools)
        self._learn_about_tools()

    def _learn_about_tools(self) -> None:
        """Find out what the template does with tools, calls and results."""
        template = self.template.text
        shows_tools = self._shows([QUESTION], [PROBE_TOOL])
        self._in_system = not shows_tools and self._shows(tools_in_system([QUESTION], functions_text([PROBE_TOOL])))
        self._instructs = not shows_tools and not self._in_system
        form = find_form(partial(self._try, tools=[PROBE_TOOL]), template)
        self.tool_format = "hermes"
        if not self._instructs or form is not None:
            self.tool_format = choose_format(template, self.tokenizer.added_tokens)
        if self._instructs and self.tool_format not in WRITTEN:
            self.tool_format, form = "hermes", None
        self.history_form = form or HistoryForm()
        self._writes_calls = form is not None
        result = [QUESTION, {"role": "assistant", "content": "-"}, {"role": "tool", "content": RESULTS[0]}]
        self._writes_results = not self._instructs and RESULTS[0] in (self._try(result) or "")
        shown = self._try(self.history_form.apply(probe()), [PROBE_TOOL]) if self._writes_calls else None
        self._written = written_in(self.tool_format, shown or "") or WRITTEN["hermes"][0]

    def text(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
        *,
        answer: bool = True,
    ) -> str:
        """The chat as the template writes it; with `answer`, up to where the assistant's answer begins."""
        formed = self.history_form.apply([template_message(message) for message in messages])
        chat = [self._guarded(message) for message in formed]
        given = self._guarded_tools(tools) if tools else []
        if isinstance(given, str):
            write = with_instructions if self._instructs else tools_in_system
            chat, given = write(chat, given), []
        return self._render(chat, given, options or {}, answer)

    def _guard_message(self, message: Message) -> Message:
        """A message of which no part can become a control token."""
        guarded: Message = map_text(message, self.tokenizer.guard)
        # Written after the guard, because only messages must not have control tokens.
        if self._writes_calls:
            return guarded
        return spell_out_message(guarded, self._written, results=not self._writes_results)

    def _guard_tools(self, tools: Sequence[Any]) -> list[Any] | str:
        """The same for tools; the text that shows them if the template does not."""
        guarded: list[Any] = map_text(list(tools), self.tokenizer.guard)
        if self._instructs:
            return tool_instructions(guarded, self._written)
        return functions_text(guarded) if self._in_system else guarded

    def render(self, chat: TemplateInput, at_most: int | None = None) -> RenderedPrompt:
        """The prompt of a chat. Raises ChatError, and TooLong if it has more than `at_most` tokens."""
        return self.prompt(self.text(*chat), at_most)

    def count(self, text: str) -> int:
        """How many tokens a text has."""
        return len(self.tokenizer.backend.encode(text).ids)

    @cached_property
    def default_system(self) -> str:
        """The system message that the template writes where a conversation has none; empty if it writes none."""
        user = {"role": "user", "content": "Hello"}
        try:
            before, mark, after = self.text([{"role": "system", "content": SYSTEM_MARK}, user]).partition(SYSTEM_MARK)
            without = self.text([user])
        except ChatError:
            return ""
        if (
            not mark
            or len(without) < len(before + after)
            or not (without.startswith(before) and without.endswith(after))
        ):
            return ""
        return without[len(before) : len(without) - len(after)]

    def prompt(self, text: str, at_most: int | None = None) -> RenderedPrompt:
        """Tokenise a text that `text` returned. Raises TooLong if it has more than `at_most` tokens."""
        end = text[-64:]
        ids, earlier = self.tokenizer.encode_next(text, at_most)
        return RenderedPrompt(ids, self.reasoning.opened_by(end), self.reasoning.ended_by(end), earlier=earlier)

    def text_prompt(self, given: str | list[int], at_most: int) -> RenderedPrompt:
        """The prompt of a text that is continued as it is; control tokens in it are control tokens.

        Token ids are used as they are. Raises TooLong if there are more than `at_most` tokens.
        """
        if not isinstance(given, str):
            if len(given) > at_most:
                raise TooLong
            return RenderedPrompt(shared(given), opens_reasoning=False)
        ids = self.tokenizer.encode_chat(given, at_most)
        beginning = self.tokenizer.beginning
        begins = ids[: len(beginning)] == beginning
        return RenderedPrompt(ids if begins else beginning + ids, opens_reasoning=False)

    def _render(self, chat: list[Message], tools: list[Any], options: Mapping[str, Any], answer: bool) -> str:
        variables = {**self.tokenizer.special_tokens, **map_text(dict(options), self.tokenizer.guard)}
        try:
            return self.template.render(chat, tools, variables, answer=answer)
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
            raise ChatError(f"The model's chat template does not accept this conversation: {error}") from error

    def _try(self, chat: Sequence[Message], tools: Sequence[Any] = ()) -> str | None:
        """The text of a conversation; None if the template refuses it."""
        try:
            return self._render(list(chat), list(tools), {}, True)
        except ChatError:
            return None

    def _shows(self, chat: Sequence[Message], tools: Sequence[Any] = ()) -> bool:
        """Whether the template writes the probe of a tool."""
        return PROBE_TOOL["function"]["name"] in (self._try(chat, tools) or "")


class MessageRenderer:
    """In the place of a `ChatRenderer`, for a model that is given messages: its template and its tokens are elsewhere.

    Numbers of tokens are estimates.
    """

    default_system = ""

    def render(self, chat: TemplateInput, at_most: int | None = None) -> RenderedPrompt:
        return RenderedPrompt([], opens_reasoning=False, chat=chat)

    def text_prompt(self, given: str | list[int], at_most: int) -> RenderedPrompt:
        """The prompt of a text that is continued as it is. Raises ChatError for token ids."""
        if not isinstance(given, str):
            raise ChatError("The tokens of this model are not known here: give the prompt as text")
        return self.render(TemplateInput([{"role": "user", "content": given}]))

    def count(self, text: str) -> int:
        return len(text) // CHARACTERS_PER_TOKEN + 1


#: Whatever makes prompts for a server.
Renderer = ChatRenderer | MessageRenderer


def estimated_tokens(chat: TemplateInput) -> int:
    """About how many tokens a chat has."""
    characters = sum(len(content_text(message.get("content"))) for message in chat.messages)
    calls = sum(len(str(message["tool_calls"])) for message in chat.messages if message.get("tool_calls"))
    return (characters + calls + len(str(chat.tools))) // CHARACTERS_PER_TOKEN + len(chat.messages)


def template_message(message: Message) -> Message:
    """A message as templates expect it: content as text, and known roles."""
    if message["role"] != "developer" and isinstance(message.get("content"), str):
        return message
    return converted(message)


@remembered
def converted(message: Message) -> Message:
    expected = KnownMessage({**message, "content": content_text(message.get("content"))})
    if message["role"] == "developer":
        expected["role"] = "system"
    return expected


def content_text(content: Any) -> str:
    """The text of a message's content, which is a string, a list of parts or None. Images have none."""
    if isinstance(content, list):
        return "".join(part["text"] for part in content if part.get("type") != IMAGE_PART)
    return content or ""


def images_in(content: Any) -> list[str]:
    """The URLs of the images in a message's content."""
    parts = content if isinstance(content, list) else ()
    return [part["image_url"]["url"] for part in parts if part.get("type") == IMAGE_PART]


@remembered
def tools_message(tools: Sequence[Any]) -> Message:
    """Tools as the first message of a conversation, in a record."""
    return KnownMessage({"role": "tools", "tools": tools})


def functions_text(tools: Sequence[Mapping[str, Any]]) -> str:
    return json.dumps([tool["function"] for tool in tools], ensure_ascii=False)


def tools_in_system(chat: Sequence[Message], functions: str) -> list[Message]:
    """Tools as a field of the system message, where some templates look for them."""
    first, *others = chat
    if first["role"] != "system":
        first, others = {"role": "system", "content": ""}, list(chat)
    return [{**first, "tools": functions}, *others]


def tool_instructions(tools: Sequence[Mapping[str, Any]], format: CallFormat) -> str:
    """What tells a model about its tools whose template does not show them."""
    schemas = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return TOOL_INSTRUCTIONS.format(schemas=schemas, example=format.write("function-name", {"argument": "value"}))


def with_instructions(chat: list[Message], instructions: str) -> list[Message]:
    """Write instructions into the system message."""
    if chat and chat[0]["role"] == "system":
        first = {**chat[0], "content": f"{chat[0]['content']}\n\n{instructions}"}
        return [first, *chat[1:]]
    return [{"role": "system", "content": instructions}, *chat]


def spell_out_message(message: Message, format: CallFormat = WRITTEN["hermes"][0], *, results: bool = True) -> Message:
    """A message without tool fields: calls as text in the content; with `results`, a result as a user message."""
    if message["role"] == "tool" and results:
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    if not calls:
        return message
    separator = format.separator or ""
    written = separator.join(format.write(call["name"], decoded(call["arguments"])) for call in calls)
    return {"role": message["role"], "content": "\n".join(filter(None, [message["content"], written]))}


def map_text(value: Any, change: Callable[[str], str]) -> Any:
    """Apply a function to every string in nested data."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [map_text(item, change) for item in value]
    if isinstance(value, dict):
        return {map_text(key, change): map_text(item, change) for key, item in value.items()}
    return value


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox. What it need not examine: the place in a loop, and fields of JSON data."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is LoopContext and attribute in LOOP_FIELDS:
            return getattr(obj, attribute)
        if type(obj) is dict and attribute not in DICT_ATTRIBUTES and attribute in obj:
            return obj[attribute]
        return super().getattr(obj, attribute)


class ChatTemplate:
    """One compiled template: Jinja in a sandbox, set up as Transformers sets it up for chat templates.

    Raises TemplateSyntaxError for a text that is no template. The import of Transformers would take seconds of every
    start; a test compares the two.

    * The template reads and calls only what Jinja's sandbox allows, and changes none of the values that it is given.
    * The values must be JSON data: the sandbox does not know which methods of other objects are dangerous.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        environment = TemplateSandbox(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols])
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
