"""Servers of other projects (vLLM, a Tinker server), started for a test."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import httpx

from support.server_program import ROOT

#: How much of the end of a server's log is shown when it does not start.
LOG_CHARACTERS = 4000
#: How long a server may take to stop.
STOP_SECONDS = 60


@contextlib.contextmanager
def started(
    line: Sequence[str], health: str, log: Path, seconds: float, environment: Mapping[str, str] | None = None
) -> Iterator[None]:
    """Run a server and wait until `health` answers. Fails with the end of its log if that takes too long."""
    with log.open("w") as file:
        process = subprocess.Popen(
            line,
            env={**os.environ, **(environment or {})},
            stdout=file,
            stderr=file,
            cwd=ROOT,
            start_new_session=True,
        )
    try:
        end = time.monotonic() + seconds
        while not answers(health):
            assert process.poll() is None, log.read_text()[-LOG_CHARACTERS:]
            assert time.monotonic() < end, log.read_text()[-LOG_CHARACTERS:]
            time.sleep(1)
        yield
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            # With its workers: one that is compiling does not hear that it is to stop.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2).status_code == 200
    except httpx.HTTPError:
        return False
