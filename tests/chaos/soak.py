"""Ten minutes of mixed load on a server that learns: memory, open files and threads must not grow."""

import contextlib
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import httpx

from chaos.learning import check_ledger, learning_server, states
from chaos.mutations import fuzz_request
from chaos.report import Report, Setting
from support.process_stats import children, memory_mib, open_files, threads
from support.server_program import Program

SECONDS = 600
CLIENTS = 4
#: How often memory is measured, in measurements per run.
MEASUREMENTS = 60
#: The first share of the time fills caches and is not compared.
WARM_UP = 0.3
MAX_GROWTH_MIB = 100
MAX_MORE_FILES = 16
MAX_MORE_THREADS = 8


@dataclass
class Measurements:
    """What a server and its workers took over time."""

    memory: list[float] = field(default_factory=list)
    files: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)

    def take(self, program: Program) -> None:
        pid = program.process.pid
        family = [pid, *children(pid)]
        with contextlib.suppress(OSError):  # a worker may end meanwhile
            memory = sum(map(memory_mib, family))
            self.memory.append(memory)
            self.files.append(open_files(pid))
            self.threads.append(threads(pid))

    def check(self, report: Report) -> None:
        """Compare the end with the time after the warm-up."""
        first = int(len(self.memory) * WARM_UP)
        quarter = max(1, (len(self.memory) - first) // 4)

        def growth(values: list[float] | list[int]) -> float:
            middle, end = values[first : first + quarter], values[-quarter:]
            return sorted(end)[len(end) // 2] - sorted(middle)[len(middle) // 2]

        report.memory = (self.memory[first], self.memory[-1])
        report.most("most open files", max(self.files))
        report.most("most threads", max(self.threads))
        report.check(growth(self.memory) < MAX_GROWTH_MIB, "memory grows", f"{growth(self.memory):.0f} MiB more")
        report.check(growth(self.files) <= MAX_MORE_FILES, "open files grow", f"{growth(self.files)} more")
        report.check(growth(self.threads) <= MAX_MORE_THREADS, "threads grow", f"{growth(self.threads)} more")


def run(report: Report, setting: Setting) -> None:
    run_dir, seconds = setting.folder / "run", setting.times(SECONDS, least=10)
    measured = Measurements()
    with learning_server(setting.model, run_dir, "--log-level", "warning") as program:
        stop = threading.Event()
        with ThreadPoolExecutor(CLIENTS) as pool:
            clients = [pool.submit(Client(report, program, setting.seed + n).run, stop) for n in range(CLIENTS)]
            end = time.monotonic() + seconds
            try:
                while time.monotonic() < end:
                    measured.take(program)
                    time.sleep(seconds / MEASUREMENTS)
            finally:
                stop.set()
            for client in clients:
                client.result()
        measured.check(report)
        report.count("trained turns", states(run_dir)["applied"])
        program.process.terminate()
        report.check(program.process.wait(60) == 0, "the server did not stop in order")
        report.check_log(program.log)
    check_ledger(report, run_dir)


class Client:
    """Somebody who talks, rates, streams, leaves in the middle and sends nonsense."""

    def __init__(self, report: Report, program: Program, seed: int) -> None:
        self.report, self.url = report, program.url
        self.draw, self.seed, self.number = random.Random(seed), seed, 0
        self.client = httpx.Client(base_url=program.url, timeout=60)
        self.messages = [{"role": "user", "content": f"hello {seed}"}]

    def run(self, stop: threading.Event) -> None:
        with self.client:
            while not stop.is_set():
                action = self.draw.choices((self.talk, self.leave, self.nonsense, self.look), (6, 1, 2, 1))[0]
                self.report.count("requests")
                try:
                    action()
                except httpx.HTTPError as error:
                    self.report.fail("a request got no answer", repr(error))
                time.sleep(self.draw.uniform(0, 0.2))

    def talk(self) -> None:
        """Continue a conversation, and rate the answer at times."""
        body = {"messages": self.messages, "max_tokens": self.draw.randint(1, 12)}
        response = self.client.post("/v1/chat/completions", json=body)
        if not self.report.check(response.status_code == 200, "a request was not answered", response.text[:200]):
            return
        answer = response.json()
        if self.draw.random() < 0.3:
            rating = {"id": answer["id"], "score": self.draw.choice((-1, 1))}
            self.report.check(self.client.post("/v1/feedback", json=rating).status_code == 200, "feedback was refused")
        words = self.draw.choice(("more", "shorter, please", "thanks"))
        again = [*self.messages, answer["choices"][0]["message"], {"role": "user", "content": words}]
        self.messages = again if len(again) < 8 else self.messages[:1]

    def leave(self) -> None:
        """Read the beginning of a stream, and close the connection."""
        body = {"messages": self.messages[:1], "max_tokens": 60, "stream": True}
        with httpx.stream("POST", f"{self.url}/v1/chat/completions", json=body, timeout=60) as response:
            next(response.iter_lines(), None)

    def nonsense(self) -> None:
        """A request of the fuzzer, as far as an HTTP library sends it."""
        self.number += 1
        request = fuzz_request(self.seed, self.number)
        _, _, body = request.wire.partition(b"\r\n\r\n")
        response = self.client.post("/v1/chat/completions", content=body)
        self.report.check(response.status_code < 500, f"status {response.status_code}", f"{body[:300]!r}")

    def look(self) -> None:
        """What supervisors and people look at."""
        for path in ("/healthz", "/readyz", "/metrics", "/v1/models"):
            status = self.client.get(path).status_code
            self.report.check(status == 200, f"{path} answered {status}")
