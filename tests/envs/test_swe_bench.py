"""The environment swe with tasks in the format of SWE-bench: clones, folders, pytest, and a stand-in for docker."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from openclaw_rl.config.options import ConfigError
from openclaw_rl.envs.base import EnvFailed, Environment, Outcome
from openclaw_rl.envs.registry import make_environment
from openclaw_rl.envs.swe import bench as swe_bench
from openclaw_rl.envs.swe.bench import IMAGE_PYTHON, export_clone
from openclaw_rl.envs.swe.environment import make_swe
from openclaw_rl.envs.swe.suites import read_results
from openclaw_rl.sandbox.base import remove_folder
from support.swe_policies import call, needs_sandbox, said, text

pytestmark = needs_sandbox

CALC = "def add(a, b):\n    return a - b\n\n\ndef one():\n    return 1\n"
TESTS = "from calc import one\n\n\ndef test_one():\n    assert one() == 1\n"
TEST_PATCH = """diff --git a/tests/test_calc.py b/tests/test_calc.py
--- a/tests/test_calc.py
+++ b/tests/test_calc.py
@@ -1,5 +1,9 @@
-from calc import one
+from calc import add, one
 
 
 def test_one():
     assert one() == 1
+
+
+def test_add():
+    assert add(2, 3) == 5
"""
INSTANCE: dict[str, Any] = {
    "instance_id": "owner__calc-1",
    "repo": "owner/calc",
    "problem_statement": "add subtracts.",
    "test_patch": TEST_PATCH,
    "patch": "not needed",
    "FAIL_TO_PASS": '["tests/test_calc.py::test_add"]',
    "PASS_TO_PASS": ["tests/test_calc.py::test_one"],
    "split": "train",
}
#: Makes every test pass, if pytest loads it.
HOOK = """
import pytest

@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport():
    made = yield
    made.get_result().outcome = "passed"
"""
#: Stands in for docker: an image's repository is the folder `image`, and its Python is ours.
DOCKER = f"""#!{sys.executable}
import os, shutil, sys
here = os.path.dirname(os.path.abspath(__file__))
command, *rest = sys.argv[1:]
open(os.path.join(here, "log"), "a").write(" ".join(sys.argv[1:]) + "\\n")
if command == "create":
    print("container1")
elif command == "cp":
    shutil.copytree(os.path.join(here, "image"), rest[1], dirs_exist_ok=True)
elif command == "run":
    at = next(index for index, word in enumerate(rest) if word.startswith("swebench/"))
    argv = [sys.executable if word == {IMAGE_PYTHON!r} else word for word in rest[at + 1:]]
    os.execvpe(argv[0], argv, {{"PATH": os.environ["PATH"]}})
