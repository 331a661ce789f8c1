"""One attempt in a repository: tools, edits and their refusals, and how the end is judged."""

import os
import threading
from pathlib import Path

import pytest

from openclaw_rl.envs.calls import ToolFailed
from openclaw_rl.envs.swe.assert_tests import prepare
from openclaw_rl.envs.swe.edit_blocks import EditBlock, read_blocks
from openclaw_rl.envs.swe.repository import FolderTree, Repository, TextTree, is_protected, write
from support.swe_policies import call, needs_sandbox, said, small_episode, text

pytestmark = needs_sandbox

CALC = "def add(a, b):\n    return a - b\n\n\ndef one():\n    return 1\n\n\ndef uno():\n    return 1\n"
TESTS = """
from calc import add, one

def test_add():
    assert add(2, 3) == 5

def test_one():
    assert one() == 1
"""
FILES, TEST_FILES = {"calc.py": CALC}, {"tests/test_calc.py": TESTS}
ADD, ONE = "tests/test_calc.py::test_add", "tests/test_calc.py::test_one"


async def test_a_strict_umask_hides_no_file_from_the_tests() -> None:
    before = os.umask(0o077)
    try:
        episode = small_episode({**FILES, "deep/er.py": ""}, TEST_FILES, ADD, keep=(ONE,))
        await episode.step(call("edit", path="calc.py", old="a - b", new="a + b"))
        assert (await episode.outcome()).solved
    finally:
        os.umask(before)


class TestTools:
    async def test_a_bug_is_found_and_mended_with_the_tools(self) -> None:
        episode = small_episode(FILES, TEST_FILES, ADD, keep=(ONE,))
        assert said(await episode.step(call("list_files"))) == "calc.py\ntests/test_calc.py"
        assert said(await episode.step(call("search", text="a - b"))) == "calc.py:2:     return a - b"
        assert said(await episode.step(call("read_file", path="calc.py", first_line=5))).startswith("def one():")
        failing = said(await episode.step(call("run_tests")))
        assert failing == f"1 of 2 tests fail.\n{ADD}: add(2, 3) gives -1, but should give 5."
        step = await episode.step(call("edit", path="calc.py", old="a - b", new="a + b"))
        assert said(step) == "Replaced the text in calc.py."
        assert not step.done
        assert said(await episode.step(call("run_tests"))) == "All 2 tests pass."
        assert (await episode.step(text("Done."))).done
        outcome = await episode.outcome()
        assert (outcome.reward, outcome.solved) == (1.0, True)

    @pytest.mark.parametrize(
        ("arguments", "reason"),
        [
            ({"path": "calc.py", "old": "a * b", "new": "a + b"}, "is not in calc.py; it has to match exactly"),
            ({"path": "calc.py", "old": "a  - b", "new": "a + b"}, "with these spaces and line breaks"),
            ({"path": "calc.py", "old": "return 1", "new": "return 2"}, "occurs 2 times in calc.py: give more"),
            ({"path": "calc.py", "old": "a - b", "new": "a - b"}, "the same as the old text"),
            ({"path": "calc.py", "old": "", "new": "x"}, "exists already"),
            ({"path": "other.py", "old": "a", "new": "b"}, "There is no file other.py"),
            ({"path": "../calc.py", "old": "", "new": "b"}, "is not a path in the repository"),
            ({"path": "/etc/passwd", "old": "", "new": "b"}, "is not a path in the repository"),
            ({"path": "calc.py", "old": 3, "new": "b"}, "must be of type string"),
            ({"path": "calc.py/x.py", "old": "", "new": "b"}, "calc.py is a file, not a folder"),
            ({"path": "tests", "old": "", "new": "b"}, "tests is a folder"),
            ({"path": "a" * 300 + ".py", "old": "", "new": "b"}, "is too long"),
            ({"path": "é" * 200 + ".py", "old": "", "new": "b"}, "is too long"),
            ({"path": "a/" * 600 + "b.py", "old": "", "new": "b"}, "is too long"),
        ],
    )
    async def test_an_edit_that_is_not_clear_is_refused_with_the_reason(
        self, arguments: dict[str, object], reason: str
    ) -> None:
        episode = small_episode(FILES, TEST_FILES, ADD)
        step = await episode.step(call("edit", **arguments))
        assert reason in said(step)
        assert reason in step.hint
        assert episode.repository.edits == {}

    async def test_new_files_clash_with_each_other_too(self) -> None:
        episode = small_episode(FILES, TEST_FILES, ADD)
        await episode.step(call("edit", path="a/b.py", old="", new="x"))
        assert "a is a folder" in said(await episode.step(call("edit", path="a", old="", new="x")))
        assert "a/b.py is a file" in said(await episode.step(call("edit", path="a/b.py/c", old="", new="x")))
        assert list(episode.repository.edits) == ["a/b.py"]

    async def test_a_hidden_folder_is_listed_by_its_name(self) -> None:
        episode = small_episode({**FILES, ".github/a.yml": ""}, TEST_FILES, ADD)
        for folder in (".github", "./.github/"):
            assert said(await episode.step(call("list_files", folder=folder))) == ".github/a.yml"
        for folder in (".", "./", "/"):
            assert "calc.py" in said(await episode.step(call("list_files", folder=folder)))

    async def test_a_whole_number_may_be_written_as_a_fraction(self) -> None:
        episode = small_episode(FILES, TEST_FILES, ADD)
        assert said(await episode.step(call("read_file", path="calc.py", first_line=5.0))).startswith("def one():")

    async def test_files_are_never_walked_or_read_on_the_event_loop(self) -> None:
        threads = set()

        class WatchedTree(TextTree):
            def paths(self) -> list[str]:
                threads.add(threading.get_ident())
                return super().paths()

            def read(self, path: str) -> str | None:
                threads.add(threading.get_ident())
                return super().read(path)

        episode = small_episode(FILES, TEST_FILES, ADD)
        episode.repository.tree = WatchedTree({**FILES, **TEST_FILES})
        for name, arguments in (
            ("list_files", {}),
            ("search", {"text": "add"}),
            ("read_file", {"path": "calc.py"}),
            ("edit", {"path": "calc.py", "old": "a - b", "new": "a * b"}),
            ("run_tests", {}),
        ):
            assert not (await episode.step(call(name, **arguments))).hint
        await episode.step(text(str(EditBlock("", "    return a * b", "    return a + b"))))
        assert (await episode.outcome()).solved
        assert threads
        assert threading.get_ident() not in threads

    async def test_an_answer_may_make_a_bounded_number_of_calls(self) -> None:
        episode = small_episode(FILES, TEST_FILES, ADD)
        answer = call("search", text="add")
        answer = {**answer, "tool_calls": answer["tool_calls"] * 10}
        messages = (await episode.step(answer)).messages
        assert len(messages) == 10
        assert messages[-1]["content"] == "Error: An answer may make at most 8 calls."

    async def test_a_new_file_can_be_made(self) -> None:
        episode = small_episode(FILES, TEST_FILES, ADD, keep=(ONE,))
        await episode.step(call("edit", path="plus.py", old="", new="def plus(a, b):\n    return a + b\n"))
        new = "    from plus import plus\n    return plus(a, b)"
        await episode.step(call("edit", path="calc.py", old="    return a - b", new=new))
        assert (await episode.outcome()).solved


