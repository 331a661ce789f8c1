"""APIs that a server of ours can stand in front of, as processes of their own: llama.cpp's, and another of ours.

`llama_command` runs this file in a Python that has xllamacpp, which is llama.cpp's own code as a package.
"""

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

#: How the model is called in each of them.
MODEL = "small"
START_SECONDS = 120
CONTEXT, SLOTS = 4096, 8


def llama_command(python: str, model: Path, port: int) -> list[str]:
    return [python, __file__, str(model), str(port)]


class ApiProcess:
    """An API on 127.0.0.1 that can be killed and started again."""

    def __init__(self, command: list[str], port: int) -> None:
        self.command = command
        self.url = f"http://127.0.0.1:{port}/v1"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until its model is there."""
        import httpx

        assert self._process is None, "it runs already"
        self._process = subprocess.Popen(self.command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        end = time.monotonic() + START_SECONDS
        while True:
            with contextlib.suppress(httpx.TransportError):
                answer = httpx.get(f"{self.url}/models", timeout=START_SECONDS)
                if answer.status_code == 200 and [model["id"] for model in answer.json()["data"]] == [MODEL]:
                    return
            assert self._process.poll() is None, f"the API ended: {self.command}"
            assert time.monotonic() < end, f"the API did not start: {self.command}"
            time.sleep(0.1)

    def kill(self) -> None:
        """kill -9."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    @contextlib.contextmanager
    def running(self) -> Iterator["ApiProcess"]:
        try:
            self.start()
            yield self
        finally:
            self.kill()


def main() -> None:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = sys.argv[1]
    params.port = int(sys.argv[2])
    params.model_alias = {MODEL}
    params.n_ctx = CONTEXT * SLOTS
    params.n_parallel = SLOTS
    params.warmup = False
    # On a busy machine, two threads would wait for each other at each of a layer's parts.
    params.cpuparams.n_threads = 1
    server = xllamacpp.Server(params)
    sys.stdout.write(f"{server.listening_address}\n")
    signal.pause()


if __name__ == "__main__":
    main()
