"""Runs a real `openclaw-rl serve` in its own process, as a user does."""

import contextlib
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import httpx
import openai

from openclaw_rl.ledger.run_dir import read_server

ROOT = Path(__file__).parent.parent.parent
SERVE = [sys.executable, "-m", "openclaw_rl", "serve"]
#: The longest wait before a test fails; generous, because test machines can be slow.
SECONDS = 300


class Program:
    """A running `openclaw-rl serve` on a free port."""

    def __init__(self, process: subprocess.Popen[str], log: IO[str]) -> None:
        self.process, self.url, self._log = process, "", log

    @property
    def log(self) -> str:
        """The program's output up to now."""
        self._log.seek(0)
        return self._log.read()

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)

    def worker(self) -> int:
        """The process id of the sampler's worker: the child that multiprocessing spawned."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return next(int(pid) for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes())

    def metric(self, name: str) -> float:
        lines = httpx.get(f"{self.url}/metrics", timeout=SECONDS).text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name + " "))


@contextlib.contextmanager
def starting(command: list[str], model: Path | None, *flags: str) -> Iterator[Program]:
    """Start a server and wait until it has an address; it may still be loading its model."""
    model_flags = ["--model-name", str(model)] if model else []
    with tempfile.TemporaryFile("w+") as log, tempfile.TemporaryDirectory() as folder:
        run_dir = Path(flags[flags.index("--run-dir") + 1] if "--run-dir" in flags else folder)
        arguments = [*command, *model_flags, "--proxy-port", "0", *flags, "--run-dir", str(run_dir)]
        process = subprocess.Popen(arguments, stderr=log, text=True, cwd=ROOT)
        program = Program(process, log)

        def has_address() -> bool:
            # The folder may still name an earlier server that was killed.
            server = read_server(run_dir)
            program.url = server.get("url") or "" if server.get("pid") == process.pid else ""
            return program.url != ""

        try:
            until(has_address, program)
            yield program
        finally:
            process.kill()
            process.wait()


@contextlib.contextmanager
def serving(command: list[str], model: Path | None, *flags: str) -> Iterator[Program]:
    """Start a server and wait until it is ready to answer."""
    with starting(command, model, *flags) as program:

        def ready() -> bool:
            with contextlib.suppress(httpx.TransportError):
                return httpx.get(f"{program.url}/readyz").status_code == 200
            return False

        until(ready, program)
        yield program


def until(condition: Callable[[], bool], program: Program) -> None:
    """Wait until the condition holds. Fails when the server ends or the time runs out."""
    end = time.monotonic() + SECONDS
    while not condition():
        assert program.process.poll() is None, f"the server ended: {program.log}"
        assert time.monotonic() < end, f"waited {SECONDS} seconds in vain: {program.log}"
        time.sleep(0.1)  # each look is a request, which takes time from what is waited for


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