class TestBlocks:
    def test_blocks_are_read_with_their_paths(self) -> None:
        answer = f"Here:\n{EditBlock('calc.py', 'a - b', 'a + b')}\n\n`tests/x.py`\n```\n{EditBlock('', 'x', '')}\n```"
        assert read_blocks(answer, ["calc.py", "tests/x.py"]) == [
            EditBlock("calc.py", "a - b", "a + b"),
            EditBlock("tests/x.py", "x", ""),
        ]

    def test_a_diff_is_read_hunk_by_hunk(self) -> None:
        header = "--- a/calc.py\n+++ b/calc.py\n@@ -1,2 +1,2 @@\n"
        answer = (
            f"Here:\n```diff\n{header} def add(a, b):\n-    return a - b\n+    return a + b\n@@ -9 +9 @@\n-x\n+y\n```"
        )
        assert read_blocks(answer, ["calc.py"]) == [
            EditBlock("calc.py", "def add(a, b):\n    return a - b", "def add(a, b):\n    return a + b"),
            EditBlock("calc.py", "x", "y"),
        ]
        edit = EditBlock("", "    one\n    two", "    three")
        assert read_blocks("```diff\n-    one\n-    two\n+    three\n```", []) == [edit]
        assert read_blocks(str(edit), []) == [edit]

    def test_a_diff_as_git_writes_it_is_read(self) -> None:
        answer = """```diff
diff --git a/calc.py b/calc.py
index 1234567..89abcde 100644
--- a/calc.py
+++ b/calc.py
@@ -1 +1 @@
-one
\\ No newline at end of file
+two
\\ No newline at end of file
diff --git a/new.py b/new.py
new file mode 100644
index 0000000..89abcde
--- /dev/null
+++ b/new.py\t2024-01-01 00:00:00
@@ -0,0 +1 @@
+three
```"""
        assert read_blocks(answer, []) == [EditBlock("calc.py", "one", "two"), EditBlock("new.py", "", "three")]

    @pytest.mark.parametrize("first", ["-one\n+two", " zero\n-one\n+two", "@@\n-one\n+two", "@@ -1 +1 @@\n-one\n+two"])
    def test_a_diff_without_a_header_is_read(self, first: str) -> None:
        blocks = read_blocks(f"```diff\n{first}\n@@ -9 +9 @@\n-three\n+four\n```", [])
        assert [block.old.removeprefix("zero\n") for block in blocks] == ["one", "three"]

    async def test_a_block_is_applied_to_the_only_source(self) -> None:
        episode = small_episode(FILES, TEST_FILES, ADD, keep=(ONE,))
        step = await episode.step(text(str(EditBlock("", "    return a - b", "    return a + b"))))
        assert said(step) == "Replaced the text in calc.py."
        assert (await episode.outcome()).solved

    async def test_a_block_needs_a_path_where_there_are_several_sources(self) -> None:
        episode = small_episode({**FILES, "b.py": ""}, TEST_FILES, ADD)
        assert "Write the path of the file" in said(await episode.step(text(str(EditBlock("", "a - b", "a + b")))))

    async def test_a_block_needs_a_path_where_there_is_no_source(self) -> None:
        episode = small_episode({"README.md": "a - b"}, TEST_FILES, ADD)
        assert "Write the path of the file" in said(await episode.step(text(str(EditBlock("", "a - b", "a + b")))))

    async def test_text_that_was_meant_as_a_block_is_refused(self) -> None:
        episode = small_episode(FILES, TEST_FILES, ADD)
        step = await episode.step(text("<<<<<<< SEARCH\nreturn a - b\n>>>>>>> REPLACE"))
        assert "cannot be read. Write it like this" in said(step)
        assert not step.done


