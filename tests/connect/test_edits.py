"""Changes to the files of clients: what is there stays, and what was added can be taken out again."""

import json
import tomllib
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from openclaw_rl.connect.clients import CLIENTS, NO_SERVER, ServerFacts
from openclaw_rl.connect.files import CannotEdit, JsonEdit, WholeFile, YamlEdit

SETTINGS = {("env", "URL"): "http://x", ("env", "KEY"): "k", ("model",): {"id": "m"}, ("a", "b", "c"): [1]}
JSON = JsonEdit(SETTINGS)
LIST = YamlEdit("continue", list_name="models", item={"name": "ours", "key": "k"}, whole={"name": "new"})
KEYS = YamlEdit("aider", {"model": "ours", "base": "http://x"})

#: Documents that have, lack, or have something else in the place of what is set.
names = st.sampled_from(["env", "model", "a", "b", "c", "URL", "KEY", "other", "name"])
leaves = st.none() | st.booleans() | st.integers() | st.text(max_size=5)
values = st.recursive(leaves, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(names, inner, max_size=3))
documents = st.dictionaries(names, values, max_size=5)


@given(documents)
def test_json_settings_are_added_once_and_taken_out_again(document: dict[str, Any]) -> None:
    before = json.dumps(document)
    after = JSON.add(before)
    assert JSON.add(after) == after
    added = json.loads(after)
    assert (added["env"]["URL"], added["model"], added["a"]["b"]["c"]) == ("http://x", {"id": "m"}, [1])
    assert json.loads(JSON.remove(after, before)) == document


@given(documents, values)
def test_what_is_added_later_stays(document: dict[str, Any], value: Any) -> None:
    before = json.dumps(document)
    later = json.loads(JSON.add(before)) | {"later": value}
    assert json.loads(JSON.remove(json.dumps(later), before)) == document | {"later": value}


def test_nothing_is_left_of_a_file_that_was_new() -> None:
    for edit in (JSON, LIST, KEYS, CLIENTS["codex"](NO_SERVER).edit):
        assert edit is not None
        assert edit.remove(edit.add(""), "") == ""


def test_json_keeps_its_indentation_and_its_letters() -> None:
    text = JsonEdit({("b",): 1}).add('{\n    "a": "ü"\n}\n')
    assert text == '{\n    "a": "ü",\n    "b": 1\n}\n'


@pytest.mark.parametrize(
    "text",
    ['{"a": 1} // why', "{'a': 1}", '{"a": 1,}', "[]", "1", '{"a": 1, "a": 2}', "{" * 100_000, "__import__('os')"],
)
def test_json_that_would_lose_something_is_refused(text: str) -> None:
    with pytest.raises(CannotEdit):
        JSON.add(text)


YAML = [
    "models:\n  - name: first  # mine\n    key: x\nother: 1\n",
    "models:\n- name: first\n- name: second",
    "# a comment\nname: mine\nrules: [a, b]\n",
    "models:\n\n  # the best\n  - {name: first}\n",
    "",
]


@pytest.mark.parametrize("before", YAML)
def test_a_yaml_file_keeps_every_character(before: str) -> None:
    after = LIST.add(before)
    assert LIST.add(after) == after
    models = yaml.safe_load(after)["models"]
    assert models[0] == {"name": "ours", "key": "k"}
    assert models[1:] == (yaml.safe_load(before) or {}).get("models", [])
    assert LIST.remove(after, before).rstrip("\n") == before.rstrip("\n")
    assert LIST.remove(f"{after}later: 1\n", before).endswith("later: 1\n")


@pytest.mark.parametrize(
    "text",
    [
        "models: [{name: first}]\n",
        "models: []\n",
        "models: 3\n",
        "models: &m\n  - name: first\n",
        "- a\n",
        "a: [\n",
        "a: !!python/object/apply:os.system ['true']\n",
        "? [a]\n: b\n",
    ],
)
def test_yaml_that_cannot_be_extended_safely_is_refused(text: str) -> None:
    with pytest.raises(CannotEdit):
        LIST.add(text)


def test_a_setting_of_the_users_is_not_overruled_in_yaml() -> None:
    with pytest.raises(CannotEdit, match="'model' already"):
        KEYS.add("model: mine\n")
    assert yaml.safe_load(KEYS.add("dark-mode: true\n")) == {"dark-mode": True, "model": "ours", "base": "http://x"}


def test_a_block_without_its_end_is_refused() -> None:
    cut = "".join(KEYS.add("a: 1\n").splitlines(keepends=True)[:-1])
    with pytest.raises(CannotEdit, match="is missing"):
        KEYS.remove(cut, "a: 1\n")


def test_a_file_of_somebody_else_is_not_replaced() -> None:
    with pytest.raises(CannotEdit):
        WholeFile("# ours").add("model = 'mine'\n")


@pytest.mark.parametrize("key", ["", 'a"b\\c', "plain"])
@pytest.mark.parametrize("client", CLIENTS)
def test_every_client_is_told_url_model_key_and_context(client: str, key: str) -> None:
    setup = CLIENTS[client](ServerFacts("http://127.0.0.1:31000", 'odd "name"', 8192, key))
    text = setup.edit.add("") if setup.edit else setup.text
    assert "http://127.0.0.1:31000" in text
    if setup.path is not None:
        parse = {".toml": tomllib.loads, ".json": json.loads}.get(setup.path.suffix, yaml.safe_load)
        told = json.dumps(parse(text))
        assert json.dumps('odd "name"')[1:-1] in told
        assert json.dumps(key)[1:-1] in told
        assert client == "aider" or "8192" in told
