"""A chat template writes what it writes in Transformers, and gets no further than the sandbox."""

from collections.abc import Callable
from typing import Any

import pytest
from jinja2 import TemplateError
from jinja2.exceptions import SecurityError
from transformers.utils.chat_template_utils import render_jinja_template

from openclaw_rl.rendering.chat import ChatTemplate

TOOL = {"type": "function", "function": {"name": "weather", "description": 'At <noon> & "later"', "parameters": {}}}
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Zürich <b>?</b>"},
    {"role": "assistant", "content": "Let me see.", "reasoning_content": "Which one?"},
    {"role": "assistant", "content": "Sunny.", "thinking": "It says so."},
    {"role": "assistant", "content": "Still sunny.", "reasoning": "Again."},
]
TEMPLATES = {
    "blocks": "{% for m in messages %}\n  {% if m.role %}\n {{ m.content }}\n  {% endif %}\n{% endfor %}",
    "loop controls": "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}x{% break %}{% endfor %}",
    "generation": "{% set a = 1 %}{% generation %}{% set a = 2 %}{{ a }}\n{% endgeneration %}{{ a }}",
    "reasoning": "{% for m in messages %}{{ m.reasoning_content }}|{{ m.thinking }}|{{ m.reasoning }};{% endfor %}",
    "namespace": "{% set n = namespace(self=1) %}{% for m in tools %}{% set n.a = 2 %}{% endfor %}{{ n.a + n.self }}",
    "namespace of numbers": "{% set n = namespace({1: 2}) %}{% set n.a = 3 %}{{ n.a }}",
    "dict": "{{ dict(a=1) }}{{ dict.fromkeys(['x'], 2) }}",
    "json": "{{ tools | tojson }}{{ tools[0] | tojson(indent=2, sort_keys=True) }}",
    "ascii": "{{ messages[1] | tojson }}{{ messages[1] | tojson(ensure_ascii=True) }}",
    "separators": "{{ tools | tojson(separators=(',', ':')) }}",
    "defaults": "{{ documents is defined }}{{ documents }}{{ add_generation_prompt }}{{ missing }}{{ today }}",
    "time": "{{ strftime_now('%Y') }}",
    "methods": "{{ messages[1].content.split(' ')[0].upper() }}{{ messages[0].items() | list }}",
}


@pytest.mark.parametrize("text", TEMPLATES.values(), ids=TEMPLATES.keys())
@pytest.mark.parametrize(("tools", "answer"), [([TOOL], True), ([TOOL, TOOL], False)])
def test_the_text_is_that_of_transformers(text: str, tools: list[Any], answer: bool) -> None:
    theirs, _ = render_jinja_template(
        [CHAT], tools=tools, chat_template=text, add_generation_prompt=answer, today="Monday"
    )
    assert ChatTemplate(text).render(CHAT, tools, {"today": "Monday"}, answer=answer) == theirs[0]


def test_no_tools_are_none() -> None:
    text = "{{ tools is none }}"
    theirs, _ = render_jinja_template([CHAT], tools=None, chat_template=text)
    assert ChatTemplate(text).render(CHAT, [], {}, answer=False) == theirs[0] == "True"


def test_a_template_may_have_a_variable_that_transformers_takes_as_an_argument() -> None:
    assert ChatTemplate("{{ tokenize }}").render(CHAT, [], {"tokenize": False}, answer=False) == "False"


def ours(text: str) -> str:
    return ChatTemplate(text).render(CHAT, [TOOL], {}, answer=True)


def transformers(text: str) -> Any:
    return render_jinja_template([CHAT], tools=[TOOL], chat_template=text)


@pytest.mark.parametrize("render", [ours, transformers])
@pytest.mark.parametrize(
    "text",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='user') }}",
        "{{ dict.__class__.__init__.__globals__ }}",
        "{{ raise_exception.__globals__.json }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{{ namespace.__init__.__globals__ }}",
        "{% set n = namespace(__class__=1) %}",
        "{% set n = namespace() %}{% set n._hidden = 1 %}",
    ],
)
def test_a_template_cannot_leave_the_sandbox(render: Callable[[str], Any], text: str) -> None:
    with pytest.raises(SecurityError):
        render(text)


def test_a_template_can_refuse_a_chat() -> None:
    with pytest.raises(TemplateError, match="Roles must alternate"):
        ours("{{ raise_exception('Roles must alternate') }}")
