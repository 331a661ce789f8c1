"""The demo and the evaluation as people call them: real servers, real conversations, files that can be looked at."""

import asyncio
import contextlib
import csv
import json
import os
import re
import shlex
import shutil
import signal
from collections.abc import AsyncIterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console

from openclaw_rl import __version__
from openclaw_rl.api.options import ApiKey
from openclaw_rl.app.config import Config, load
from openclaw_rl.app.machine import machine_of
from openclaw_rl.cli import build_parser, main
from openclaw_rl.cli.parser import given_flags
from openclaw_rl.config.options import ConfigError
from openclaw_rl.dashboard.evaluations import read_evaluations
from openclaw_rl.errors import UserError
from openclaw_rl.evals import coding, demo, eval_tasks, evaluate, trial
from openclaw_rl.evals import scores as scoreboard
from openclaw_rl.evals.arguments import METHODS, TASKS
from openclaw_rl.evals.chat import Chat
from openclaw_rl.evals.demo import free_folder, make_plans, table
from openclaw_rl.evals.eval_tasks import QUICK_CASES, spread
from openclaw_rl.evals.evaluate import chosen_tasks, server_flags
from openclaw_rl.evals.scores import CaseScore, EvalPlan, OnCase, TaskScores, by_task
from openclaw_rl.evals.summary import summarise
from openclaw_rl.lab.commands import check_writable
from openclaw_rl.lab.server import RunningServer
from openclaw_rl.learn.checkpoints import line_folder, write_new_record
from support.harness import Bench, running
from support.records import Book
from support.server_program import ROOT
from support.trials import a_trial, an_exam, learning


@pytest.mark.more
def test_a_demo_holds_conversations_learns_and_leaves_a_picture_and_a_page(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trial, "LONG_EXAM", 6)
    monkeypatch.setattr(trial, "SHORT_EXAM", 4)
    out = tmp_path / "demo"
    # Nobody is ever content with what the tiny model says, which a baseline would leave nothing of.
    server = ["--", "--batch-size", "2", "--baseline", "none", "--kv-cache-gib", "0.1", "--max-kl", "100"]
    line = ["demo", "--method", "rl", "--sessions", "6", "--minutes", "1", "--seeds", "2", "--at-once", "2"]
    model = ["--seed", "3", "--model-name", str(tiny_model)]
    assert main([*line, "--out", str(out), *model, *server]) == 0
    shown = capsys.readouterr().out
    assert "adherence" in shown
    assert "sessions until" in shown
    # It is no terminal that this is written to.
    assert shown.count("sessions  server started") == shown.count("sessions  done") == 2
    assert "\x1b" not in shown
    assert (out / "curve.svg").read_text().startswith("<svg")
    assert "<svg" in (out / "index.html").read_text()
    results = json.loads((out / "results.json").read_text())
    assert [trial["seed"] for trial in results["trials"]] == [3, 4]
    again = build_parser().parse_args(shlex.split(results["command"])[1:])
    assert (again.seed, again.model_name, again.seeds, again.server) == ("3", str(tiny_model), 2, server[1:])
    for held in results["trials"]:
        assert (held["method"], held["persona"], len(held["first_replies"])) == ("rl", "brief", 6)
        first, *_, last = held["exams"]
        assert first["version"] == 0
        assert last["version"] >= 1
        assert {"--model-name", str(tiny_model), "--batch-size"} <= set(held["settings"])
    # A page about the run of the trial, from the same files that any server leaves.
    assert main(["report", str(out / "rl-brief-3"), "--no-answers", "--model-name", str(tiny_model)]) == 0
    assert "<svg" in (out / "rl-brief-3" / "report.html").read_text()
    assert main(["demo", "--method", "rl", "--out", str(out), *model]) == 2
    assert "exists already" in capsys.readouterr().err


