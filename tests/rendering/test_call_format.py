"""The format of tool calls is the one in which the model's template writes them."""

import json
import shutil
from pathlib import Path

import pytest

from openclaw_rl.rendering.call_format import call_format
from openclaw_rl.rendering.chat import ChatRenderer
from openclaw_rl.rendering.response import ResponseParser
from openclaw_rl.rendering.tool_calls import ParsedToolCall, ToolParser
from openclaw_rl.rendering.tool_formats import FORMATS, WRITTEN, CallFormat

START = "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
END = "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
TOOLS = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
#: As in Qwen's templates: reasoning before the calls, a line break between them.
QWEN = (
    TOOLS
    + START
    + """{% if message.tool_calls %}<think>\n\n</think>\n\n{% for call in message.tool_calls %}\
{{ '' if loop.first else '\n' }}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}{% endif %}"""
    + END
)
#: Without spaces and line breaks.
TIGHT = (
    TOOLS
    + START
    + """{% for call in message.tool_calls or [] %}<tool_call>{"name":"{{ call.function.name }}","arguments":\
{{ call.function.arguments | tojson }}}</tool_call>{% endfor %}"""
    + END
)
#: As in Llama's templates: one call only.
LLAMA = (
    TOOLS
    + START
    + """{% if message.tool_calls %}{% if message.tool_calls | length != 1 %}{{ raise_exception('one call only') }}\
{% endif %}{"name": "{{ message.tool_calls[0].function.name }}", "parameters": \
{{ message.tool_calls[0].function.arguments | tojson }}}{% endif %}"""
    + END
)
#: Calls in a form that the parser does not read.
OTHER = TOOLS + START + "{% for c in message.tool_calls or [] %}[{{ c.function.name }}()]{% endfor %}" + END
#: No calls at all: they are written into ordinary messages.
PLAIN = START + END


@pytest.mark.parametrize(
    ("template", "parser", "expected"),
    [
        (QWEN, "hermes", WRITTEN["hermes"][0]),
        (TIGHT, "hermes", CallFormat('<tool_call>{"name":"', '","arguments":', "}</tool_call>", "")),
        (LLAMA, "llama3", WRITTEN["llama3"][0]),
        (OTHER, "hermes", WRITTEN["hermes"][0]),
        (OTHER, "llama3", WRITTEN["llama3"][0]),
        (PLAIN, "hermes", WRITTEN["hermes"][0]),
    ],
)
def test_the_format_is_read_from_the_template(
    tiny_model: Path, tmp_path: Path, template: str, parser: str, expected: CallFormat
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    (folder / "chat_template.jinja").write_text(template)
    assert call_format(ChatRenderer(folder), parser) == expected


def test_a_name_is_written_as_json() -> None:
    assert WRITTEN["hermes"][0].start('a"b') == '<tool_call>\n{"name": "a\\"b", "arguments": '


CALLS = [{"name": "look", "arguments": {"at": n}} for n in range(3)]


@pytest.mark.parametrize("group", [1, 3, 1000])
@pytest.mark.parametrize("name", ["hermes", "llama3"])
def test_an_answer_of_one_call_ends_with_it(tiny_model: Path, name: str, group: int) -> None:
    renderer = ChatRenderer(tiny_model)
    texts = list(map(json.dumps, CALLS))
    hermes = name == "hermes"
    text = "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in texts) if hermes else "; ".join(texts)
    ids = renderer.tokenizer.encode_text(("I look. " if hermes else "") + text)
    parser = ResponseParser(renderer.detokenizer, tools=ToolParser(FORMATS[name]), one_call=True)
    deltas, read = [], 0
    for start in range(0, len(ids), group):
        taken, new = parser.push(ids[start : start + group])
        read, deltas = read + taken, deltas + new
        if parser.stopped:
            break
    deltas += parser.flush()
    calls = [delta for delta in deltas if isinstance(delta, ParsedToolCall)]
    assert [call.arguments for call in calls] == ['{"at": 0}']
    assert "".join(delta for delta in deltas if isinstance(delta, str)) == ("I look. " if hermes else "")
    if hermes:
        assert read < len(ids) / 2
