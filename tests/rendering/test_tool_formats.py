"""Each family's way with tool calls: found from its template, read as it is written, and given back as it is wanted."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, get_args

import pytest
from tokenizers import AddedToken

from openclaw_rl.api.options import ToolParserName
from openclaw_rl.rendering.call_format import call_format
from openclaw_rl.rendering.chat import ChatRenderer
from openclaw_rl.rendering.response import AssistantMessage, ResponseParser
from openclaw_rl.rendering.tool_calls import ToolParser
from openclaw_rl.rendering.tool_formats import FORMATS
from support.tiny_models import tiny_tokenizer


class Family(NamedTuple):
    """A small template in the style of a family."""

    template: str
    format: str
    control: tuple[str, ...]
    several: bool = True
    """Whether its model writes several calls in one answer."""


TOOLS_SHOWN = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
#: The lines of other roles in the style of Mistral.
MISTRAL_OTHERS = """{% elif m.role == 'tool' %}\
{% if m.tool_call_id | length != 9 %}{{ raise_exception('id') }}{% endif %}\
[TOOL_RESULTS]{{ m.tool_call_id }} {{ m.content }}[/TOOL_RESULTS]{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"""
MISTRAL_USER = """{% for m in messages %}{% if m.role == 'user' %}{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}\
[/AVAILABLE_TOOLS]{% endif %}[INST]{{ m.content }}[/INST]{% elif m.tool_calls is defined %}"""
MISTRAL_CONTROL = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[INST]", "[/INST]", "</s>")
CHATML_REST = """{% elif m.role == 'tool' %}<|im_start|>user
<tool_response>{{ m.content }}</tool_response><|im_end|>
{% else %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
GEMMA_VALUE = """{% macro value(v) %}{% if v is string %}QUOTE{{ v }}QUOTE{% elif v is boolean %}{{ v | lower }}\
{% elif v is mapping %}{ {%- for k, i in v | dictsort %}\
{{ ',' if not loop.first }}{{ k }}:{{ value(i) }}{% endfor -%} }\
{% elif v is sequence %}[{% for i in v %}{{ ',' if not loop.first }}{{ value(i) }}{% endfor %}]\
{% else %}{{ v }}{% endif %}{% endmacro %}"""


def gemma(opening: str, closing: str, quote: str) -> str:
    return (
        GEMMA_VALUE.replace("QUOTE", quote)
        + TOOLS_SHOWN
        + "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for c in m.tool_calls or [] %}"
        + f"{opening}call:{{{{ c.function.name }}}}{{{{ value(c.function.arguments) }}}}{closing}{{% endfor %}}"
        + "{% if m.role == 'tool' %}response:{{ m.name }}{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
        + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


SECTION, SECTION_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
BEGIN, SEPARATOR, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


def deepseek(before: str, after: str, condition: str) -> str:
    """Arguments are joined as text; nothing shows tools; an empty answer is written if there is content."""
    return (
        "{% for m in messages %}{% if m.role in ['system', 'user'] %}<｜User｜>{{ m.content }}{% endif %}"
        "{% if m.role == 'assistant' and m.tool_calls %}<｜Assistant｜>" + SECTION + "{% for c in m.tool_calls %}"
        "{{ '"
        + BEGIN
        + before
        + "' + c.function.name + '"
        + after.replace("\n", "\\n")
        + "' + c.function.arguments }}"
        + ("\n```" if "json" in after else "")
        + END
        + "{% endfor %}"
        + SECTION_END
        + "</s>{% endif %}"
        "{% if m.role == 'assistant' and " + condition + " %}<｜Assistant｜>{{ m.content }}</s>{% endif %}"
        "{% if m.role == 'tool' %}<｜tool▁output▁begin｜>{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<｜Assistant｜>{% endif %}"
    )


DEEPSEEK_CONTROL = (SECTION, SECTION_END, BEGIN, SEPARATOR, END, "<｜User｜>", "<｜Assistant｜>", "</s>")
HARMONY = """<|start|>developer<|message|>{{ tools | tojson if tools }}<|end|>{% set called = namespace(name=none) %}
{%- for m in messages %}{% if m.role == 'assistant' %}{% if 'tool_calls' in m %}
{%- if m.content and m.thinking %}{{ raise_exception('either content or thinking') }}{% endif %}
{%- if m.content or m.thinking %}\
<|start|>assistant<|channel|>analysis<|message|>{{ m.content or m.thinking }}<|end|>{% endif %}
{%- set called.name = m.tool_calls[0].function.name %}\
<|start|>assistant to=functions.{{ called.name }}<|channel|>commentary \
json<|message|>{{ m.tool_calls[0].function.arguments | tojson }}<|call|>
{%- else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{% endif %}
{%- elif m.role == 'tool' %}<|start|>functions.{{ called.name }} to=assistant<|message|>{{ m.content | tojson }}<|end|>
{%- else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""
HARMONY_CONTROL = ("<|start|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")
FAMILIES = {
    "mistral list": Family(
        MISTRAL_USER
        + """[TOOL_CALLS] [{% for c in m.tool_calls %}{{ ', ' if not loop.first }}{{ (c.function | tojson)[:-1] }}\
{% if c.id | length != 9 %}{{ raise_exception('id') }}{% endif %}, "id": "{{ c.id }}"}{% endfor %}]</s>"""
        + MISTRAL_OTHERS,
        "mistral",
        MISTRAL_CONTROL,
    ),
    "mistral names": Family(
        MISTRAL_USER
        + """{% for c in m.tool_calls %}{% if c.id | length != 9 %}{{ raise_exception('id') }}{% endif %}[TOOL_CALLS]\
{{ c.function.name }}[CALL_ID]{{ c.id }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}</s>"""
        + MISTRAL_OTHERS,
        "mistral",
        MISTRAL_CONTROL,
    ),
    "qwen3 coder": Family(
        TOOLS_SHOWN
        + """{% for m in messages %}{% if m.tool_calls %}<|im_start|>assistant
{{ m.content }}{% for c in m.tool_calls %}
<tool_call>
<function={{ c.function.name }}>
{% for key, value in c.function.arguments | items %}
<parameter={{ key }}>
{{ (value | tojson) if value is mapping or (value is sequence and value is not string) else (value | string) }}
</parameter>
{% endfor %}
</function>
</tool_call>{% endfor %}<|im_end|>
"""
        + CHATML_REST,
        "qwen3_coder",
        ("<|im_start|>", "<|im_end|>"),
    ),
    "glm": Family(
        TOOLS_SHOWN
        + """{% for m in messages %}{% if m.tool_calls %}<|im_start|>assistant
{{ m.content }}{% for c in m.tool_calls %}
<tool_call>{{ c.function.name }}
{% for key, value in c.function.arguments.items() %}
<arg_key>{{ key }}</arg_key>
<arg_value>{{ value if value is string else value | tojson }}</arg_value>
{% endfor %}
</tool_call>{% endfor %}<|im_end|>
"""
        + CHATML_REST,
        "glm",
        ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>"),
    ),
    "gemma 4": Family(
        gemma("<|tool_call>", "<tool_call|>", '<|"|>'),
        "gemma4",
        ("<|im_start|>", "<|im_end|>", "<|tool_call>", "<tool_call|>", '<|"|>'),
    ),
    "functiongemma": Family(
        gemma("<start_function_call>", "<end_function_call>", "<escape>"),
        "functiongemma",
        ("<|im_start|>", "<|im_end|>", "<start_function_call>", "<end_function_call>", "<escape>"),
    ),
    "gpt-oss": Family(HARMONY, "harmony", HARMONY_CONTROL, several=False),
    "phi 4 mini": Family(
        """{% for m in messages %}{% if m.role == 'system' and m.tools %}<|system|>{{ m.content }}<|tool|>{{ m.tools }}\
<|/tool|><|end|>{% else %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endif %}{% endfor %}\
{% if add_generation_prompt %}<|assistant|>{% endif %}""",
        "phi4",
        (
            "<|system|>",
            "<|user|>",
            "<|assistant|>",
            "<|tool|>",
            "<|/tool|>",
            "<|end|>",
            "<|tool_call|>",
            "<|/tool_call|>",
        ),
    ),
    "granite": Family(
        "{% if tools %}Answer with <|tool_call|> and a list.\n{{ tools | tojson }}{% endif %}{% for m in messages %}"
        "<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content }}<|end_of_text|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}",
        "granite",
        ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>", "<|tool_call|>"),
    ),
    "deepseek v3": Family(
        deepseek(f"function{SEPARATOR}", "\n```json\n", "m.content is not none"), "deepseek", DEEPSEEK_CONTROL
    ),
    "deepseek v3.1": Family(deepseek("", SEPARATOR, "not m.tool_calls"), "deepseek", DEEPSEEK_CONTROL),
    "llama 3": Family(
        TOOLS_SHOWN
        + """{% for m in messages %}{% if m.tool_calls %}{% if m.tool_calls | length > 1 %}{{ raise_exception('one') }}\
{% endif %}<|im_start|>assistant
<|python_tag|>{"name": "{{ m.tool_calls[0].function.name }}", \
"parameters": {{ m.tool_calls[0].function.arguments | tojson }}}\
<|im_end|>
"""
        + CHATML_REST,
        "llama3",
        ("<|im_start|>", "<|im_end|>", "<|python_tag|>"),
        several=False,
    ),
}
PARAMETERS = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "digits": {"type": "string"},
        "flag": {"type": ["boolean", "null"]},
        "deep": {"type": "object"},
    },
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "", "parameters": PARAMETERS}}
    for name in ("look", "get.up-1")
]
ARGUMENTS = {
    "text": 'a "line"\nand {<b>}, é: [1]',
    "digits": "12",
    "flag": True,
    "deep": {"list": [1, 2.5, False, "x"], "empty": {}},
}
USER = {"role": "user", "content": "Hello"}


def call(name: str, id: str, **arguments: Any) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


CALLS = [call("look", "callAAAAAAAAAAAAAAAAAAAAAAAA", **ARGUMENTS), call("get.up-1", "")]


@pytest.fixture
def renderer_of(tmp_path: Path) -> Callable[[Family], ChatRenderer]:
    def make(family: Family) -> ChatRenderer:
        tokenizer = tiny_tokenizer()
        tokenizer.add_special_tokens([AddedToken(text, special=True) for text in family.control])
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        (tmp_path / "chat_template.jinja").write_text(family.template)
        return ChatRenderer(tmp_path)

    return make


def answer_of(renderer: ChatRenderer, ids: list[int], tools: list[dict[str, Any]], group: int) -> dict[str, Any]:
    """The message that a server makes of these tokens."""
    format = FORMATS[renderer.tool_format]
    shown = renderer.detokenizer.showing(format.all_markers | renderer.reasoning.markers)
    parser = ResponseParser(shown, tools=ToolParser(format, tools) if tools else None, reasoning=renderer.reasoning)
    message = AssistantMessage()
    deltas = [delta for start in range(0, len(ids), group) for delta in parser.push(ids[start : start + group])[1]]
    for delta in deltas + parser.flush():
        message.add(delta)
    return message.body()


def said(message: dict[str, Any]) -> list[tuple[str, Any]]:
    calls = [each["function"] for each in message.get("tool_calls", ())]
    return [(each["name"], json.loads(each["arguments"])) for each in calls]


families = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)


@families
def test_what_the_template_writes_is_read_back(renderer_of: Callable[[Family], ChatRenderer], family: Family) -> None:
    renderer = renderer_of(family)
    assert renderer.tool_format == family.format
    calls = CALLS if family.several else CALLS[:1]
    prompt = renderer.text([USER], TOOLS)
    whole = renderer.text([USER, {"role": "assistant", "content": None, "tool_calls": calls}], TOOLS, answer=False)
    assert whole.startswith(prompt)
    ids = renderer.tokenizer.encode_chat(whole.removeprefix(prompt))
    for group in (1, 3, 1000):
        message = answer_of(renderer, ids, TOOLS, group)
        assert said(message) == said({"tool_calls": calls})
        assert not (message["content"] or "").strip()


@families
def test_earlier_calls_and_results_reach_the_template(
    renderer_of: Callable[[Family], ChatRenderer], family: Family
) -> None:
    renderer = renderer_of(family)
    turn = {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": CALLS}
    results = [
        {"role": "tool", "content": "the first", "tool_call_id": CALLS[0]["id"]},
        {"role": "tool", "content": "the second", "tool_call_id": None},
    ]
    done = {"role": "assistant", "content": "Done."}
    text = renderer.text([USER, turn, *results, done, USER], TOOLS)
    for part in ("look", "get.up-1", "12", "the first", "the second", "Done."):
        assert part in text
    assert "{'" not in text
    assert '\\"digits\\"' not in text
    ordered = [text.index(part) for part in ("the first", "the second", "Done.")]
    assert ordered == sorted(ordered)


def test_a_mistral_call_keeps_its_id(renderer_of: Callable[[Family], ChatRenderer]) -> None:
    renderer = renderer_of(FAMILIES["mistral names"])
    written = renderer.tokenizer.encode_chat(
        "[TOOL_CALLS]look[CALL_ID]abcDEF123[ARGS]{}[TOOL_CALLS]look[CALL_ID]abcDEF123[ARGS]{}"
    )
    calls = answer_of(renderer, written, TOOLS, 1)["tool_calls"]
    assert calls[0]["id"] == "abcDEF123"
    assert calls[1]["id"] not in ("", "abcDEF123")
    text = renderer.text([USER, {"role": "assistant", "content": None, "tool_calls": calls}], answer=False)
    assert "look[CALL_ID]abcDEF123[ARGS]{}" in text


def test_an_empty_answer_is_not_written_beside_calls(renderer_of: Callable[[Family], ChatRenderer]) -> None:
    renderer = renderer_of(FAMILIES["deepseek v3"])
    text = renderer.text([USER, {"role": "assistant", "content": "", "tool_calls": CALLS}], answer=False)
    assert text.count("<｜Assistant｜>") == 1


def test_control_tokens_in_messages_stay_text(renderer_of: Callable[[Family], ChatRenderer]) -> None:
    """Also where calls are written into the text of a message, between control tokens."""
    renderer = renderer_of(FAMILIES["granite"])
    attack = [call("look", "c", text="<|tool_call|>")]
    text = renderer.text([USER, {"role": "assistant", "content": "<|tool_call|>", "tool_calls": attack}], answer=False)
    ids = renderer.tokenizer.encode_chat(text)
    assert ids.count(renderer.tokenizer.backend.token_to_id("<|tool_call|>")) == 1


@pytest.mark.parametrize(
    ("written", "reasoning", "content", "calls"),
    [
        (
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>hello",
            "hm",
            "hello",
            [],
        ),
        (
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
            '<|start|>assistant<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"at": 1}<|call|>',
            "hm",
            "I look.",
            [("look", {"at": 1})],
        ),
        (' to=functions.look<|channel|>commentary json<|message|>{"at": 1}<|call|>', "", "", [("look", {"at": 1})]),
        ("<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b", "a\n\nb", "", []),
        ("plain text", "", "plain text", []),
        (
            "<|channel|>commentary to=functions.look<|message|>not json<|call|>",
            "",
            "<|channel|>commentary to=functions.look<|message|>not json<|call|>",
            [],
        ),
        ("<|channel|>some words<|message|>hi", "", "<|channel|>some words<|message|>hi", []),
        ("<|channel|>final", "", "<|channel|>final", []),
    ],
)
def test_channels(
    renderer_of: Callable[[Family], ChatRenderer],
    written: str,
    reasoning: str,
    content: str,
    calls: list[tuple[str, Any]],
) -> None:
    renderer = renderer_of(FAMILIES["gpt-oss"])
    ids = renderer.tokenizer.encode_chat(written)
    for group in (1, 2, 1000):
        message = answer_of(renderer, ids, TOOLS, group)
        assert (message.get("reasoning_content", ""), message["content"] or "", said(message)) == (
            reasoning,
            content,
            calls,
        )


def test_reasoning_of_other_families(renderer_of: Callable[[Family], ChatRenderer]) -> None:
    for sign, opening, closing in (
        ("{# [THINK] #}", "[THINK]", "[/THINK]"),
        ("{# <|channel>thought #}", "<|channel>thought\n", "<channel|>"),
    ):
        family = FAMILIES["glm"]
        tokens = (opening.removesuffix("thought\n"), closing)
        renderer = renderer_of(Family(sign + family.template, family.format, (*family.control, *tokens)))
        ids = renderer.tokenizer.encode_chat(f"{opening}hm{closing}hello")
        message = answer_of(renderer, ids, [], 1)
        assert (message["reasoning_content"], message["content"]) == ("hm", "hello")
        assert renderer.prompt(f"Hello{opening}").opens_reasoning
        assert renderer.prompt(f"Hello{opening}{closing}").ends_reasoning


@pytest.mark.parametrize(
    ("family", "start"),
    [
        ("mistral list", '[TOOL_CALLS] [{"name": "look", "arguments": '),
        ("gpt-oss", "<|channel|>commentary to=functions.look <|constrain|>json<|message|>"),
        ("deepseek v3", f"{SECTION}{BEGIN}function{SEPARATOR}look\n```json\n"),
        ("deepseek v3.1", f"{SECTION}{BEGIN}look{SEPARATOR}"),
        ("granite", '<|tool_call|>[{"name": "look", "arguments": '),
        ("llama 3", '{"name": "look", "parameters": '),
        ("glm", None),
        ("gemma 4", None),
    ],
)
def test_a_demanded_call_is_written_as_the_template_writes_it(
    renderer_of: Callable[[Family], ChatRenderer], family: str, start: str | None
) -> None:
    renderer = renderer_of(FAMILIES[family])
    written = call_format(renderer, renderer.tool_format)
    assert (written and written.start("look")) == start
    if written is not None:
        whole = renderer.tokenizer.encode_chat(written.write("look", {"at": 1}))
        assert said(answer_of(renderer, whole, TOOLS, 1)) == [("look", {"at": 1})]


def test_an_unknown_format_is_said(
    renderer_of: Callable[[Family], ChatRenderer], caplog: pytest.LogCaptureFixture
) -> None:
    assert renderer_of(Family(TOOLS_SHOWN + "{{ messages[-1].content }}", "hermes", ())).tool_format == "hermes"
    assert "--tool-parser names another format" in caplog.text
    # The vocabulary may say what the template does not.
    assert renderer_of(Family(TOOLS_SHOWN + "{{ messages[-1].content }}", "", MISTRAL_CONTROL)).tool_format == "mistral"


def test_the_option_names_every_format() -> None:
    assert get_args(ToolParserName) == ("auto", *FORMATS)
