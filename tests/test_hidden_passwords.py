"""The password in a URL appears in no message, banner or table, and in no file."""

import asyncio
import json
from pathlib import Path

import pytest

from openclaw_rl.app.config import Config, load
from openclaw_rl.app.console import judging
from openclaw_rl.app.machine import machine_of
from openclaw_rl.cli import build_parser, main
from openclaw_rl.cli.launch import without_secrets
from openclaw_rl.client import Client, ServerError
from openclaw_rl.config.options import ConfigError
from openclaw_rl.engines.base import EngineAway
from openclaw_rl.engines.tinker.connection import Heartbeat
from openclaw_rl.engines.tinker.traits import look_at
from openclaw_rl.evals.chat import Chat
from openclaw_rl.evals.demo import command_line, make_plans, trial_data
from openclaw_rl.evals.trial import TrialOutcome
from openclaw_rl.judge.askers import AskParams, EndpointAsker
from openclaw_rl.judge.judges.base import JudgeDown

#: Nobody listens there.
URL = "http://alice:S3CRET@127.0.0.1:9/v1"
HELLO = [{"role": "user", "content": "hello"}]


async def test_a_judge_that_cannot_be_reached() -> None:
    asker = EndpointAsker(URL, "judge")
    with pytest.raises(JudgeDown, match=r"127\.0\.0\.1:9") as failure:
        await asker.ask(HELLO, AskParams(1, 0.0, 9), 1)
    await asker.close()
    assert "S3CRET" not in str(failure.value)


async def test_a_model_that_is_evaluated() -> None:
    async with Chat(URL) as chat:
        with pytest.raises(ServerError, match=r"127\.0\.0\.1:9") as failure:
            await chat.ask(HELLO)
    assert "S3CRET" not in str(failure.value)


def test_a_server_that_a_command_asks() -> None:
    with Client(URL) as client, pytest.raises(ServerError, match=r"127\.0\.0\.1:9") as failure:
        client.model()
    assert "S3CRET" not in str(failure.value)


async def test_a_tinker_server() -> None:
    with pytest.raises(EngineAway, match=r"127\.0\.0\.1:9") as failure:
        await look_at(URL)
    assert "S3CRET" not in str(failure.value)
    heartbeat = Heartbeat(URL)
    heartbeat._gone.set()
    with pytest.raises(ConnectionError, match=r"127\.0\.0\.1:9") as gone:
        await heartbeat.during(asyncio.Event().wait())
    assert "S3CRET" not in str(gone.value)


def test_the_banner_and_the_dry_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = Config.of(judge_base_url=URL, judge_model="judge")
    assert "judge at http://127.0.0.1:9/v1" in judging(config)
    flags = ["--judge-base-url", URL, "--judge-model", "judge", "--tinker-base-url", URL, "--run-dir", str(tmp_path)]
    main(["serve", "--dry-run", *flags])
    said = capsys.readouterr()
    assert "S3CRET" not in said.out + said.err


def test_the_files_of_a_demo(tmp_path: Path) -> None:
    server = ["--", "--judge-base-url", URL, "--judge-model", "judge", f"--teacher-url={URL},{URL}"]
    options = build_parser().parse_args(["demo", "--user-base-url", URL, "--user-model", "x", *server])
    machine = machine_of(Config.of(tinker_base_url=URL))
    (plan,) = make_plans(machine, options, tmp_path)
    assert plan.flags.count(URL) == 2, "the server itself is told"
    written = json.dumps(trial_data(TrialOutcome(plan))) + command_line(machine, options)
    assert "S3CRET" not in written
    assert "--teacher-url=http://127.0.0.1:9/v1,http://127.0.0.1:9/v1" in written


@pytest.mark.parametrize("command", [["demo"], ["rollout", "--env", "toolcall"]])
def test_a_key_after_which_results_would_repeat(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--", "--api-key=S3CRET"]) == 2
    said = capsys.readouterr()
    assert "--api-key cannot be given after --" in said.err
    assert "S3CRET" not in said.out + said.err


def test_a_launched_command() -> None:
    command = ["serve", "--judge-base-url", URL, f"--vllm-url={URL}", "--api-key", "S3CRET"]
    assert without_secrets(command)[1:] == [
        *("--judge-base-url", "http://127.0.0.1:9/v1", "--vllm-url=http://127.0.0.1:9/v1", "--api-key", "***")
    ]


@pytest.mark.parametrize("url", ["S3CRET@host", "http://a:S3CRET@", "http://a:S3CRET@host:0", "http://a:S3CRET@ho st"])
def test_a_judges_url_is_checked_as_a_whole(url: str) -> None:
    with pytest.raises(ConfigError, match="--judge-base-url is not a server's URL") as failure:
        load({"judge_base_url": url, "judge_model": "judge"}, {})
    assert "S3CRET" not in str(failure.value)