"""


@pytest.fixture
def bench(tmp_path: Path) -> Path:
    """A folder with one instance and a clone of its repository."""
    clone = tmp_path / "repos" / "owner__calc"
    write_files(clone)
    git = ["git", "-C", str(clone), "-c", "user.name=x", "-c", "user.email=x"]
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        subprocess.run([*git, *arguments], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    write_instance(tmp_path, base_commit=commit)
    return tmp_path


@pytest.fixture(scope="module")
def python_with_pytest() -> Iterator[str]:
    """The system's Python with pytest, where programs of a sandbox may read it."""
    system = shutil.which("python3", path="/usr/local/bin:/usr/bin:/bin")
    if system is None:
        pytest.skip("this machine has no Python of the system")
    folder = Path(tempfile.mkdtemp(prefix="openclaw-python-"))
    subprocess.run([system, "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
    (packages,) = (folder / "venv" / "lib").glob("python*/site-packages")
    installed = Path(pytest.__file__).parents[1]
    for name in ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments"):
        shutil.copytree(installed / name, packages / name)
    shutil.copy(installed / "py.py", packages)
    subprocess.run(["chmod", "-R", "a+rX", str(folder)], check=True)
    yield str(folder / "venv" / "bin" / "python")
    remove_folder(folder)


def write_files(folder: Path) -> None:
    (folder / "tests").mkdir(parents=True)
    (folder / "calc.py").write_text(CALC)
    (folder / "tests" / "test_calc.py").write_text(TESTS)


def write_instance(folder: Path, **changes: object) -> None:
    (folder / "instances.jsonl").write_text(json.dumps({**INSTANCE, **changes}) + "\n")


async def attempt(environment: Environment, *answers: Any) -> Outcome:
    (task,) = islice(environment.tasks("train", 0), 1)
    episode = environment.open(task)
    await episode.start()
    for answer in answers:
        await episode.step(answer)
    outcome = await episode.outcome()
    await episode.close()
    environment.close()  # type: ignore[attr-defined]
    return outcome


FIX = call("edit", path="calc.py", old="a - b", new="a + b")
EMPTY_TESTS = call("edit", path="tests/test_calc.py", old=TESTS, new="def test_one():\n    pass\n")


@pytest.mark.more
async def test_an_instance_is_solved_by_the_edit_that_its_tests_want(bench: Path, python_with_pytest: str) -> None:
    outcome = await attempt(make_swe(path=bench, python=python_with_pytest), FIX, text("Done."))
    assert (outcome.reward, outcome.solved) == (1.0, True)


async def test_the_issue_is_shown_and_the_tests_of_the_patch_and_the_history_are_not(
    bench: Path, python_with_pytest: str
) -> None:
    environment = make_swe(path=bench, python=python_with_pytest)
    (task,) = islice(environment.tasks("train", 0), 1)
    episode = environment.open(task)
    assert (await episode.start())[-1]["content"] == "add subtracts."
    assert said(await episode.step(call("list_files"))) == "calc.py\ntests/test_calc.py"
    assert "add" not in said(await episode.step(call("read_file", path="tests/test_calc.py")))
    assert said(await episode.step(call("run_tests"))) == "All 1 tests pass."
    assert not (await episode.outcome()).solved


async def test_edits_of_tests_do_not_count(bench: Path, python_with_pytest: str) -> None:
    outcome = await attempt(make_swe(path=bench, python=python_with_pytest), EMPTY_TESTS)
    assert (outcome.reward, outcome.solved) == (0.0, False)


async def test_a_folder_with_the_name_of_the_instance_needs_no_git(tmp_path: Path, python_with_pytest: str) -> None:
    write_files(tmp_path / "repos" / "owner__calc-1")
    write_instance(tmp_path)
    assert (await attempt(make_swe(path=tmp_path, python=python_with_pytest), FIX)).solved
    assert (tmp_path / "repos" / "owner__calc-1" / "calc.py").read_text() == CALC


async def test_the_variable_names_the_folder(
    bench: Path, monkeypatch: pytest.MonkeyPatch, python_with_pytest: str
) -> None:
    monkeypatch.setenv("SWE_BENCH_PATH", str(bench))
    assert (await attempt(make_swe(python=python_with_pytest), FIX)).solved


@pytest.mark.more
async def test_pytest_runs_the_tests(bench: Path, python_with_pytest: str) -> None:
    environment = make_swe(path=bench, python=python_with_pytest)
    assert (await attempt(environment, EMPTY_TESTS, FIX)).solved
    environment = make_swe(path=bench, python=python_with_pytest)
    wrong = call("edit", path="calc.py", old="a - b", new="a * b")
    outcome = await attempt(environment, wrong)
    assert outcome.reward == pytest.approx(0.1)
    assert "tests/test_calc.py::test_add fails" in outcome.hint


async def test_files_that_pytest_loads_by_itself_change_nothing(bench: Path, python_with_pytest: str) -> None:
    ini = "[pytest]\naddopts = --deselect tests/test_calc.py::test_add\n"
    edits = [call("edit", path=name, old="", new=HOOK) for name in ("conftest.py", "tests/conftest.py", "pytest.py")]
    edits.append(call("edit", path="pytest.ini", old="", new=ini))
    edits.append(call("edit", path="calc.py", old="a - b", new="a * b"))
    outcome = await attempt(make_swe(path=bench, python=python_with_pytest), *edits)
    assert not outcome.solved


@pytest.mark.more
async def test_with_docker_files_and_python_are_those_of_the_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files(tmp_path / "image")
    (tmp_path / "docker").write_text(DOCKER)
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    write_instance(tmp_path)
    assert (await attempt(make_swe(path=tmp_path, sandbox="docker"), FIX)).solved
    log = (tmp_path / "log").read_text().splitlines()
    assert "create swebench/sweb.eval.x86_64.owner_1776_calc-1:latest" in log
    assert "rm --force container1" in log
    tested = next(line for line in log if line.startswith("run") and "pytest" in line)
    assert "--network none" in tested
    assert f"swebench/sweb.eval.x86_64.owner_1776_calc-1:latest {IMAGE_PYTHON}" in tested


async def test_attempts_share_an_export_that_outlives_the_one_that_began_it(
    bench: Path, monkeypatch: pytest.MonkeyPatch, python_with_pytest: str
) -> None:
    begun, may_end, exports = threading.Event(), threading.Event(), []

    def slow_export(clone: Path, commit: str, target: Path) -> None:
        exports.append(target)
        begun.set()
        assert may_end.wait(30)
        export_clone(clone, commit, target)

    monkeypatch.setattr(swe_bench, "export_clone", slow_export)
    environment = make_swe(path=bench, python=python_with_pytest)
    (task,) = islice(environment.tasks("train", 0), 1)
    first = asyncio.create_task(environment.open(task).start())  # type: ignore[arg-type]
    assert await asyncio.to_thread(begun.wait, 30)
    first.cancel()
    await asyncio.wait([first])
    assert first.cancelled()
    episodes = [environment.open(task) for _ in range(2)]
    starts = asyncio.gather(*(episode.start() for episode in episodes))
    await asyncio.sleep(0)
    may_end.set()
    await starts
    for episode in episodes:
        assert "a - b" in said(await episode.step(call("read_file", path="calc.py")))
    assert len(exports) == 1
    environment.close()  # type: ignore[attr-defined]


async def test_an_export_that_failed_is_tried_again(
    bench: Path, monkeypatch: pytest.MonkeyPatch, python_with_pytest: str
) -> None:
    environment = make_swe(path=bench, python=python_with_pytest)
    (task,) = islice(environment.tasks("train", 0), 1)
    with monkeypatch.context() as patch:
        patch.setenv("PATH", "/nowhere")
        with pytest.raises(EnvFailed, match="git could not be run"):
            await environment.open(task).start()
    assert (await attempt(environment, FIX)).solved


def test_without_git_the_start_is_refused(
    bench: Path, monkeypatch: pytest.MonkeyPatch, python_with_pytest: str
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name, **_: None if name == "git" else f"/usr/bin/{name}")
    with pytest.raises(ConfigError, match="owner__calc-1 needs git"):
        make_swe(path=bench, python=python_with_pytest)


def test_a_refusal_leaves_no_folder(bench: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    with pytest.raises(ConfigError, match="cannot run tests"):
        make_swe(path=bench, python="/nowhere/bin/python")
    assert list(temporary.glob("openclaw-bench-*")) == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"FAIL_TO_PASS": []}, "line 1: FAIL_TO_PASS"),
        ({"FAIL_TO_PASS": "[broken"}, "line 1"),
        ({"FAIL_TO_PASS": ["test_add (calc.Tests)"]}, "is not a test of pytest"),
        ({"instance_id": "../up"}, "line 1: instance_id"),
        ({"instance_id": ".."}, "line 1: instance_id"),
        ({"split": "test"}, "line 1: split: .*there is no split test"),
        ({"repo": "owner/other"}, "has no repository"),
        ({"base_commit": "--output=x"}, "line 1: base_commit"),
    ],
)
def test_a_wrong_file_is_refused_in_a_sentence(bench: Path, changes: dict[str, object], reason: str) -> None:
    write_instance(bench, **changes)
    with pytest.raises(ConfigError, match=reason):
        make_environment("swe", {"path": str(bench), "seconds": 5})


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"levels": 1}, "levels is for generated tasks"),
        ({"python": "/nowhere/bin/python"}, "cannot run tests in the sandbox"),
        ({"path": "/nowhere"}, "instances.jsonl"),
        *(({"seconds": seconds}, "must be a number above 0") for seconds in (0, -1, float("inf"), "ten", True)),
    ],
)
def test_wrong_settings_are_refused(bench: Path, settings: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        make_environment("swe", {"path": str(bench), **settings})


def test_settings_of_instances_need_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SWE_BENCH_PATH", raising=False)
    with pytest.raises(ConfigError, match="name their folder with path"):
        make_environment("swe", {"seconds": 5})


def test_the_summary_of_pytest_is_read() -> None:
    output = (
        "...\nPASSED tests/a.py::test_a\nPASSED tests/a.py::test_b[x y]\n"
        "FAILED tests/a.py::C::test_c - assert 1 == 2\nERROR tests/b.py - ImportError: no\n"
    )
    results = read_results(output)
    assert [id_ for id_, result in results.items() if result.passed] == [
        "tests/a.py::test_a",
        "tests/a.py::test_b[x y]",
    ]
    assert results["tests/a.py::C::test_c"].problem == "tests/a.py::C::test_c fails: assert 1 == 2"
