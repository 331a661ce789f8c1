"""Actions of the environment browser: what is read from an answer, and what is refused."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openclaw_rl.envs.browser.actions import (
    KEYS,
    KINDS,
    MAX_TEXT_CHARACTERS,
    TOOL,
    BadAction,
    BrowserAction,
    checked,
    read_action,
)
from openclaw_rl.envs.browser.site_tasks import called
from support.policies import calls, says

NUMBERS = st.integers(0, 10**6 - 1)
#: Texts as they come back from a line: without spaces and quotes around them.
TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), min_size=1, max_size=40).filter(
    lambda text: text == text.strip("\"'`*") and text.splitlines() == [text]
)


@st.composite
def actions(draw: st.DrawFn) -> BrowserAction:
    kind = draw(st.sampled_from(KINDS))
    element = draw(NUMBERS) if kind in ("click", "type", "select") else None
    text = {
        "type": TEXTS,
        "select": TEXTS,
        "scroll": st.sampled_from(["down", "up"]),
        "press": st.sampled_from(sorted(KEYS.values())),
    }.get(kind, st.just(""))
    return BrowserAction(kind, element, draw(text))


@given(action=actions())
def test_an_action_is_read_as_it_is_written(action: BrowserAction) -> None:
    assert read_action(says(str(action))) == action
    assert read_action(called(action, "call1")) == action


@given(content=st.one_of(st.text(), st.none(), st.lists(st.text()), st.integers()))
def test_any_answer_is_an_action_or_refused_in_a_sentence(content: Any) -> None:
    check_read({"role": "assistant", "content": content})


JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner), max_leaves=5)


@given(
    arguments=st.one_of(
        st.text(),
        st.fixed_dictionaries(
            {"action": st.one_of(JSON, st.sampled_from(KINDS))}, optional={"element": JSON, "text": JSON}
        ).map(json.dumps),
    )
)
def test_any_arguments_are_an_action_or_refused_in_a_sentence(arguments: str) -> None:
    check_read(calls(("browser", arguments)))


@given(call=JSON)
def test_any_tool_call_is_an_action_or_refused_in_a_sentence(call: Any) -> None:
    check_read({"role": "assistant", "content": "", "tool_calls": [call]})


def check_read(answer: dict[str, Any] | Any) -> None:
    try:
        action = read_action(answer)
    except BadAction as error:
        sentence = str(error)
    else:
        sentence = "It is an action."
        assert action.kind in KINDS
        assert action.text.isprintable()
        assert checked(action.kind, action.element, action.text) == action
    assert sentence.endswith(".")
    assert len(sentence) < 400


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("click 2", BrowserAction("click", 2)),
        ("Click [2].", BrowserAction("click", 2)),
        ("Action: click 2", BrowserAction("click", 2)),
        ("I look for the button.\n`click 12`\nclick 3", BrowserAction("click", 12)),
        ('type 3 "Ada Holt"', BrowserAction("type", 3, "Ada Holt")),
        ("type 3: 42", BrowserAction("type", 3, "42")),
        ("type 3", BrowserAction("type", 3, "")),
        ("select 1 Large", BrowserAction("select", 1, "Large")),
        ("scroll", BrowserAction("scroll", None, "down")),
        ("scroll UP", BrowserAction("scroll", None, "up")),
        ("press enter", BrowserAction("press", None, "Enter")),
        ("back", BrowserAction("back")),
        ("done", BrowserAction("done")),
    ],
)
def test_a_line_is_read_with_what_models_put_around_it(text: str, action: BrowserAction) -> None:
    assert read_action(says(text)) == action


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "no action in the answer"),
        ("Please click the button 2", "no action in the answer"),
        ("click", "click needs the number of an element"),
        ("click me", "click needs the number of an element"),
        ("click 99999999999999999999", "There is no element 999999…"),
        ("type hello", "type needs the number of an element"),
        ("select 2", "select needs the name of an option"),
        ("press any key", "There is no key 'any key'"),
        ("scroll left", "down or up, not 'left'"),
        (f"type 1 {'x' * (MAX_TEXT_CHARACTERS + 1)}", "longer than 2000 characters"),
    ],
)
def test_what_is_no_action_is_refused_in_a_sentence(text: str, sentence: str) -> None:
    with pytest.raises(BadAction, match=sentence):
        read_action(says(text))


@pytest.mark.parametrize(
    ("name", "arguments", "sentence"),
    [
        ("click", {"element": 1}, "no tool 'click'; the tool is browser"),
        ("browser", "{", "must be a JSON object"),
        ("browser", "[1]", "must be a JSON object"),
        ("browser", {"action": "drag"}, "must be one of click, type, .* not 'drag'"),
        ("browser", {"action": "click", "element": "2"}, "must be a number, not '2'"),
        ("browser", {"action": "click", "element": True}, "must be a number, not True"),
        ("browser", {"action": "type", "element": 1, "text": 5}, "must be a string, not 5"),
        ("browser", {"action": "click"}, "click needs the number"),
    ],
)
def test_a_wrong_call_is_refused_in_a_sentence(name: str, arguments: Any, sentence: str) -> None:
    with pytest.raises(BadAction, match=sentence):
        read_action(calls((name, arguments)))


def test_the_tool_offers_every_action() -> None:
    assert TOOL["function"]["parameters"]["properties"]["action"]["enum"] == list(KINDS)
