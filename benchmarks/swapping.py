"""Measures how learning affects users: time to first token when idle, during a step and at a swap; and swap latency.

    python benchmarks/swapping.py [--minutes 4] [--clients 2] [--rounds 0]
    python benchmarks/swapping.py --shape Qwen3-4B --minutes 0 --rounds 8       random weights, on a GPU

It runs a real server with the embedded model, with the one in BENCH_MODEL, or with random weights of a real shape.
Clients send requests at a steady rate and read the first token. In the second half every answer gets explicit feedback,
so that one step follows another. The baseline is the same server before its first step.

A round is the way from feedback to served weights, seen from outside, while nobody else asks: feedback on a whole
batch, then one short question after the other until a new policy answers. The first rounds compile and are not counted.
"""

import itertools
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

from common import MODEL, argument_parser, machine, percentile, sized, table, verdict

SHAPES = ("Qwen3-0.6B", "Qwen3-4B")
#: Seconds from the last feedback of a batch to an answer of the new policy, at most.
MOST_SECONDS_TO_SERVED = 5.0
#: Rounds in which kernels are compiled.
WARM_UP_ROUNDS = sized(2, 0)

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

    def __init__(self, run_dir: Path, model: str | None) -> None:
        command = [sys.executable, str(ROOT / "run.py"), "--run-dir", str(run_dir), "--proxy-port", "0"]
        command += ["--method", "rl", *(["--model-name", model] if model else [])]
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


def ask(url: str, question: str, tokens: int) -> tuple[str, str]:
    """The id of an answer, and the policy that gave it."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    with post(f"{url}/v1/chat/completions", {"messages": messages, "max_tokens": tokens}) as answer:
        body = json.load(answer)
    return body["id"], body["system_fingerprint"]


def time_round(url: str, number: int) -> float:
    """Seconds from the last feedback of a batch until the new policy has answered."""
    answers = [ask(url, f"{question} ({number})", ANSWER_TOKENS) for question in QUESTIONS[:BATCH]]
    for place, (name, _) in enumerate(answers):
        begun = time.monotonic()
        post(f"{url}/v1/feedback", {"id": name, "score": 1 if place % 2 else -1}).close()
    _, before = answers[-1]
    for count in itertools.count():
        _, policy = ask(url, f"Are you new? ({number}.{count})", 1)
        if policy != before:
            return time.monotonic() - begun
    raise AssertionError


def show_rounds(seconds: list[float], metrics: Path) -> None:
    counted = seconds[WARM_UP_ROUNDS:]
    steps = [json.loads(line)["step_seconds"] for line in metrics.read_text().splitlines()][WARM_UP_ROUNDS:]
    middle = percentile(counted, 0.5)
    print("\nFeedback to served weights, seconds by round: " + ", ".join(f"{each:.2f}" for each in seconds))
    print(f"  p50 {middle:.2f}, slowest {max(counted):.2f} of {len(counted)}, the first {WARM_UP_ROUNDS} not counted")
    print(f"  the step takes {percentile(steps, 0.5):.2f} of it; ", end="")
    print(verdict(middle, MOST_SECONDS_TO_SERVED, at_least=False))


def report(load: Load, metrics: Path) -> None:
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
        print(f"p99 {percentile(latency, 0.99):.1f}")


def put_under_load(url: str, clients: int, minutes: float) -> Load:
    """Let clients ask, first without feedback and then with it."""
    load = Load(url)
    threads = [threading.Thread(target=load.watch)]
    threads += [threading.Thread(target=load.client, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    load.run(WARM_UP_SECONDS)
    load.samples.clear()
    load.run(30 * minutes)
    load.feedback = True
    load.run(30 * minutes)
    load.stopped = True
    for thread in threads:
        thread.join()
    return load


def random_model(shape: str, folder: Path) -> str:
    """Write a model folder in a process of its own, so that its memory on the GPU is free again."""
    subprocess.run([sys.executable, str(Path(__file__).with_name("shapes.py")), str(folder), shape], check=True)
    return str(folder)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=sized(4.0, 0.05), help="of load; 0 for none (default: 4)")
    parser.add_argument("--clients", type=int, default=2, help="who ask at the same time")
    parser.add_argument("--rounds", type=int, default=sized(0, 1), help="from feedback to served weights")
    parser.add_argument("--shape", choices=SHAPES, help="random weights of this shape")
    options = parser.parse_args()
    print(machine())
    with tempfile.TemporaryDirectory() as folder:
        model = random_model(options.shape, Path(folder) / "model") if options.shape else MODEL
        run_dir = Path(folder) / "run"
        server = Server(run_dir, model)
        try:
            load = put_under_load(server.url, options.clients, options.minutes) if options.minutes else None
            rounds = [time_round(server.url, number) for number in range(options.rounds)]
        finally:
            server.stop()
        metrics = run_dir / "metrics.jsonl"
        if load is not None:
            report(load, metrics)
        if rounds:
            show_rounds(rounds, metrics)


if __name__ == "__main__":
    main()
