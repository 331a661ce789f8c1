"""The whole program as a user runs it: real processes, real signals, the official client."""

import asyncio
import json
import os
import random
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import transformers

from openclaw_rl.app.checks import model_folder
from openclaw_rl.app.config import Config
from openclaw_rl.errors import UserError
from openclaw_rl.learn.checkpoints import Checkpoints
from openclaw_rl.ledger import deletion
from openclaw_rl.ledger.run_dir import SERVER_FILE as SERVER
from openclaw_rl.ledger.schema import FILE
from support.commands import run_command
from support.conversations import assert_recorded, talk
from support.records import Book, a_turn
from support.server_program import SECONDS, SERVE, Program, serving, starting, until

HELLO = [{"role": "user", "content": "Hello!"}]
SHORT = {"messages": HELLO, "max_tokens": 2}
#: For tests in which nothing is learned: no process is started for it.
SERVES_ONLY = ("--max-steps", "0")


def wait_for_load(program: Program, sequences: int = 1) -> None:
    """Until so many sequences have been asked for, and some are being sampled."""

    def asked() -> float:
        return sum(program.metric(f"openclaw_{which}_sequences") for which in ("active", "queued"))

    until(lambda: asked() >= sequences and program.metric("openclaw_active_sequences") > 0, program)


def test_the_embedded_model_talks_streams_and_is_reproducible() -> None:
    """What the README promises first, on the real model, through `run.py`."""
    with serving([sys.executable, "run.py"], None) as program:
        client = program.client
        question = [{"role": "user", "content": "What is the capital of France?"}]
        greedy = {"model": "smollm2-135m", "messages": question, "temperature": 0, "max_tokens": 12}
        answer = client.chat.completions.create(**greedy)
        assert "Paris" in answer.choices[0].message.content
        pieces = [c.choices[0].delta.content or "" for c in client.chat.completions.create(**greedy, stream=True)]
        assert "".join(pieces) == answer.choices[0].message.content
        sampled = {**greedy, "temperature": 1, "n": 3, "seed": 5}
        one, other = (
            [choice.message.content for choice in client.chat.completions.create(**sampled).choices] for _ in range(2)
        )
        assert one == other
        assert len(set(one)) > 1
        with ThreadPoolExecutor(20) as pool:
            burst = list(pool.map(lambda _: client.chat.completions.create(**greedy), range(20)))
        assert {answer.choices[0].message.content for answer in burst} == {answer.choices[0].message.content}


@pytest.mark.more
def test_sigterm_lets_a_request_finish_and_exits_0(tiny_model: Path) -> None:
    with serving(SERVE, tiny_model) as program:
        stream = program.client.chat.completions.create(
            model=tiny_model.name, messages=HELLO, stream=True, max_tokens=200, seed=1
        )
        chunks = iter(stream)
        next(chunks)
        program.process.send_signal(signal.SIGTERM)
        rest = list(chunks)
        assert rest[-1].choices[0].finish_reason in ("stop", "length")
        assert program.process.wait(SECONDS) == 0


@pytest.mark.more
def test_a_start_finishes_a_deletion_that_was_killed(tiny_model: Path, tmp_path: Path) -> None:
    book = Book(tmp_path)
    for session in ("one", "two"):
        book.capture(a_turn(session))
        (tmp_path / "screenshots" / session).mkdir(parents=True)
    # The ledger's part alone: the program was killed before it came to the screenshots.
    book.change(deletion.delete_sessions, [1])
    book.close()
    with serving(SERVE, tiny_model, "--run-dir", str(tmp_path), *SERVES_ONLY):
        assert [path.name for path in (tmp_path / "screenshots").iterdir()] == ["two"]


@pytest.mark.more
def test_sigterm_does_not_wait_longer_than_it_may(tiny_model: Path) -> None:
    with serving(SERVE, tiny_model, "--shutdown-seconds", "1", *SERVES_ONLY) as program, ThreadPoolExecutor(12) as pool:
        ask = {"messages": HELLO, "max_tokens": 450, "n": 16}
        url = f"{program.url}/v1/chat/completions"
        running = [pool.submit(httpx.post, url, json=ask, timeout=SECONDS) for _ in range(12)]
        wait_for_load(program, 12 * 16)
        program.process.send_signal(signal.SIGINT)
        answers = [future.result() for future in running]
        assert 503 in {answer.status_code for answer in answers}
        assert all("shutting down" in answer.text for answer in answers if answer.status_code == 503)
        assert program.process.wait(SECONDS) == 0
        assert "Traceback" not in program.log


