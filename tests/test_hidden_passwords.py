"""The password in a URL appears in no message, banner or table."""

import asyncio
from pathlib import Path

import pytest

from openclaw_rl.app.banner import judging
from openclaw_rl.app.config import Config, load
from openclaw_rl.cli import main
from openclaw_rl.client import Client, ServerGone
from openclaw_rl.config.options import ConfigError
from openclaw_rl.engines.base import EngineAway
from openclaw_rl.engines.tinker.heartbeat import Heartbeat
from openclaw_rl.engines.tinker.traits import look_at
from openclaw_rl.evals.chat import ChatFailed, HttpChat
from openclaw_rl.judge.askers import AskParams, EndpointAsker
from openclaw_rl.judge.errors import JudgeDown

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
    async with HttpChat(URL) as chat:
        with pytest.raises(ChatFailed, match=r"127\.0\.0\.1:9") as failure:
            await chat.ask(HELLO)
    assert "S3CRET" not in str(failure.value)


def test_a_server_that_a_command_asks() -> None:
    with Client(URL) as client, pytest.raises(ServerGone, match=r"127\.0\.0\.1:9") as failure:
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


@pytest.mark.parametrize("url", ["S3CRET@host", "http://a:S3CRET@", "http://a:S3CRET@host:0", "http://a:S3CRET@ho st"])
def test_a_judges_url_is_checked_as_a_whole(url: str) -> None:
    with pytest.raises(ConfigError, match="--judge-base-url is not a server's URL") as failure:
        load({"judge_base_url": url, "judge_model": "judge"}, {})
    assert "S3CRET" not in str(failure.value)