class TestOutcome:
    async def test_breaking_a_test_that_passed_costs_reward(self) -> None:
        episode = small_episode(FILES, TEST_FILES, ADD, keep=(ONE,))
        await episode.step(call("edit", path="calc.py", old="a - b", new="a + b"))
        await episode.step(call("edit", path="calc.py", old="def one():\n    return 1", new="def one():\n    return 2"))
        outcome = await episode.outcome()
        assert (outcome.reward, outcome.solved) == (0.0, False)
        assert outcome.hint == "one() gives 2, but should give 1."

    async def test_a_change_that_mends_nothing_counts_little(self) -> None:
        episode = small_episode(FILES, TEST_FILES, ADD, keep=(ONE,))
        await episode.step(call("edit", path="calc.py", old="a - b", new="a * b"))
        outcome = await episode.outcome()
        assert outcome.reward == pytest.approx(0.1)
        assert outcome.hint == "add(2, 3) gives 6, but should give 5."

    async def test_a_change_that_is_taken_back_counts_nothing(self) -> None:
        episode = small_episode(FILES, TEST_FILES, ADD, keep=(ONE,))
        await episode.step(call("edit", path="calc.py", old="a - b", new="a * b"))
        await episode.step(call("edit", path="calc.py", old="a * b", new="a - b"))
        assert (await episode.outcome()).reward == 0.0


class TestAssertTests:
    def test_what_is_expected_does_not_enter_the_sandbox(self) -> None:
        tests = prepare({"test_a.py": "def test_a():\n    assert f(1) == 'secret'\n    assert g()\n"})
        assert "secret" not in str(tests.job)
        passed = tests.judge([["test_a.py", "test_a", [(0, "'secret'"), (1, "True")], ""]])
        assert passed["test_a.py::test_a"].passed

    @pytest.mark.parametrize(
        "seen", [[], [(0, "1")], [(0, "2"), (1, "True")], [(0, "1"), (1, "False")], [(0, "x"), (1, "True")]]
    )
    def test_a_test_passes_only_if_every_assert_saw_the_right_value(self, seen: list[tuple[int, str]]) -> None:
        tests = prepare({"test_a.py": "def test_a():\n    assert f(1) == 1\n    assert g()\n"})
        assert not tests.judge([["test_a.py", "test_a", seen, ""]])["test_a.py::test_a"].passed

    @pytest.mark.parametrize(
        "condition", ["1" + "+1" * 400, "f() == {[1]: 2}", "f() == 1" + "0" * 400 + "+1j", "(" * 150 + "1" + ")" * 150]
    )
    async def test_a_test_that_the_policy_made_odd_is_run_or_refused(self, condition: str) -> None:
        episode = small_episode(FILES, TEST_FILES, ADD)
        await episode.step(call("edit", path="tests/test_calc.py", old="one() == 1", new=condition))
        assert "tests fail" in said(await episode.step(call("run_tests")))
        await episode.outcome()

    @pytest.mark.parametrize("value", ["1" + "0" * 400 + "+1j", "[" * 900 + "]" * 900, "-" * 1900 + "1", "{[]: 1}"])
    def test_a_value_that_cannot_be_computed_is_not_the_expected_one(self, value: str) -> None:
        tests = prepare({"test_a.py": "def test_a():\n    assert f(1) == 1\n"})
        assert not tests.judge([["test_a.py", "test_a", [(0, value)], ""]])["test_a.py::test_a"].passed

    @pytest.mark.parametrize(
        ("seen", "passes"),
        [
            ("'ValueError'", True),
            ("'UnicodeDecodeError'", True),
            ("'KeyError'", False),
            ("None", False),
            ("True", False),
        ],
    )
    def test_the_expected_exception_does_not_enter_the_sandbox(self, seen: str, passes: bool) -> None:
        tests = prepare({"test_a.py": "def test_a():\n    assert raises(ValueError, f, 1)\n"})
        assert "ValueError" not in str(tests.job)
        result = tests.judge([["test_a.py", "test_a", [(0, seen)], ""]])["test_a.py::test_a"]
        assert result.problem == ("" if passes else "f(1) should raise ValueError, but does not.")

    def test_a_test_file_that_is_not_python_fails(self) -> None:
        assert not prepare({"test_a.py": "def"}).judge([])["test_a.py"].passed