@pytest.mark.more
def test_a_second_ctrl_c_tells_who_waits_and_ends_quietly(tiny_model: Path) -> None:
    with serving(SERVE, tiny_model) as program, ThreadPoolExecutor(12) as pool:
        ask = {"messages": HELLO, "max_tokens": 450, "n": 16}
        url = f"{program.url}/v1/chat/completions"
        running = [pool.submit(httpx.post, url, json=ask, timeout=SECONDS) for _ in range(12)]
        wait_for_load(program, 12 * 16)
        program.process.send_signal(signal.SIGINT)
        until(lambda: "Stopping" in program.log, program)
        program.process.send_signal(signal.SIGINT)
        answers = [future.result() for future in running]
        assert {answer.status_code for answer in answers} <= {200, 503}
        assert any("shutting down" in answer.text for answer in answers)
        assert program.process.wait(SECONDS) == 0
        assert "Traceback" not in program.log


@pytest.mark.more
def test_a_client_that_never_finishes_its_request_does_not_hold_up_the_end(tiny_model: Path) -> None:
    with (
        serving(SERVE, tiny_model, "--shutdown-seconds", "1", *SERVES_ONLY) as program,
        socket.create_connection(("127.0.0.1", int(program.url.rsplit(":", 1)[1]))) as client,
    ):
        client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
        time.sleep(0.2)
        program.process.send_signal(signal.SIGTERM)
        assert program.process.wait(SECONDS) == 0


@pytest.mark.more
def test_sigterm_to_the_whole_group_lets_a_request_finish(tiny_model: Path) -> None:
    """As `systemctl stop` does it: the worker gets the signal too."""
    with serving(SERVE, tiny_model, *SERVES_ONLY) as program, ThreadPoolExecutor(1) as pool:
        ask = {"messages": HELLO, "max_tokens": 300, "n": 8, "seed": 3}
        running = pool.submit(httpx.post, f"{program.url}/v1/chat/completions", json=ask, timeout=SECONDS)
        wait_for_load(program, 8)
        os.kill(program.worker(), signal.SIGTERM)
        program.process.send_signal(signal.SIGTERM)
        assert running.result().status_code == 200
        assert program.process.wait(SECONDS) == 0


@pytest.mark.more
def test_stopping_while_the_model_loads_is_quiet(tiny_model: Path, tmp_path: Path) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        with starting(SERVE, tiny_model, "--run-dir", str(tmp_path)) as program:
            program.process.send_signal(number)
            assert program.process.wait(SECONDS) == 0
            assert "Traceback" not in program.log


@pytest.mark.more
@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM"])
def test_a_signal_that_others_swallow_ends_the_start_too(tiny_model: Path, tmp_path: Path, number: str) -> None:
    """Libraries catch what they should not, above all while they are imported."""
    own = tmp_path / "own.py"
    own.write_text(SWALLOWING.replace("NUMBER", number))
    command = [*SERVE, "--model-name", str(tiny_model), "--run-dir", str(tmp_path / "run"), "--proxy-port", "0"]
    own_code = ("--custom-generate-function-path", str(own))
    done = subprocess.run([*command, *own_code], capture_output=True, text=True, check=False, timeout=SECONDS)
    assert done.returncode == 0
    assert "Stopped before it was ready." in done.stderr
    assert "Traceback" not in done.stderr


SWALLOWING = """
import os, signal, time

try:
    os.kill(os.getpid(), signal.NUMBER)
    time.sleep(1)
except BaseException:
    pass

async def generate(request, sampler):
    return await sampler.sample(request)
"""


def test_kill_9_of_the_worker_under_load(tiny_model: Path) -> None:
    with serving(SERVE, tiny_model, *SERVES_ONLY) as program, ThreadPoolExecutor(8) as pool:

        def request(seed: int) -> int:
            ask = {"messages": HELLO, "max_tokens": 400, "seed": seed, "n": 4}
            answer = httpx.post(f"{program.url}/v1/chat/completions", json=ask, timeout=SECONDS)
            assert answer.status_code == 200 or answer.json()["error"]["type"] == "server_error"
            return answer.status_code

        running = [pool.submit(request, seed) for seed in range(8)]
        wait_for_load(program, 8 * 4)
        os.kill(program.worker(), signal.SIGKILL)
        assert {future.result() for future in running} <= {200, 503}
        assert 503 in {future.result() for future in running}
        assert httpx.get(f"{program.url}/healthz", timeout=SECONDS).status_code == 200
        # The next request waits for the new worker instead of failing.
        assert request(99) == 200
        assert program.metric("openclaw_engine_restarts") == 1


@pytest.mark.more
def test_the_worker_does_not_outlive_a_killed_server(tiny_model: Path) -> None:
    with serving(SERVE, tiny_model, *SERVES_ONLY) as program:
        worker = program.worker()
        program.process.kill()
        program.process.wait()
        end = time.monotonic() + SECONDS
        while Path(f"/proc/{worker}").exists() and "zombie" not in Path(f"/proc/{worker}/status").read_text():
            assert time.monotonic() < end
            time.sleep(0.05)


