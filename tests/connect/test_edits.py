"""Changes to the files of clients: what is there stays, and what was added can be taken out again."""

import json
import tempfile
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from openclaw_rl.connect.clients import CLIENTS, ServerFacts
from openclaw_rl.connect.edits import CannotEdit, Edit, JsonEdit, SettingPath, TomlEdit, YamlEdit, set_value
from openclaw_rl.connect.files import addition, removal
from support.properties import examples

SETTINGS = {("env", "URL"): "http://x", ("env", "KEY"): "k", ("model",): {"id": "m"}, ("a", "b", "c"): [1]}
JSON = JsonEdit(SETTINGS)
LIST = YamlEdit("continue", list_name="models", item={"name": "ours", "key": "k"}, whole={"name": "new"})
KEYS = YamlEdit("aider", {"model": "ours", "base": "http://x"})
PROFILE = CLIENTS["codex"](ServerFacts("http://x", "ours", 8192, "k")).edit
assert isinstance(PROFILE, TomlEdit)

#: Documents that have, lack, or have something else in the place of what is set.
names = st.sampled_from(["env", "model", "a", "b", "c", "URL", "KEY", "other", "name"])
halves = st.characters(categories=["L", "P", "Cs", "Zl", "Cc", "So"])
leaves = st.none() | st.booleans() | st.integers() | st.floats(-1e9, 1e9) | st.text(halves, max_size=5)
values = st.recursive(leaves, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(names, inner, max_size=3))
documents = st.dictionaries(names, values, max_size=5)


@st.composite
def json_texts(draw: st.DrawFn) -> str:
    """A document as different programs write it."""
    text = json.dumps(draw(documents), indent=draw(st.sampled_from([None, 2, 4, "\t"])))
    return text.replace("\n", draw(st.sampled_from(["\n", "\r\n"]))) + draw(st.sampled_from(["", "\n", " \n\n"]))


