"""How the code is laid out: what may import what."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
TESTS = ROOT / "tests"


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything that a file imports, also inside functions and under TYPE_CHECKING."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{node.module or ''}.{alias.name}") for alias in node.names)


def imported_tests(folder: Path) -> list[str]:
    """Imports of a test module or a conftest: helpers that several test modules need belong in tests/support."""
    return [
        f"{path.relative_to(folder)}:{line} imports {name}"
        for path in sorted(folder.rglob("*.py"))
        for line, name in imports(path)
        if any(part == "conftest" or part.startswith("test_") for part in name.split(".")[:-1] or [name])
    ]


def test_no_test_module_imports_another() -> None:
    assert not imported_tests(TESTS)


def test_an_import_of_a_test_module_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "slow").mkdir()
    (tmp_path / "test_a.py").write_text("def test_a() -> None: ...")
    (tmp_path / "slow" / "test_b.py").write_text("import os\nimport test_a\nfrom conftest import tiny_model")
    (tmp_path / "helper.py").write_text("def f():\n    from slow.test_b import g")
    assert imported_tests(tmp_path) == [
        "helper.py:2 imports slow.test_b.g",
        "slow/test_b.py:2 imports test_a",
        "slow/test_b.py:3 imports conftest.tiny_model",
    ]