@pytest.mark.parametrize("rounds", [1, pytest.param(3, marks=pytest.mark.more)])
def test_whatever_a_client_received_whole_survives_kill_9(tiny_model: Path, tmp_path: Path, rounds: int) -> None:
    """The server is killed at random instants under load, and starts again on what it left."""
    rng = random.Random(0)
    received: dict[str, str] = {}
    for _round in range(rounds):
        with (
            serving(SERVE, tiny_model, "--run-dir", str(tmp_path), *SERVES_ONLY) as program,
            ThreadPoolExecutor(6) as pool,
        ):
            stop = threading.Event()
            clients = [pool.submit(talk, program.url, seed, received, stop) for seed in range(6)]
            enough = len(received) + 8
            until(lambda enough=enough: len(received) >= enough, program)
            time.sleep(rng.uniform(0, 2))
            program.process.kill()
            stop.set()
            for client in clients:
                client.result()
        assert_recorded(tmp_path / FILE, received)
    assert len(received) >= 8 * rounds


@pytest.mark.more
def test_a_silent_session_ends(tiny_model: Path, tmp_path: Path) -> None:
    flags = ("--run-dir", str(tmp_path), "--session-timeout", "0.5", *SERVES_ONLY)
    with serving(SERVE, tiny_model, *flags) as program:
        httpx.post(f"{program.url}/v1/chat/completions", json=SHORT, timeout=SECONDS)
        until(lambda: status(tmp_path)["turns"]["dropped"] > 0, program)
        assert status(tmp_path)["server"] == program.url
    assert status(tmp_path)["server"] is None


def status(run_dir: Path) -> dict:
    code, out, err = run_command(run_dir, "status", "--json")
    assert code == 0, err
    return json.loads(out)


def test_no_capture_stores_nothing_and_two_servers_do_not_share_a_run_dir(tiny_model: Path, tmp_path: Path) -> None:
    with serving(SERVE, tiny_model, "--run-dir", str(tmp_path), "--no-capture") as program:
        answer = httpx.post(f"{program.url}/v1/chat/completions", json=SHORT, timeout=SECONDS)
        assert answer.status_code == 200
        assert not (tmp_path / FILE).exists()
        assert httpx.get(f"{program.url}/readyz", timeout=SECONDS).json()["capture"] == "off"
        assert f"process id {program.process.pid}" in refused(tiny_model, "--run-dir", str(tmp_path))


