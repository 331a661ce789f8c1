"""Tasks in a terminal that are not generated: one's own, and those of AgentBench-OS."""

import os
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from openclaw_rl.config.options import ConfigError
from openclaw_rl.envs.base import Outcome
from openclaw_rl.envs.registry import make_environment
from openclaw_rl.sandbox.kinds import problem_with
from support.server_program import ROOT
from support.terminal_policies import attempt

pytestmark = pytest.mark.skipif(
    bool(problem_with("bubblewrap")) and bool(problem_with("fences")),
    reason=f"commands cannot be confined: {problem_with('bubblewrap')}, {problem_with('fences')}",
)
CHECK = """
echo reward: 0.5
test "$(cat out.txt)" = right || { echo "out.txt is wrong" >&2; exit 1; }
"""
Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_task(name: str = "greet", toml: str = 'instruction = "Write right to out.txt."', **files: str) -> Path:
        folder = tmp_path / "tasks" / name
        for path, content in {"task.toml": toml, "check.sh": CHECK, **files}.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(content)
        return tmp_path / "tasks"

    return write_task


async def outcome_of(path: Path, *commands: str) -> Outcome:
    environment = make_environment("terminal", {"path": str(path)})
    task = next(environment.tasks("train", 0))
    return await attempt(environment, task, lambda _: list(commands))


async def test_a_task_of_ones_own_is_judged_by_its_check(write: Write) -> None:
    toml = 'split = "train"\nturns = 3\ninstruction = "Write right to out.txt."\nsetup = "echo prepared > p"'
    path = write(
        toml=toml, **{"files/in.txt": "right", "files/sub/tool.sh": "echo", "solution.sh": "cp in.txt out.txt"}
    )
    assert await outcome_of(path, "cat p && cp in.txt out.txt") == Outcome(1.0, solved=True)
    wrong = await outcome_of(path, "echo wrong > out.txt")
    assert (wrong.reward, wrong.solved) == (0.5, False)
    assert "The check failed: reward: 0.5\nout.txt is wrong" in wrong.hint
    environment = make_environment("terminal", {"path": str(path / "greet")})
    first, again = islice(environment.tasks("train", 0), 2)
    assert (first.id, again.id, first.data["turns"]) == ("greet", "greet", 3)
    assert first.data["messages"][1] == {"role": "user", "content": "Write right to out.txt."}


async def test_a_policy_cannot_see_or_change_the_check(write: Write) -> None:
    path = write(toml='split = "train"\ninstruction = "x"', **{"check.sh": "test -e marker && exit 1; ls | wc -l"})
    tampering = f"ls -R {path}; echo 'exit 0' > {path}/greet/check.sh; find / -name check.sh 2>/dev/null; touch marker"
    outcome = await outcome_of(path, tampering, "echo 'exit 0' > check.sh; chmod +x check.sh")
    assert not outcome.solved
    assert "marker" in (path / "greet" / "check.sh").read_text()


@pytest.mark.parametrize(
    ("check", "commands"),
    [
        ("test -e ~/marker", "touch marker"),
        ("python3 -c 'import colorsys; raise SystemExit(1)'", "echo 'import os; os._exit(0)' > colorsys.py"),
        (
            "python3 -c 'raise SystemExit(1)'",
            "p=$(python3 -m site --user-site); mkdir -p $p; echo 'import os; os._exit(0)' > $p/usercustomize.py",
        ),
    ],
)
async def test_a_workspace_cannot_take_over_the_check(write: Write, check: str, commands: str) -> None:
    path = write(toml='split = "train"\ninstruction = "x"', **{"check.sh": check})
    assert not (await outcome_of(path, commands)).solved


async def test_a_check_that_hangs_solves_nothing(write: Write) -> None:
    toml = 'split = "train"\ninstruction = "x"\n[verifier]\ntimeout_sec = 0.5'
    path = write(toml=toml, **{"check.sh": "echo reward: 0.7; cat pipe"})
    outcome = await outcome_of(path, "mkfifo pipe")
    assert (outcome.solved, outcome.reward) == (False, 0.1)
    assert outcome.hint == "The check failed: reward: 0.7"


@pytest.mark.parametrize("line", ["0.7", "reward: 7", "reward: nan", "reward: 0.7\nmore"])
async def test_partial_credit_is_a_marked_last_line(write: Write, line: str) -> None:
    path = write(toml='split = "train"\ninstruction = "x"', **{"check.sh": f"printf '{line}'; exit 1"})
    assert (await outcome_of(path, "true")).reward == 0.1


async def test_the_shape_of_terminal_bench_is_read(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toml = '[metadata]\nauthor_name = "A"\n[verifier]\ntimeout_sec = 7\n[environment]\ndocker_image = "an-image"\n'
    path = write(toml="version = '1.0'\n" + toml, **{"instruction.md": "# Do it", "tests/test.sh": "exit 0"})
    (path / "greet" / "check.sh").unlink()
    with pytest.raises(ConfigError, match=r"greet needs a container: use --sandbox docker or podman\."):
        make_environment("terminal", {"path": str(path)})
    (tmp_path / "docker").write_text('#!/bin/sh\n[ "$1" = rm ] || echo sandbox works')
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    environment = make_environment("terminal", {"path": str(path), "sandbox": "docker", "image": "base"})
    assert environment.about == "sandbox: docker, image base"  # type: ignore[attr-defined]
    (task,) = (task for split in ("train", "held-out") for task in listed(environment, split))
    assert (task.data["check"], task.data["check_seconds"], task.data["image"]) == ("tests/test.sh", 7.0, "an-image")
    episode = environment.open(task)
    assert episode._sandbox.about == "docker, image an-image"  # type: ignore[attr-defined]
    await episode.close()


def listed(environment: Any, split: str) -> list[Any]:
    try:
        return list(islice(environment.tasks(split, 0), 1))
    except ConfigError:
        return []


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({"toml": "instruction ="}, "task.toml cannot be read: Invalid value"),
        ({"toml": "instruction = 3"}, "instruction must be of type str"),
        ({"toml": 'instruction = "x"\nrewards = 3'}, "task.toml has 'rewards'; a task has instruction, split"),
        ({"toml": ""}, "greet has no instruction"),
        ({"toml": 'instruction = "x"\nsplit = "mine"'}, "terminal has no split mine"),
    ],
)
def test_a_mistake_in_a_task_is_one_sentence(write: Write, files: dict[str, str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        make_environment("terminal", {"path": str(write(**files))})


def test_settings_of_generated_tasks_are_refused(tmp_path: Path, write: Write) -> None:
    with pytest.raises(ConfigError, match=r"has no task: a task is a folder with task\.toml"):
        make_environment("terminal", {"path": str(tmp_path)})
    with pytest.raises(ConfigError, match="levels is for generated tasks"):
        make_environment("terminal", {"path": str(write()), "levels": 2})


async def test_the_example_of_ones_own_task_works() -> None:
    path = ROOT / "examples" / "terminal"
    solution = (path / "longest-word" / "solution.sh").read_text()
    assert (await outcome_of(path, solution)).solved
    assert not (await outcome_of(path, "echo fig > longest.txt")).solved
