"""Measures how learning affects users: time to first token when idle, during a step and at a swap; and swap latency.

    python benchmarks/swapping.py [--minutes 4] [--clients 2] [--latency-target 5]

It runs a real server with the embedded model, or with the one in BENCH_MODEL (`shapes.py` writes a random one at 4B).
Clients send requests at a steady rate and read the first token. In the second half every answer gets explicit feedback,
so that one step follows another. The baseline is the same server before its first step.
"""

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from common import MODEL, machine, percentile, sized, table, verdict

QUESTIONS = (
    "What is a rainbow?",
    "Why do cats purr?",
    "How does a boat float?",
    "What is a volcano?",
    "Why is salt salty?",
)
#: A prompt of a few hundred tokens, like an agent's: most of it is the same in every request.
SYSTEM = "You are a helpful assistant who answers questions about the world. " * 20
ANSWER_TOKENS = 24
#: Seconds between an answer and the client's next question.
THINK_SECONDS = sized(0.5, 0.02)
#: Requests that start this many seconds around a change of policy count as affected by it.
SWAP_SECONDS = 1.0
BATCH = 4
ROOT = Path(__file__).parent.parent
#: The first requests are not measured: caches are empty and the learner is being loaded.
WARM_UP_SECONDS = sized(20, 1)


@dataclass
class Sample:
    """One request: when it began, how long it took to the first token, and what the learner did."""

    began: float
    first_token: float
    training: bool
    feedback: bool


class Server:
    """A server process and its status."""

    def __init__(self, run_dir: Path) -> None:
        command = [sys.executable, str(ROOT / "run.py"), "--run-dir", str(run_dir), "--proxy-port", "0"]
        command += ["--method", "rl", *(["--model-name", MODEL] if MODEL else [])]
        self.process = subprocess.Popen([*command, "--batch-size", str(BATCH), "--log-level", "warning"])
        self.url = self._wait(run_dir / "server.json")

    def _wait(self, path: Path) -> str:
        while True:
            time.sleep(0.5)
            if self.process.poll() is not None:
                raise SystemExit("the server did not start")
            try:
                url = str(json.loads(path.read_text())["url"])
                if get(f"{url}/readyz")["ready"]:
                    return url
            except (OSError, ValueError, KeyError, TypeError):
                continue

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(120)


def get(url: str) -> dict[str, object]:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return json.load(answer)


def post(url: str, body: object) -> urllib.request.addinfourl:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    return urllib.request.urlopen(request, timeout=300)


class Load:
    """Run clients at a steady rate, and check the learner ten times a second."""

    def __init__(self, url: str) -> None:
        self.url, self.samples, self.failures = url, [], 0
        self.training, self.feedback, self.stopped = False, False, False
        self.swaps: list[float] = []
        self.latencies: list[float] = []
        self._said: dict[int, float] = {}

    def run(self, seconds: float) -> None:
        """Let the clients ask for this long, and on a slow machine until one of them has an answer."""
        before, end = len(self.samples) + self.failures, time.monotonic() + seconds
        while time.monotonic() < end or len(self.samples) + self.failures == before:
            time.sleep(0.1)

    def watch(self) -> None:
        version = 0
        while not self.stopped:
            state = get(f"{self.url}/readyz")
            self.training = str(state["learner"]).startswith("training")
            if state["policy_version"] != version:
                version = int(str(state["policy_version"]))
                self.swaps.append(time.monotonic())
            time.sleep(0.1)

    def client(self, number: int) -> None:
        count = 0
        while not self.stopped:
            count += 1
            try:
                self._ask(f"{QUESTIONS[(number + count) % len(QUESTIONS)]} ({number}.{count})", count)
            except OSError:
                self.failures += 1
            time.sleep(THINK_SECONDS)

    def _ask(self, question: str, count: int) -> None:
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
        body = {"messages": messages, "max_tokens": ANSWER_TOKENS, "stream": True}
        began, training = time.monotonic(), self.training
        with post(f"{self.url}/v1/chat/completions", body) as answer:
            chunk: dict[str, object] = {}
            first = 0.0
            for line in answer:
                if line.startswith(b"data: {"):
                    chunk = json.loads(line[6:])
                    first = first or time.monotonic() - began
        self.samples.append(Sample(began, first, training or self.training, self.feedback))
        if self.feedback:
            post(f"{self.url}/v1/feedback", {"id": chunk["id"], "score": 1 if count % 2 else -1}).close()


def report(load: Load, metrics: Path, latency_target: float | None) -> None:
    idle = [s.first_token for s in load.samples if not s.feedback]
    near = [s.first_token for s in load.samples if any(abs(s.began - swap) < SWAP_SECONDS for swap in load.swaps)]
    during = [s.first_token for s in load.samples if s.feedback and s.training]
    base = percentile(idle, 0.99)
    rows = []
    for name, values in (("idle (baseline)", idle), ("during a step", during), ("at a swap", near)):
        if values:
            high = percentile(values, 0.99)
            check = "" if values is idle else verdict(high / base, 2, at_least=False)
            middle = f"{1e3 * percentile(values, 0.5):.0f}"
            rows.append((name, len(values), middle, f"{1e3 * high:.0f}", f"{high / base:.2f}", check))
    table("Time to first token, ms", ["", "requests", "p50", "p99", "p99 ratio", ""], rows)
    steps = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    print(f"\n{len(steps)} steps, {load.failures} failed requests of {len(load.samples) + load.failures}")
    if steps:
        seconds = [step["step_seconds"] for step in steps]
        latency = [step["latency_seconds"] for step in steps]
        print(f"seconds a step: p50 {percentile(seconds, 0.5):.1f}, p99 {percentile(seconds, 0.99):.1f}")
        print(f"seconds from the last feedback to the new policy serving: p50 {percentile(latency, 0.5):.1f}, ", end="")
        print(f"p99 {percentile(latency, 0.99):.1f}", end="")
        print(f", {verdict(percentile(latency, 0.5), latency_target, at_least=False)}" if latency_target else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=sized(4.0, 0.05))
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--latency-target", type=float, help="seconds from feedback to new policy, at most")
    options = parser.parse_args()
    print(machine())
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder))
        load = Load(server.url)
        threads = [threading.Thread(target=load.watch)]
        threads += [threading.Thread(target=load.client, args=(number,)) for number in range(options.clients)]
        for thread in threads:
            thread.start()
        load.run(WARM_UP_SECONDS)
        load.samples.clear()
        load.run(30 * options.minutes)
        load.feedback = True
        load.run(30 * options.minutes)
        load.stopped = True
        for thread in threads:
            thread.join()
        server.stop()
        report(load, Path(folder) / "metrics.jsonl", options.latency_target)


if __name__ == "__main__":
    main()