def test_a_taken_port_is_said_in_one_sentence(tiny_model: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = subprocess.run(
            [*SERVE, "--model-name", str(tiny_model), "--proxy-port", port],
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 2
    assert re.search(rf"Cannot listen on 127.0.0.1:{port}.*--proxy-port", done.stderr)
    assert "Traceback" not in done.stderr


@pytest.mark.more
def test_a_run_directory_of_another_model_is_not_gone_on_with(tiny_model: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(tiny_model, tmp_path / "another"))
    run = ("--run-dir", str(tmp_path / "run"), *SERVES_ONLY)
    with serving(SERVE, tiny_model, *run):
        pass
    assert f"holds the conversations and weights of {tiny_model.name}" in refused(other, *run)
    with serving(SERVE, tiny_model, *run):
        pass


def refused(model: Path, *flags: str) -> str:
    """What is said where a server does not start: one sentence, with status 2."""
    command = [*SERVE, "--model-name", str(model), "--proxy-port", "0", *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\n") == 1
    return done.stderr


@pytest.mark.more
@pytest.mark.parametrize("option", ["--run-dir", "--rl-buffer-dir"])
@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
def test_folders_that_cannot_be_written_to_are_said_in_one_sentence(
    tiny_model: Path, tmp_path: Path, option: str, dry: tuple[str, ...]
) -> None:
    run_dir, file = tmp_path / "run", tmp_path / "file"
    file.write_text("mine")
    for folder in (file, Path("/proc/x")):
        said = refused(tiny_model, "--run-dir", str(run_dir), option, str(folder), *dry)
        assert f"{folder} cannot be used" in said
        assert f"Give {option} " in said
    assert file.read_text() == "mine"
    assert not run_dir.exists()


def test_a_full_disk_is_said_in_one_sentence(tiny_model: Path, tmp_path: Path) -> None:
    command = [*SERVE, "--model-name", str(tiny_model), "--run-dir", str(tmp_path / "run"), "--proxy-port", "0"]
    done = subprocess.run(
        ["bash", "-c", f"ulimit -f 0; exec {shlex.join(command)} 2>&1 | cat"],
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS,
    )
    assert f"{tmp_path / 'run'} cannot be used: File too large. Give --run-dir a folder" in done.stdout
    assert done.stdout.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_model_that_cannot_be_kept_is_said_in_one_sentence(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf = tmp_path / "my.gguf"
    gguf.touch()
    for kind in ("AutoModelForCausalLM", "AutoTokenizer"):
        load = getattr(transformers, kind).from_pretrained
        monkeypatch.setattr(f"transformers.{kind}.from_pretrained", lambda *_, load=load, **__: load(tiny_model))
    config = Config.of(model_name=str(gguf), cache_dir=Path("/proc/x"))
    with pytest.raises(UserError, match=r"The model cannot be stored in /proc/x: .*--cache-dir"):
        model_folder(config)
    assert model_folder(Config.of(model_name=str(gguf), cache_dir=tmp_path / "cache")).is_dir()


def test_a_damaged_ledger_is_said_in_one_sentence_and_left_alone(tiny_model: Path, tmp_path: Path) -> None:
    damage = "this is no database, whatever its name says " * 50
    (tmp_path / FILE).write_text(damage)
    said = refused(tiny_model, "--run-dir", str(tmp_path))
    assert f"The ledger in {tmp_path} is damaged: file is not a database." in said
    assert "move it away" in said
    assert (tmp_path / FILE).read_text() == damage


@pytest.mark.more
def test_two_servers_do_not_share_a_ledger(tiny_model: Path, tmp_path: Path) -> None:
    """Each would take the other's steps for lost ones."""
    ledger, first, second = (str(tmp_path / name) for name in ("ledger", "first", "second"))
    with serving(SERVE, tiny_model, "--run-dir", first, "--rl-buffer-dir", ledger, *SERVES_ONLY) as program:
        told = json.loads((tmp_path / "first" / SERVER).read_text())
        assert told == {"pid": program.process.pid, "url": program.url}
        said = refused(tiny_model, "--run-dir", second, "--rl-buffer-dir", ledger)
        assert f"{ledger} is in use by the server with process id {program.process.pid}." in said
        assert "another --rl-buffer-dir." in said
        assert "another --run-dir." in refused(tiny_model, "--run-dir", ledger)
        # The server is found by its own run directory alone: what is told there is what answers and goes back.
        assert status(tmp_path / "first")["server"] == program.url
        assert status(tmp_path / "ledger")["server"] is None


@pytest.mark.more
def test_the_run_directory_may_be_named_twice(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "same").symlink_to(tmp_path)
    flags = ("--run-dir", str(tmp_path), "--rl-buffer-dir", str(tmp_path / "same"), *SERVES_ONLY)
    with serving(SERVE, tiny_model, *flags) as program:
        assert status(tmp_path)["server"] == program.url


@pytest.mark.more
def test_a_restart_says_where_it_continues_from(tiny_model: Path, tmp_path: Path, adapters: list[Path]) -> None:
    async def copy(target: Path) -> None:
        shutil.copytree(adapters[0], target, dirs_exist_ok=True)

    run_dir, quick = tmp_path / "run", (*SERVES_ONLY, "--lora-rank", "4")
    with serving(SERVE, tiny_model, "--run-dir", str(run_dir), *quick) as program:
        assert "policy the model as it is" in " ".join(program.log.split())
        assert f"openclaw-rl chat --run-dir {run_dir}" in program.log
    saved = asyncio.run(Checkpoints(run_dir / "checkpoints", 3).save(3, 4, (), copy))
    with serving(SERVE, tiny_model, "--run-dir", str(run_dir), *quick) as program:
        said = " ".join(program.log.split())
        assert "policy continues from step 3 (policy 4, checkpoint step-000003-v4)" in said
    another = ("--run-dir", str(tmp_path / "another"), "--resume-from-ckpt", str(saved.folder))
    with serving(SERVE, tiny_model, *another, *quick) as program:
        # A path that is longer than a line is broken anywhere.
        assert f"continuesfrom{saved.folder}(policy1)" in "".join(program.log.split())


@pytest.mark.more
def test_going_back_without_the_servers_key_says_how_to_give_it(tiny_model: Path, tmp_path: Path) -> None:
    with serving(SERVE, tiny_model, "--run-dir", str(tmp_path), "--api-key", "S3CRET"):
        for key in ((), ("--api-key", "WR0NG")):
            code, _out, said = run_command(tmp_path, "rollback", *key)
            assert code == 2
            assert said.endswith(" Give --api-key, or set SGLANG_API_KEY.\n")
            assert said.count("\n") == 1
        _code, _out, known = run_command(tmp_path, "rollback", "--api-key", "S3CRET")
        assert "Nothing has been learned" in known
