"""Counts the files of the package that three journeys enter: what a newcomer has to open to follow them.

`PYTHONPATH=tests python tests/support/journeys.py [--list]` starts the program as `make run` does, on a tiny model,
and counts:

- a chat request that continues a recorded conversation, until its answer has been recorded, on a server that
  neither judges nor learns meanwhile,
- "Perfect, thank you!", from its record until a policy that learned from it is served; the request is left out,
- an episode of the environment toolcall, in the process that drives it.

A file is entered when one of its functions is called, in any thread of the process. Workers, which compute, are left
out.
"""

import argparse
import contextlib
import json
import mmap
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from support.tiny_models import save_tiny_model

START_SECONDS = 400
STEP_SECONDS = 900
#: Long enough for several episodes of a tiny model.
EPISODES_SECONDS = 20

#: Runs at the start of a Python process, and not in those that it starts. While the first byte of `switch` is 1, it
#: writes down each file of the package in which a function is called.
TRACER = """
import mmap, os, sys, threading
entered = set()
def trace(frame, event, argument):
    if event == "call" and switch[0]:
        code = frame.f_code
        path = code.co_filename
        if path not in entered and "/openclaw_rl/" in path and code.co_name != "<module>":
            entered.add(path)
            os.write(log, (path + "\\n").encode())
if folder := os.environ.pop("JOURNEY", ""):
    with open(os.path.join(folder, "switch"), "rb") as file:
        switch = mmap.mmap(file.fileno(), 1, prot=mmap.PROT_READ)
    log = os.open(os.path.join(folder, f"{os.getpid()}.log"), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    threading.setprofile(trace)
    sys.setprofile(trace)
"""


class Journey:
    """Where the traced processes write, and the switch that they look at."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "sitecustomize.py").write_text(TRACER)
        (folder / "switch").write_bytes(b"\0")
        with (folder / "switch").open("r+b") as file:
            self.switch = mmap.mmap(file.fileno(), 1)

    @property
    def environment(self) -> dict[str, str]:
        path = os.pathsep.join(filter(None, [str(self.folder), os.environ.get("PYTHONPATH")]))
        return {**os.environ, "JOURNEY": str(self.folder), "PYTHONPATH": path}

    @contextlib.contextmanager
    def traced(self) -> Iterator[None]:
        self.switch[0] = 1
        yield
        self.switch[0] = 0

    def files(self, process: int, left_out: tuple[str, ...] = ()) -> list[str]:
        """The files that a process entered, as paths in the package, without those of some rooms."""
        lines = (self.folder / f"{process}.log").read_text().splitlines()
        files = {line.rsplit("/openclaw_rl/", 1)[1] for line in lines}
        return sorted(file for file in files if file.split("/")[0] not in left_out)


def call(url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=STEP_SECONDS) as answer:
        told: dict[str, Any] = json.load(answer)
        return told


def until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            if condition():
                return
        time.sleep(0.2)
    raise TimeoutError(f"This did not happen within {seconds} seconds.")


@contextlib.contextmanager
def serving(journey: Journey, *further: str) -> Iterator[tuple[str, int]]:
    """Address and process id of a server that learns from single turns."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = ["--preset", "personal", "--proxy-port", str(port), "--run-dir", str(journey.folder / "run")]
    flags += ["--model-name", str(save_tiny_model(journey.folder / "model", context=4096)), "--batch-size", "1"]
    flags += ["--baseline", "none", "--seed", "1"]
    command = [sys.executable, "-m", "openclaw_rl", "serve", *flags, *further]
    with (journey.folder / "server.txt").open("wb") as output:
        server = subprocess.Popen(command, env=journey.environment, stdout=output, stderr=output)
        try:
            url = f"http://127.0.0.1:{port}"

            def ready() -> bool:
                assert server.poll() is None, (journey.folder / "server.txt").read_text()
                return bool(call(f"{url}/readyz"))

            until(ready, START_SECONDS)
            yield url, server.pid
        finally:
            server.kill()
            server.wait()


def said(url: str, messages: list[dict[str, str]]) -> list[dict[str, str]]:
    """A conversation with the model's answer."""
    told = call(f"{url}/v1/chat/completions", {"messages": messages, "max_tokens": 40})
    return [*messages, told["choices"][0]["message"]]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def follow_up(journey: Journey) -> list[str]:
    with serving(journey, "--judge", "none", "--max-steps", "0") as (url, process):
        messages = said(url, [user("What is the capital of France?")])
        with journey.traced():
            said(url, [*messages, user("And of Italy?")])
            time.sleep(1)
        return journey.files(process)


def thanks(journey: Journey) -> list[str]:
    with serving(journey) as (url, process):
        before = call(f"{url}/readyz")["policy_version"]
        messages = said(url, [user("What is the capital of France?")])
        with journey.traced():
            said(url, [*messages, user("Perfect, thank you!")])
            until(lambda: call(f"{url}/readyz")["policy_version"] > before, STEP_SECONDS)
        return journey.files(process, left_out=("api", "rendering"))


def episode(journey: Journey) -> list[str]:
    """The files of the driver between its first and its last episode: without its start, its end and its options."""
    (journey.folder / "server").mkdir()
    with serving(Journey(journey.folder / "server"), "--max-steps", "0") as (url, _):
        flags = ["--env", "toolcall", "--url", url, "--tasks", "1000", "--parallel", "1", "--max-tokens", "40"]
        command = [sys.executable, "-m", "openclaw_rl", "rollout", *flags]
        with (journey.folder / "rollout.txt").open("wb") as output:
            rollout = subprocess.Popen(command, env=journey.environment, stdout=output, stderr=output)
        try:
            until(lambda: call(f"{url}/readyz")["queue"]["held"] > 0, START_SECONDS)
            with journey.traced():
                time.sleep(EPISODES_SECONDS)
            assert rollout.poll() is None, (journey.folder / "rollout.txt").read_text()
        finally:
            rollout.kill()
            rollout.wait()
        return journey.files(rollout.pid)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="also print the files")
    parser.add_argument("journeys", nargs="*", help="follow_up, thanks, episode; all if none is given")
    options = parser.parse_args()
    for take in (follow_up, thanks, episode):
        if options.journeys and take.__name__ not in options.journeys:
            continue
        with tempfile.TemporaryDirectory() as scratch:
            files = take(Journey(Path(scratch)))
            print(f"{take.__name__}: {len(files)} files")
            if options.list:
                print("".join(f"  {file}\n" for file in files))


if __name__ == "__main__":
    main()