def connected_and_undone(edit: Edit, before: str, change: Callable[[str], str]) -> str:
    """The text of a file, "" for none, after its owner changed what `connect` wrote, and undid that."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "settings")
        if before:
            path.write_bytes(before.encode())
        addition(path, edit).apply()
        assert not addition(path, edit).is_needed
        path.write_bytes(change(path.read_bytes().decode()).encode())
        removal(path, edit).revert()
        assert [file.name for file in Path(folder).iterdir()] in ([], ["settings"])
        return path.read_bytes().decode() if path.exists() else ""


@given(json_texts())
def test_json_settings_are_added_and_every_character_comes_back(before: str) -> None:
    added = json.loads(JSON.add(before))
    assert (added["env"]["URL"], added["model"], added["a"]["b"]["c"]) == ("http://x", {"id": "m"}, [1])
    assert connected_and_undone(JSON, before, str) == before


#: Where an owner sets or deletes (None) something later: our settings, beside them, and elsewhere.
places = st.sampled_from([*SETTINGS, ("env", "X"), ("a", "b", "d"), ("a", "x"), ("later",), ("other",)])
later = st.dictionaries(places, st.none() | st.sampled_from(["mine", 7, [2, 3]]), max_size=4)


def changed(document: dict[str, Any], changes: dict[SettingPath, Any]) -> dict[str, Any]:
    for path, value in changes.items():
        if value is not None:
            set_value(document, path, value)
            continue
        parent: Any = document
        for key in path[:-1]:
            parent = parent.get(key) if isinstance(parent, dict) else None
        if isinstance(parent, dict):
            parent.pop(path[-1], None)
    return document


@given(st.dictionaries(names, leaves, max_size=4), later)
def test_what_was_changed_later_in_json_stays(document: dict[str, Any], changes: dict[SettingPath, Any]) -> None:
    undone = connected_and_undone(
        JSON, json.dumps(document), lambda text: json.dumps(changed(json.loads(text), changes))
    )
    assert json.loads(undone) == changed(document, changes)


#: What an owner may do to the files that are edited by lines: the text that is replaced, and what it becomes.
OWN_LINES = {
    "profile": [
        ('web_search = "disabled"', 'web_search = "live"'),
        ('web_search = "disabled"', 'approval_policy = "never"  # mine\nweb_search = "disabled"'),
        ("multi_agent = false", "multi_agent = false\nmine = true"),
        ('wire_api = "responses"\n', ""),
        ("[features]", "[mcp_servers.mine]\ncommand = 'x'\n\n[features]"),
    ],
    "keys": [
        ("model: ours", "model: mine"),
        ("model: ours", "model: ours\ndark-mode: true"),
        ("base: http://x\n", ""),
        ("# openclaw-rl: end\n", "# mine\n"),
    ],
    "list": [
        ("  key: k", "  key: k\n- name: mine"),
        ("# openclaw-rl: end", "# openclaw-rl: end\n- name: mine too"),
        ("  key: k", "  key: mine"),
    ],
}
EDITS: dict[str, Edit] = {"profile": PROFILE, "keys": KEYS, "list": LIST}
EXPECTED = {
    ("profile", 0): {"web_search": "live"},
    ("profile", 1): {"approval_policy": "never"},
    ("profile", 2): {"features": {"mine": True}},
    ("profile", 4): {"mcp_servers": {"mine": {"command": "x"}}},
    ("keys", 0): {"model": "mine"},
    ("keys", 1): {"dark-mode": True},
    ("list", 0): {"models": [{"name": "mine"}]},
    ("list", 1): {"models": [{"name": "mine too"}]},
}


@pytest.mark.parametrize(
    ("name", "index"), [(name, at) for name, lines in OWN_LINES.items() for at in range(len(lines))]
)
def test_what_was_changed_later_in_lines_stays(name: str, index: int) -> None:
    edit, (old, new) = EDITS[name], OWN_LINES[name][index]
    undone = connected_and_undone(edit, "", lambda text: text.replace(old, new))
    assert edit.read(undone) == EXPECTED.get((name, index), {})


#: Lines of files that were there before, and what stands in no conflict with our settings.
KEPT = {
    "profile": ["sandbox_mode = 'x'\n", "# a comment\n", "[mcp_servers.other]\n", "command = 'y'\n"],
    "keys": ["dark-mode: true\n", "# ein Käfer 🐞\n", "read: [a, b]\n", "\n"],
    "list": ["name: mine\n", "# a comment\n", "rules: [a, b]\n", "models:\n  - name: first  # mine\n    key: x\n"],
}


@examples(40)
@given(st.sampled_from(list(EDITS)), st.data())
def test_files_that_are_edited_by_lines_get_every_character_back(name: str, data: st.DataObject) -> None:
    edit = EDITS[name]
    before = "".join(data.draw(st.lists(st.sampled_from(KEPT[name]), unique=True)))
    before = data.draw(st.sampled_from([before, before.rstrip("\n"), before.replace("\n", "\r\n")]))
    changes = data.draw(st.lists(st.sampled_from(OWN_LINES[name]), unique=True))
    assert connected_and_undone(edit, before, str) == before

    def change(text: str) -> str:
        for old, new in changes:
            text = text.replace(old, new, 1)
        return text

    with_lines = edit.add(before)
    try:
        edit.read(change(with_lines))
    except CannotEdit:
        return
    try:
        undone = edit.remove(change(with_lines), before, with_lines)
    except CannotEdit:
        # Two changes of an entry of a list may leave no way to tell whose it is.
        assert name == "list"
        return
    for key, value in edit.read(before).items():
        left = edit.read(undone)[key]
        assert value == left or (isinstance(left, dict) and value.items() <= left.items()) or key == "models"
    assert not any(ours in undone for ours in ("http://x", "Bearer k", "openclaw-rl connect"))


def test_connecting_again_keeps_what_was_changed_since(tmp_path: Path) -> None:
    path = tmp_path / "profile.toml"
    addition(path, PROFILE).apply()
    path.write_text(path.read_text().replace("[features]", "[mcp_servers.mine]\ncommand = 'x'\n\n[features]"))
    other = CLIENTS["codex"](ServerFacts("http://y", "other", 8192, "k2")).edit
    assert other is not None
    addition(path, other).apply()
    document = tomllib.loads(path.read_text())
    assert (document["model"], document["mcp_servers"]) == ("other", {"mine": {"command": "x"}})
    removal(path, other).revert()
    assert tomllib.loads(path.read_text()) == {"mcp_servers": {"mine": {"command": "x"}}}


def test_an_entry_of_a_list_that_was_renamed_is_left_for_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    addition(path, LIST).apply()
    path.write_text(path.read_text().replace("- name: ours", "- name: mine"))
    with pytest.raises(CannotEdit, match="Take them out by hand"):
        removal(path, LIST)


def test_json_keeps_its_indentation_and_its_letters() -> None:
    text = JsonEdit({("b",): 1}).add('{\n    "a": "ü"\n}\n')
    assert text == '{\n    "a": "ü",\n    "b": 1\n}\n'


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1} // why',
        "{'a': 1}",
        '{"a": 1,}',
        "[]",
        "1",
        '{"a": 1, "a": 2}',
        "{" * 100_000,
        "__import__('os')",
        '{"a": 1e999}',
        '{"a": NaN}',
        '{"a": -Infinity}',
        '{"a": 0.12345678901234567890123}',
        '{"a": 1' + "0" * 5000 + "}",
    ],
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
    assert LIST.remove(after, before, after).rstrip("\n") == before.rstrip("\n")
    assert LIST.remove(f"{after}later: 1\n", before, after).endswith("later: 1\n")


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


@pytest.mark.parametrize("text", ["model = 'mine'\n", "[features]\nx = 1\n", "not toml"])
def test_a_profile_that_says_something_else_is_left_as_it_is(text: str) -> None:
    with pytest.raises(CannotEdit):
        PROFILE.add(text)


def test_a_deep_document_is_refused_in_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    for depth in (300, 900, 3000, 30_000):
        path.write_text('{"a":' * depth + "1" + "}" * depth)
        try:
            addition(path, JSON).apply()
        except CannotEdit as error:
            assert "is left as it is" in str(error)  # noqa: PT017
        else:
            removal(path, JSON).revert()


#: A name with quotes, an emoji, and a character that TOML takes only as an escape.
ODD = 'odd "name" 🐞\x7f'


@pytest.mark.parametrize("key", ["", 'a"b\\c', "plain"])
@pytest.mark.parametrize("client", CLIENTS)
def test_every_client_is_told_url_model_key_and_context(client: str, key: str) -> None:
    setup = CLIENTS[client](ServerFacts("http://127.0.0.1:31000", ODD, 8192, key))
    text = setup.edit.add("") if setup.edit else setup.text
    assert "http://127.0.0.1:31000" in text
    if setup.path is not None:
        parse = {".toml": tomllib.loads, ".json": json.loads}.get(setup.path.suffix, yaml.safe_load)
        told = json.dumps(parse(text))
        assert json.dumps(ODD)[1:-1] in told
        assert json.dumps(key)[1:-1] in told
        assert client == "aider" or "8192" in told
