"""The results of a run that was stopped at any moment: what is done is kept, and another run's is refused."""

from pathlib import Path

import pytest

from openclaw_rl.errors import UserError
from openclaw_rl.evals.result_log import ResultLog

HEAD = {"seed": 1, "began": 5}


def log(path: Path, **head: object) -> ResultLog:
    return ResultLog(path, {**HEAD, **head}, ["seed"])


@pytest.mark.parametrize("torn", ["", '{"item": "b", "ans', "\x85"])
def test_a_run_goes_on_with_what_a_killed_one_has_written(torn: str, tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    killed = log(path)
    assert killed.begin(["a"]) == 1
    done = {"item": "a", "answer": "two\u2028lines"}
    killed.add(done)
    assert killed.begin(["b"]) == 1
    with path.open("a") as file:
        file.write(torn)
    again = log(path, began=9)
    assert again.lines == [done]
    assert again.begin(["b"]) == 2
    again.add({"item": "b"})
    assert log(path).lines == [done, {"item": "b"}]
    with pytest.raises(UserError, match="results of another seed, 1"):
        log(path, seed=2)


def test_a_run_that_finished_nothing_is_no_other_run(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text("")
    assert log(path).begin(["a"]) == 1
    assert log(path).begin(["a"]) == 2
    assert log(path, seed=2).begin(["a"]) == 1