@pytest.mark.more
def test_a_demo_of_a_wish_corrects_answers_and_lets_the_model_practise(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trial, "LONG_EXAM", 4)
    out = tmp_path / "demo"
    line = ["demo", "--wish", "chef", "--out", str(out), "--model-name", str(tiny_model), "--minutes", "3"]
    assert main([*line, "--", "--kv-cache-gib", "0.2", "--no-guard"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    # The tiny model cannot keep a wish, so there is nothing to practise.
    assert "practice stopped: this model keeps to it in 0 of 96 answers; a larger model may" in shown
    assert "<svg" in (out / "index.html").read_text()
    results = json.loads((out / "results.json").read_text())
    (held,) = results["trials"]
    assert (held["persona"], held["first_replies"], len(held["exams"])) == ("chef", [False, False], 2)
    assert held["with_notes"]["answers"][0]["answer"] != held["exams"][0]["answers"][0]["answer"]
    again = build_parser().parse_args(shlex.split(results["command"])[1:])
    assert again.wish == "chef"


@pytest.mark.more
def test_an_evaluation_compares_a_checkpoint_with_the_base_model(
    tiny_model: Path,
    adapters: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(eval_tasks, "BUILT_IN", ("brief",))
    checkpoint = line_folder(tmp_path, "anna") / "checkpoints" / "step-000001-v7"
    shutil.copytree(adapters[0], checkpoint)
    write_new_record(checkpoint)
    Book(tmp_path).close()
    found = tmp_path / "found.json"
    line = ["eval", "--line", "anna", "--run-dir", str(tmp_path), "--compare", "base", "--eval-tasks", "conversation"]
    assert main([*line, "--model-name", str(tiny_model), "--json", str(found)]) == 0
    shown = capsys.readouterr().out
    assert "base: server started\nbase: conversation: 10 of 23 cases, about " in shown
    assert "base: conversation: done" in shown
    assert "\x1b" not in shown
    task = json.loads(found.read_text())["tasks"]["conversation"]
    own, base = task[str(checkpoint)]["cases"], task["base"]["cases"]
    assert [case["case"] for case in own] == [case["case"] for case in base]
    assert [case["answer"] for case in own] != [case["answer"] for case in base]
    assert 0 <= task["difference"]["p"] <= 1
    assert main(["report", "--line", "anna", "--run-dir", str(tmp_path), "--out", str(tmp_path / "page.html")]) == 0
    assert "conversation" in (tmp_path / "page.html").read_text()


@pytest.mark.more
def test_the_options_of_the_owner_s_own_server_do_not_reach_the_one_that_is_measured(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = coding.problems()[:2]
    monkeypatch.setattr(coding, "problems", lambda: few)
    monkeypatch.setenv("SGLANG_API_KEY", "abc")
    found = tmp_path / "found.json"
    line = ["eval", "--model-path", str(tiny_model), "--eval-tasks", "coding", "--json", str(found)]
    assert main(line) == 0
    cases = json.loads(found.read_text())["tasks"]["coding"][str(tiny_model)]["cases"]
    assert all(case["answer"] for case in cases), cases


def test_where_the_model_runs_is_the_owner_s_choice(tmp_path: Path) -> None:
    """Also where it was said in the environment or a file, of which the servers of demo and eval read neither."""
    file = tmp_path / "server.toml"
    file.write_text('dtype = "float32"\nbatch_size = 2\n')
    environment = {"BACKEND": "local", "KV_CACHE_GIB": "3", "OPENCLAW_RL_CACHE": "/cache", "SGLANG_API_KEY": "abc"}
    machine = machine_of(load({"device": "cpu", "trust_remote_code": True}, environment, file).config)
    options = build_parser().parse_args(["demo"])
    (plan,) = make_plans(machine, options, tmp_path)
    for flags in (server_flags(machine, "base"), plan.flags):
        told = build_parser().parse_args(["serve", *flags])
        assert (told.device, told.backend, told.dtype, told.cache_dir) == ("cpu", "local", "float32", "/cache")
        assert told.trust_remote_code
        assert "abc" not in flags
    assert build_parser().parse_args(["serve", *server_flags(machine, "base")]).kv_cache_gib == "3.0"
    # The demo's own settings stay what they are.
    assert (told.kv_cache_gib, told.preset) == ("1", "personal")
    assert "batch_size" not in told, "that of the preset is used"


@pytest.mark.parametrize("task", TASKS[:3])
def test_a_server_that_refuses_ends_the_evaluation_with_a_sentence(
    task: str, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with running(Bench(tiny_model, keys=(ApiKey("owner", "abc"),))) as bench:

        @contextlib.asynccontextmanager
        async def refusing(run_dir: Path, *_: str) -> AsyncIterator[RunningServer]:
            yield RunningServer(bench.url, run_dir)

        monkeypatch.setattr(evaluate, "run_server", refusing)
        assert main(["eval", "--model-path", str(tiny_model), "--eval-tasks", task]) == 2
    shown = capsys.readouterr()
    assert "answers 401" in shown.err
    assert shown.err.count("\n") == 1
    assert shown.out.endswith("server started\n"), "nothing was measured"


def a_case(name: str = "first", *, passed: bool = True) -> CaseScore:
    return CaseScore(name, passed, {}, "", "")


@pytest.mark.more
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_evaluation_that_is_stopped_tells_what_is_done_and_stops_its_server(
    number: signal.Signals,
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In the middle of a task of the second of two models: what it did of that task counts, but is not compared."""
    urls: list[str] = []

    async def code(chat: Chat, seed: int, on_case: OnCase) -> TaskScores:
        urls.append(chat.url)
        return TaskScores("coding", (a_case("first"), a_case("second", passed=len(urls) == 1)))

    async def tools(chat: Chat, seed: int, on_case: OnCase) -> TaskScores:
        on_case(a_case("first"))
        if len(urls) == 2:
            signal.raise_signal(number)
            await asyncio.sleep(3600)
        return TaskScores("tool-use", (a_case("first"), a_case("second")))

    monkeypatch.setitem(evaluate.PLANS, "coding", lambda quick: EvalPlan("coding", 2, 10, code))
    monkeypatch.setitem(evaluate.PLANS, "tool-use", lambda quick: EvalPlan("tool-use", 2, 10, tools))
    found = tmp_path / "found.json"
    line = ["eval", "--model-path", str(tiny_model), "--compare", "base", "--eval-tasks", "coding,tool-use"]
    assert main([*line, "--model-name", str(tiny_model), "--json", str(found)]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("Cases: coding 2, tool-use 2 of each of 2 models. Ctrl-C stops")
    assert "Stopped." in shown.out
    assert not shown.err
    tasks = json.loads(found.read_text())["tasks"]
    assert tasks["coding"]["difference"]["mean"] == 0.5
    assert (tasks["tool-use"]["planned"], len(tasks["tool-use"]["base"]["cases"])) == (2, 1)
    assert "difference" not in tasks["tool-use"]
    for url in urls:
        with pytest.raises(httpx.ConnectError):
            httpx.get(url, trust_env=False)


def test_a_table_of_what_was_measured_has_no_model_of_which_nothing_is_known() -> None:
    plans = [EvalPlan(task, 2, 10, evaluate.PLANS["coding"](True).ask) for task in ("coding", "tool-use")]
    whole = [TaskScores(plan.task, (a_case(), a_case("second"))) for plan in plans]
    half = TaskScores("tool-use", (a_case(passed=False),))
    mine = "runs/default/checkpoints/step-000012"
    console = Console(width=80)
    with console.capture() as shown:
        console.print(scoreboard.table([mine], by_task(plans, [[whole[0]]])))
        console.print(scoreboard.table([mine, "base"], by_task(plans, [whole, [whole[0], half]])))
    lines = shown.get().splitlines()
    assert max(map(len, lines)) <= 80
    heads = [[cell.strip() for cell in line.split("┃")[1:-1]] for line in lines if line[0] == "┃"]
    assert "".join(row[2] for row in heads if len(row) > 3) == mine, "a path is whole"
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line[0] == "│"]
    assert rows[:2] == [["coding", "2", "1.00"], ["", "", "(0.34–1.00)"]]
    assert rows[4] == ["tool-use", "2 and 1 of", "1.00", "0.00", "–", "–"]
    assert rows[5] == ["", "2", "(0.34–1.00)", "(0.00–0.79)", "", ""]


def test_a_quick_evaluation_asks_some_cases_of_every_kind() -> None:
    for name in TASKS[:3]:
        whole, quick = (evaluate.PLANS[name](is_quick) for is_quick in (False, True))
        assert quick.size == QUICK_CASES < whole.size
    assert list(spread(range(46), 4)) == [0, 11, 23, 34]
    assert list(spread(range(3), 4)) == [0, 1, 2]
    assert build_parser().parse_args(["eval", "--quick"]).quick


class StoppedServer:
    """Learns a policy after the first sessions. The user presses Ctrl-C when it has been examined."""

    def __init__(self, url: str, run_dir: Path) -> None:
        self.url, self.run_dir, self.asked, self.is_stopped = url, run_dir, 0, False

    async def state(self) -> dict[str, Any]:
        """People ask before each session, so some sessions have been held after a dozen calls."""
        self.asked += 1
        if self.asked > 12 and not self.is_stopped and any(one.version for one in read_evaluations(self.run_dir)):
            self.is_stopped = True
            signal.raise_signal(signal.SIGINT)
        return {"policy_version": 4 if self.asked > 12 else 0, "learner": "", "next_step": None}


def test_a_demo_that_is_stopped_leaves_a_picture_and_a_page_of_what_it_measured(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C a second time skips what would still be measured then. The method is the user's own."""

    async def skipped(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(3600)

    monkeypatch.setattr(trial, "LONG_EXAM", 3)
    monkeypatch.setattr(trial, "SHORT_EXAM", 2)
    monkeypatch.setattr(demo, "add_perplexity", skipped)
    out = tmp_path / "demo"
    with running(Bench(tiny_model)) as bench:

        @contextlib.asynccontextmanager
        async def serving(run_dir: Path, *_: str) -> AsyncIterator[StoppedServer]:
            run_dir.mkdir(parents=True)
            yield StoppedServer(bench.url, run_dir)

        monkeypatch.setattr(trial, "run_server", serving)
        own = tmp_path / "folder" / "mine.py"
        own.parent.mkdir()
        own.write_text("from openclaw_rl.methods.rl import Rl\nclass Mine(Rl): pass\n")
        line = ["demo", "--method", f"{own}:Mine", "--out", str(out), "--model-name", str(tiny_model)]
        assert main(line) == 0
    shown = capsys.readouterr()
    assert shown.out.count("Stopped.") == 2
    assert not shown.err
    results = json.loads((out / "results.json").read_text())
    assert results["version"] == __version__
    assert results["libraries"]["torch"] == version("torch")
    assert results["hardware"]["cores"] >= 1
    assert f"--method {own}:Mine" in results["command"]
    (measured,) = results["trials"]
    assert measured["method"] == f"{own}:Mine"
    assert [exam["version"] for exam in measured["exams"]] == [0, 4]
    run_dir = out / "mine.py:Mine-brief-0"
    assert [(one.version, one.what) for one in read_evaluations(run_dir)] == [(0, "brief"), (4, "brief")]
    with (out / "curves.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["method"], row["version"], row["answers"]) for row in rows] == [
        (f"{own}:Mine", "0", "3"),
        (f"{own}:Mine", "4", "2"),
    ]
    assert "mine.py:Mine" in shown.out
    assert "mine.py:Mine" in (out / "index.html").read_text()
    assert not measured["complete"]
    assert measured["first_replies"]
    assert (out / "curve.svg").read_text().startswith("<svg")
    assert "A trial was stopped before its end" in (out / "index.html").read_text()


def test_a_file_that_cannot_be_written_is_said_before_anything_is_measured(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delattr(evaluate, "measure")
    line = ["eval", "--model-path", str(tiny_model), "--json"]
    for path, why in ((tmp_path / "nope" / "x.json", "No such file or directory"), (tmp_path, "Is a directory")):
        assert main([*line, str(path)]) == 2
        assert capsys.readouterr().err == f"openclaw-rl: {path} cannot be written: {why}.\n"


def test_asking_whether_a_file_can_be_written_leaves_no_trace(tmp_path: Path) -> None:
    new, old = tmp_path / "new.json", tmp_path / "old.json"
    old.write_text("{}")
    check_writable(new)
    check_writable(old)
    assert not new.exists()
    assert old.read_text() == "{}"


def test_what_cannot_be_evaluated_is_said_in_a_sentence(tmp_path: Path) -> None:
    machine = machine_of(Config.of())
    with pytest.raises(UserError, match="neither a checkpoint nor a model folder"):
        server_flags(machine, str(tmp_path))
    with pytest.raises(ConfigError, match="Unknown task juggling"):
        chosen_tasks("coding, juggling")
    with pytest.raises(ConfigError, match="names no task"):
        chosen_tasks(" , ")
    (tmp_path / "checkpoint.json").write_text("{}")
    (tmp_path / "adapter_config.json").write_text('{"r": "many"}')
    with pytest.raises(UserError, match="is damaged"):
        server_flags(machine, str(tmp_path))


def test_all_methods_and_seeds_are_one_trial_each(tmp_path: Path) -> None:
    options = build_parser().parse_args(
        ["demo", "--method", "all", "--persona", "all", "--seeds", "2", "--out", str(tmp_path), "--", "--w-rl", "2"]
    )
    plans = make_plans(machine_of(Config.of(seed=5)), options, tmp_path)
    assert len(plans) == 4 * len(METHODS) * 2
    assert len({plan.run_dir for plan in plans}) == len(plans)
    assert {plan.seed for plan in plans} == {5, 6}
    assert all(plan.flags[-2:] == ("--w-rl", "2") for plan in plans)
    options.seeds = 0
    with pytest.raises(ConfigError, match="above 0"):
        make_plans(machine_of(Config.of()), options, tmp_path)


@pytest.mark.parametrize("alone", [("--user-model", "x"), ("--user-base-url", "http://127.0.0.1:1")])
def test_half_of_a_model_that_plays_the_person_is_refused(alone: tuple[str, str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must be given together"):
        make_plans(machine_of(Config.of()), build_parser().parse_args(["demo", *alone]), tmp_path)
    both = ["--user-base-url", "http://127.0.0.1:1", "--user-model", "x"]
    (plan,) = make_plans(machine_of(Config.of()), build_parser().parse_args(["demo", *both]), tmp_path)
    assert (plan.user_url, plan.user_model) == ("http://127.0.0.1:1", "x")


@pytest.mark.more
def test_a_server_that_does_not_start_is_said_and_fails_the_demo(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = [
        "demo",
        "--method",
        "all",
        "--at-once",
        "4",
        "--out",
        str(tmp_path / "out"),
        "--model-name",
        str(tiny_model),
    ]
    assert main([*line, "--", "--gate", "no-such-file"]) == 1
    shown = capsys.readouterr().out
    assert shown.count("failed: The server did not start") == len(METHODS)
    assert "no-such-file" in shown


def test_a_demo_runs_what_make_run_runs(tmp_path: Path) -> None:
    (plan,) = make_plans(machine_of(Config.of()), build_parser().parse_args(["demo"]), tmp_path)
    makefile = (ROOT / "Makefile").read_text()
    (served,) = re.findall(r"run\.py (.*) \$\(ARGS\)", makefile)
    usual = load(given_flags(build_parser().parse_args(["serve", *served.split()])), {}).config
    demo_flags = ["--method", plan.method, *plan.flags]
    shown = load(given_flags(build_parser().parse_args(["serve", *demo_flags])), {}).config
    assert shown.given().keys() - usual.given().keys() == {"kv_cache_gib", "save_interval"}
    for name in usual.given():
        assert shown.value(name) == usual.value(name)


def test_a_method_that_is_none_is_said_before_anything_runs(tmp_path: Path) -> None:
    options = build_parser().parse_args(["demo", "--method", "combin"])
    with pytest.raises(ConfigError, match="--method combin"):
        make_plans(machine_of(Config.of()), options, tmp_path)


def test_a_demo_without_a_folder_takes_one_that_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert free_folder() == Path("runs/demo")
    Path("runs/demo").mkdir(parents=True)
    Path("runs/demo-2").mkdir()
    assert free_folder() == Path("runs/demo-3")


def test_a_model_that_cannot_be_had_is_said_in_a_sentence(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    line = ["demo", "--out", str(tmp_path / "out"), "--model-name", str(tmp_path / "nowhere.gguf")]
    assert main(line) == 2
    assert "nowhere.gguf" in capsys.readouterr().err


def test_the_table_at_the_end_fits_a_terminal_of_80_columns() -> None:
    """Each trial in two lines, and nothing cut off or broken within a word."""
    learned = [learning("topk-select", "teaching-assistant", seed) for seed in range(3)]
    some = [a_trial(an_exam([True] * 9), method="rl", seed=seed, sessions=[seed < 1] * 100) for seed in range(3)]
    one = a_trial(an_exam([False] * 9), an_exam([True] * 9, 540.0), persona="student", sessions=[False] * 6)
    console = Console(width=80)
    with console.capture() as shown:
        console.print(table(summarise([*learned, *some, one])))
    lines = shown.get().splitlines()
    assert max(map(len, lines)) <= 80
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")]
    assert [row[0] for row in rows] == ["teaching-assistant", "topk-select", "brief", "rl", "student", "combine"]
    assert [row[4] for row in rows] == ["6.0", "", "≥ 67.7, 2 of 3", "not within 100", "not within 6", ""]
    assert [row[2] for row in rows] == ["75", "(51–90)", "–", "", "100", "(70–100)"]
