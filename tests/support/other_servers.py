"""Other people's servers, for as long as a test needs them."""

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import httpx

from test_server import ROOT

#: Of its log, what is shown when it does not start.
SHOWN = 4000


@contextlib.contextmanager
def started(
    line: Sequence[str], health: str, log: Path, seconds: float, environment: Mapping[str, str] | None = None
) -> Iterator[None]:
    """A command that serves, once `health` answers. Fails with the end of its log if it does not within the time."""
    with log.open("w") as file:
        process = subprocess.Popen(line, env={**os.environ, **(environment or {})}, stdout=file, stderr=file, cwd=ROOT)
    try:
        end = time.monotonic() + seconds
        while not answers(health):
            assert process.poll() is None, log.read_text()[-SHOWN:]
            assert time.monotonic() < end, log.read_text()[-SHOWN:]
            time.sleep(1)
        yield
    finally:
        process.terminate()
        process.wait(60)


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2).status_code == 200
    except httpx.HTTPError:
        return False