class TestRepository:
    def test_edits_are_kept_apart_from_the_folder(self, tmp_path: Path) -> None:
        (tmp_path / "a").mkdir()
        (tmp_path / "a" / "x.py").write_text("one")
        (tmp_path / ".git").mkdir()
        (tmp_path / ".git" / "answer").write_text("patch")
        (tmp_path / "out").symlink_to("/etc/passwd")
        repository = Repository(FolderTree(tmp_path))
        repository.edit("a/x.py", "one", "two")
        assert repository.paths() == ["a/x.py", "out"]
        assert repository.read("a/x.py") == "two"
        assert (tmp_path / "a" / "x.py").read_text() == "one"
        for path in ("out", ".git/answer", "a", "/etc/passwd"):
            with pytest.raises(ToolFailed, match="There is no file"):
                repository.read(path)

    def test_files_folders_and_names_of_a_real_folder_clash(self, tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        (tmp_path / "data").write_bytes(b"\xff")
        (tmp_path / "closed").symlink_to("closed")
        repository = Repository(FolderTree(tmp_path))
        for path, reason in (("empty", "is a folder"), ("data/x", "data is a file"), ("a" * 300, "is too long")):
            with pytest.raises(ToolFailed, match=reason):
                repository.edit(path, "", "x")
        for path in ("a" * 300, "data/x", "closed"):
            with pytest.raises(ToolFailed, match="There is no file"):
                repository.read(path)

    def test_tests_take_the_place_of_what_is_in_their_way(self, tmp_path: Path) -> None:
        (tmp_path / "a").write_text("a file")
        (tmp_path / "b.py").mkdir()
        (tmp_path / "b.py" / "c").write_text("x")
        write(tmp_path, "a/test_a.py", "one")
        write(tmp_path, "b.py", "two")
        assert [(tmp_path / "a" / "test_a.py").read_text(), (tmp_path / "b.py").read_text()] == ["one", "two"]

    def test_an_edit_does_not_follow_a_link(self, tmp_path: Path) -> None:
        source, copy, outside = tmp_path / "source", tmp_path / "copy", tmp_path / "outside"
        for folder in (source, copy, outside):
            folder.mkdir()
        (source / "link").symlink_to(outside)
        repository = Repository(FolderTree(source))
        repository.edit("link/x.py", "", "text")
        repository.copy_to(copy, judged=True)
        assert list(outside.iterdir()) == []
        assert (copy / "link" / "x.py").read_text() == "text"

    def test_edits_of_protected_files_do_not_reach_the_judged_copy(self, tmp_path: Path) -> None:
        repository = Repository(TextTree({"a.py": "one", "tests/test_a.py": "one", "conftest.py": "one"}))
        for path in repository.paths():
            repository.edit(path, "one", "two")
        repository.edit("sitecustomize.py", "", "two")
        repository.copy_to(tmp_path, judged=True)
        texts = {str(path.relative_to(tmp_path)): path.read_text() for path in tmp_path.rglob("*.py")}
        assert texts == {"a.py": "two", "tests/test_a.py": "one", "conftest.py": "one"}

    @pytest.mark.parametrize(
        "path",
        [
            "tests/data.json",
            "a/tests/b/c.py",
            "test_x.py",
            "x_test.py",
            "tox.ini",
            "x.pth",
            "pytest.toml",
            ".pytest.toml",
        ],
    )
    def test_protected(self, path: str) -> None:
        assert is_protected(path)

    @pytest.mark.parametrize("path", ["django/test/client.py", "calc.py", "attest.py", "README.md"])
    def test_not_protected(self, path: str) -> None:
        assert not is_protected(path)
