"""Workers stopped (SIGSTOP) and killed while people talk: the server stays up, each turn is trained on once."""

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from chaos.learning import all_trained, check_ledger, healthy, learning_server, states, teach
from chaos.report import Report, Setting
from support.conversations import ask
from support.process_stats import children, memory_mib
from support.server_program import Program, until

ROUNDS = 40
TALKERS = 2
STOP_SECONDS = 1.5
#: The longest wait for an answer, also while a worker is started again.
ANSWER_SECONDS = 90


def run(report: Report, setting: Setting) -> None:
    run_dir = setting.folder / "run"
    draw = random.Random(setting.seed)
    with learning_server(setting.model, run_dir) as program:
        teach(program, 2)
        until(lambda: states(run_dir)["applied"] == 2, program)
        before = memory_mib(program.process.pid)
        with talking(report, program):
            for _ in range(setting.times(ROUNDS, least=4)):
                attack(report, program, run_dir, draw)
        until(lambda: answers(program), program)
        teach(program, 2)
        until(lambda: all_trained(run_dir), program)
        report.memory = (before, memory_mib(program.process.pid))
        report.count("trained turns", states(run_dir)["applied"])
        program.process.terminate()
        report.check(program.process.wait(60) == 0, "the server did not stop in order")
        report.check_log(program.log)
    check_ledger(report, run_dir)


def workers(program: Program) -> dict[str, int]:
    """The process ids of sampler and learner."""
    found = {}
    for pid in children(program.process.pid):
        with contextlib.suppress(OSError):
            if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                # The learner gives way to the server and the sampler.
                nice, of_server = (os.getpriority(os.PRIO_PROCESS, one) for one in (pid, program.process.pid))
                found["learner" if nice > of_server else "sampler"] = pid
    return found


def attack(report: Report, program: Program, run_dir: Path, draw: random.Random) -> None:
    """Stop or kill one worker at a random instant."""
    time.sleep(draw.uniform(0.2, 1.5))
    pids = workers(program)
    if not pids:
        return
    name = draw.choice(sorted(pids))
    with contextlib.suppress(ProcessLookupError):
        if draw.random() < 0.5:
            report.count(f"{name} stopped")
            os.kill(pids[name], signal.SIGSTOP)
            time.sleep(STOP_SECONDS)
            report.check(healthy(program), f"/healthz was slow while the {name} was stopped")
            os.kill(pids[name], signal.SIGCONT)
        else:
            report.count(f"{name} killed")
            os.kill(pids[name], signal.SIGKILL)
            report.check(healthy(program), f"/healthz was slow when the {name} was killed")
            if name == "learner":
                # A batch that the learner dies of twice is set aside, so the next kill waits for a step.
                trained = states(run_dir)["applied"]
                until(lambda: states(run_dir)["applied"] > trained, program)


@contextlib.contextmanager
def talking(report: Report, program: Program) -> Iterator[None]:
    """People talk and rate in the background. Each gets an answer or a 503 in OpenAI's shape."""
    stop = threading.Event()
    with ThreadPoolExecutor(TALKERS) as pool:
        clients = [pool.submit(talk, report, program, stop) for _ in range(TALKERS)]
        try:
            yield
        finally:
            stop.set()
    for client in clients:
        client.result()


def talk(report: Report, program: Program, stop: threading.Event) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 6}
    with httpx.Client(base_url=program.url, timeout=ANSWER_SECONDS) as client:
        while not stop.is_set():
            try:
                response = client.post("/v1/chat/completions", json=body)
                report.count("answered" if response.status_code == 200 else "refused with 503")
                served = response.status_code == 200 or response.json()["error"]["code"] == "engine_unavailable"
                report.check(served, "a request was not answered", f"{response.status_code} {response.text[:200]}")
                if response.status_code == 200:
                    rating = client.post("/v1/feedback", json={"id": response.json()["id"], "score": 1})
                    report.check(rating.status_code == 200, "feedback was refused", rating.text[:200])
                    time.sleep(0.3)
                else:
                    time.sleep(0.2)
            except httpx.HTTPError as error:
                report.fail("a request got no answer", repr(error))


def answers(program: Program) -> bool:
    """Whether the server answers an ordinary request."""
    with contextlib.suppress(AssertionError, httpx.HTTPError):
        return bool(ask(program.url)["id"])
    return False
