"""From a name to a method; what is no method is refused in one sentence."""

import re
from pathlib import Path

import pytest

from openclaw_rl.app.config import load
from openclaw_rl.config.options import ConfigError
from openclaw_rl.methods.options import BUILT_IN, MethodOptions
from openclaw_rl.methods.registry import check_options, find_method, make_method


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_built_in_method_is_found_by_its_name(name: str) -> None:
    method = make_method(MethodOptions(method=name))
    assert method.name == name
    assert method.learns_from


def test_a_name_that_no_method_has_is_refused_with_those_there_are() -> None:
    expected = (
        "--method 'ppo' (from environment METHOD) is not valid: use one of "
        "rl, opd, combine, topk-select, notes, notes+combine, notes+topk-select, or"
    )
    with pytest.raises(ConfigError, match=re.escape(expected)):
        load({}, {"METHOD": "ppo"})


@pytest.mark.parametrize(
    ("code", "name", "sentence"),
    [
        ("class Other: ...", "Other", "is not a method: write a class"),
        ("Other = 7", "Other", "is not a method: write a class"),
        ("class Other: ...", "Missing", "has no Missing"),
        ("raise RuntimeError('no')", "Other", "cannot be imported"),
        ("import sys\nsys.exit(3)", "Other", "cannot be imported: own.py:2: SystemExit: 3"),
    ],
)
def test_a_file_without_a_method_is_refused(tmp_path: Path, code: str, name: str, sentence: str) -> None:
    (tmp_path / "own.py").write_text(code)
    with pytest.raises(ConfigError, match=sentence):
        find_method(f"{tmp_path / 'own.py'}:{name}")


def test_code_of_ones_own_is_not_run_to_read_options(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("raise SystemExit('it was run')")
    check_options(MethodOptions(method=f"{tmp_path / 'own.py'}:Own"))
