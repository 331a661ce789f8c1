"""Measures the live page over a large ledger: the server's time for each view, and what an open page costs when idle.

The ledger has 100,000 turns. The first view may take 300 ms of the server's time, an idle page 1 % of a core.
"""

import sqlite3
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx
from common import argument_parser, machine, percentile, sized, table, verdict

from openclaw_rl.ledger import sessions, training, turns, verdicts
from openclaw_rl.types import (
    Continuation,
    SampleKind,
    SamplingParams,
    SessionKey,
    Source,
    State,
    Turn,
    TurnKind,
    Verdict,
)

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from support.judged_run import a_report
from support.live_page import LivePage, live_page
from support.tiny_models import save_tiny_model

TURNS = sized(100_000, 600)
TURNS_IN_A_SESSION = 10
#: One session is as long as an agent's day.
LONG_SESSION = sized(5000, 60)
BATCH = 16
VISITS = sized(15, 3)
IDLE_SECONDS = sized(20.0, 1.0)
OPEN_PAGES = 5
VIEWS = {
    "Now (the first view)": "",
    "Sessions": "sessions",
    "Sessions, page far back": "sessions?after={middle}-1",
    "a session of 10 turns": "sessions/2",
    f"a session of {LONG_SESSION} turns": "sessions/1",
    "the tokens of an answer": "turns/1/tokens",
    "Learning": "learning",
    "a step with its batch": "learning/5",
    "Environments": "environments",
}


def make_turn(number: int, session: str) -> Turn:
    return Turn(
        completion=f"c-{number}",
        choice=0,
        session=SessionKey("anyone", session),
        kind=TurnKind.MAIN,
        kind_reason="chat",
        version=number // BATCH // 4,
        messages=[{"role": "user", "content": f"Question {number}: what is the answer to this one, please?"}],
        message={"role": "assistant", "content": f"The answer to question {number} is what you think it is."},
        prompt_ids=list(range(40)),
        response_ids=list(range(60, 124)),
        logprobs=[-0.5] * 64,
        sampling=SamplingParams(max_tokens=64),
        finish_reason="stop",
        continuation=Continuation.NEW,
        parent=None,
        request_key=b"r%d" % number,
        end_key=b"e%d" % number,
    )


def fill(db: sqlite3.Connection) -> None:
    """Turns in all states: half of them trained on, a quarter judged, the rest dropped or waiting."""
    batch: list[int] = []
    step = 0
    for count in range(TURNS):
        session = "long" if count < LONG_SESSION else f"s{(count - LONG_SESSION) // TURNS_IN_A_SESSION}"
        turn = turns.record_turn(db, make_turn(count, session), "bench", None, 0, State.AWAITING)
        if count % 8 == 7:
            sessions.move(db, turn, State.DROPPED, "superseded: the client asked again")
            continue
        turns.set_next_state(db, turn, [{"role": "user", "content": "Thank you."}])
        verdicts.record(db, turn, Verdict(1.0 if count % 3 else -1.0, Source.LLM), SampleKind.RL, "", 0)
        if count % 2:
            sessions.move(db, turn, State.BATCHED)
            batch.append(turn)
        if len(batch) == BATCH:
            step += 1
            training.apply_step(db, step, step, batch, a_report(step).as_json(), step - 1)
            batch = []


def measure(page: LivePage) -> list[list[object]]:
    (middle,) = page.db.execute("SELECT avg(last) FROM sessions").fetchone()
    rows = []
    with httpx.Client(base_url=page.url) as http:
        for name, path in VIEWS.items():
            times = []
            for _ in range(VISITS):
                begun = time.perf_counter()
                answer = http.get(f"/dashboard/{path.format(middle=middle)}", timeout=60)
                times.append(time.perf_counter() - begun)
                assert answer.status_code == 200, answer.text[:500]
            first, median = times[0], percentile(times, 0.5)
            size = f"{len(answer.content) / 1000:.0f} KB"
            rows.append(
                [name, f"{1000 * first:.0f} ms", f"{1000 * median:.0f} ms", f"{1000 * max(times):.0f} ms", size]
            )
    return rows


def idle_share(page: LivePage) -> float:
    """The share of a core that one open page costs while nothing happens."""
    stop = threading.Event()

    def look_on() -> None:
        with httpx.stream("GET", f"{page.url}/dashboard/events?since=0&pulse=1", timeout=None) as stream:
            for _line in stream.iter_lines():
                if stop.is_set():
                    return

    for _ in range(OPEN_PAGES):
        threading.Thread(target=look_on, daemon=True).start()
    time.sleep(1)
    before = time.process_time()
    time.sleep(IDLE_SECONDS)
    used = time.process_time() - before
    stop.set()
    return used / IDLE_SECONDS / OPEN_PAGES


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        model, run = Path(scratch) / "model", Path(scratch) / "run"
        with live_page(save_tiny_model(model), run) as page:
            begun = time.perf_counter()
            page.ledger.submit(fill).result()
            seconds = time.perf_counter() - begun
            rows = measure(page)
            head = ["view", "first time", "median", "slowest", "size"]
            table(f"A ledger of {TURNS} turns, recorded in {seconds:.0f} s. {machine()}", head, rows)
            first = float(str(rows[0][2]).split()[0])
            share = 100 * idle_share(page)
            print(f"\n  first view: {first:.0f} ms of the server's time ({verdict(first, 300, at_least=False)})")
            print(
                f"  an open page while nothing happens: {share:.2f} % of a core ({verdict(share, 1, at_least=False)})"
            )


if __name__ == "__main__":
    argument_parser(__doc__).parse_args()
    main()
