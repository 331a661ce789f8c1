"""Measures recording: durable turns per second, latency added to a request, bytes per turn, time to find a session.

The baseline of the first row is one commit per turn, which group commit replaces.
"""

import asyncio
import random
import tempfile
import time
from pathlib import Path

from common import argument_parser, machine, percentile, sized, table, verdict

from openclaw_rl.ledger.schema import FILE, connect, create_tables
from openclaw_rl.ledger.store import Ledger
from openclaw_rl.ledger.turns import capture, find_ancestor
from openclaw_rl.rendering import history
from openclaw_rl.types import Continuation, SamplingParams, SessionKey, Turn, TurnKind

PROMPT_TOKENS = sized(2000, 100)
RESPONSE_TOKENS = 128
CONCURRENT = 32
TURNS = sized(3000, 64)
SESSIONS = sized(10_000, 50)
SEARCHES = sized(2000, 50)

Message = dict[str, str]


def ids(count: int) -> list[int]:
    return [random.randrange(50_000) for _ in range(count)]


def make_turn(session: str, messages: list[Message], prompt: list[int], answer: str, parent: int | None) -> Turn:
    response = ids(RESPONSE_TOKENS)
    request_key = history.keys("bench", messages).request
    message = {"role": "assistant", "content": answer}
    return Turn(
        completion=f"c-{random.getrandbits(96):x}",
        choice=0,
        session=SessionKey("bench", session),
        kind=TurnKind.MAIN,
        kind_reason="chat",
        version=0,
        messages=messages,
        message=message,
        prompt_ids=prompt,
        response_ids=response,
        logprobs=[-0.5] * len(response),
        sampling=SamplingParams(max_tokens=RESPONSE_TOKENS),
        finish_reason="stop",
        continuation=Continuation.EXTENDS if parent else Continuation.NEW,
        parent=parent,
        request_key=request_key,
        end_key=history.extend(request_key, message),
    )


def words(count: int) -> str:
    return " ".join(f"word{random.randrange(1000)}" for _ in range(count))


def single_turns(count: int) -> list[Turn]:
    """Turns of different sessions, each with its whole prompt."""
    made = []
    for number in range(count):
        messages = [{"role": "user", "content": words(PROMPT_TOKENS // 2)}]
        made.append(make_turn(f"s{number}", messages, ids(PROMPT_TOKENS), words(RESPONSE_TOKENS // 2), None))
    return made


def one_by_one(directory: Path, turns: list[Turn]) -> float:
    """Turns per second with one transaction per turn."""
    db = connect(directory / FILE)
    create_tables(db)
    start = time.perf_counter()
    for turn in turns:
        db.execute("BEGIN IMMEDIATE")
        capture(db, [turn], "bench", None, 0)
        db.execute("COMMIT")
    return len(turns) / (time.perf_counter() - start)


async def together(ledger: Ledger, turns: list[Turn]) -> tuple[float, list[float]]:
    """Turns per second and milliseconds per turn, with many requests at once."""
    waiting = iter(turns)
    latencies: list[float] = []

    async def client() -> None:
        for turn in waiting:
            start = time.perf_counter()
            await ledger.capture([turn], "bench", None, 0)
            latencies.append((time.perf_counter() - start) * 1e3)

    start = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(CONCURRENT)))
    return len(turns) / (time.perf_counter() - start), latencies


async def alone(ledger: Ledger, turns: list[Turn]) -> list[float]:
    """Milliseconds that recording adds to a single request."""
    latencies = []
    for turn in turns:
        start = time.perf_counter()
        await ledger.capture([turn], "bench", None, 0)
        latencies.append((time.perf_counter() - start) * 1e3)
    return latencies


async def growing_session(directory: Path) -> dict[int, float]:
    """Kilobytes of database per turn after this many turns of one session with a 12,000-token system prompt."""
    ledger = Ledger(directory)
    messages = [{"role": "system", "content": words(9000)}, {"role": "user", "content": words(40)}]
    prompt = ids(12_000)
    sizes, parent, keep = {}, None, 0
    for number in range(1, 31):
        turn = make_turn("long", messages, prompt, words(60), parent)
        await ledger.capture([turn], "bench", parent, keep)
        keep = len(turn.prompt_ids) + len(turn.response_ids)
        prompt = [*turn.prompt_ids, *turn.response_ids, *ids(60)]
        messages = [*messages, dict(turn.message), {"role": "user", "content": words(40)}]
        parent = number
        if number in (1, 10, 20, 30):
            ledger.submit(lambda db: None).result()
            connect(directory / FILE).execute("PRAGMA wal_checkpoint(TRUNCATE)")
            sizes[number] = (directory / FILE).stat().st_size / 1000
    ledger.close()
    return sizes


async def finding(directory: Path) -> list[float]:
    """Milliseconds to find the session of a request by its history, among many."""
    ledger = Ledger(directory)
    conversations = []
    for number in range(SESSIONS):
        messages = [{"role": "user", "content": f"question {number} {words(20)}"}]
        turn = make_turn(f"s{number}", messages, ids(50), words(20), None)
        conversations.append([*messages, dict(turn.message), {"role": "user", "content": "and now?"}])
        ledger.submit(lambda db, turn=turn: capture(db, [turn], "bench", None, 0))
    ledger.submit(lambda db: None).result()
    latencies = []
    for messages in random.sample(conversations, SEARCHES):
        start = time.perf_counter()
        keys = history.keys("bench", messages)
        found = ledger.read(find_ancestor, "bench", keys.ends, None, set())
        latencies.append((time.perf_counter() - start) * 1e3)
        if found is None:
            raise RuntimeError("a session was not found")
    ledger.close()
    return latencies


async def measure(scratch: Path) -> None:
    folders = [scratch / name for name in ("single", "group", "alone", "long", "many")]
    for folder in folders:
        folder.mkdir()
    turns = single_turns(TURNS)
    serial = one_by_one(folders[0], turns)
    ledger = Ledger(folders[1])
    rate, busy = await together(ledger, turns)
    ledger.close()
    ledger = Ledger(folders[2])
    idle = await alone(ledger, turns[:1000])
    ledger.close()
    sizes = await growing_session(folders[3])
    found = await finding(folders[4])
    p99 = percentile(found, 0.99)
    median_verdict, tail_verdict = (verdict(percentile(busy, share), ms, False) for share, ms in ((0.5, 5), (0.99, 25)))

    def both(latencies: list[float]) -> str:
        return f"{percentile(latencies, 0.5):.3f} / {percentile(latencies, 0.99):.3f}"

    rows = [
        ("durable turns/s, one commit each", f"{serial:.0f}", ""),
        (f"durable turns/s, {CONCURRENT} requests at once", f"{rate:.0f}", f"×{rate / serial:.1f}"),
        ("added to a request, idle, p50 / p99 ms", both(idle), ""),
        (f"the same, {CONCURRENT} at once, p50 / p99 ms", both(busy), f"{median_verdict}; {tail_verdict}"),
        (f"find a session among {SESSIONS:,}, p50 / p99 ms", both(found), verdict(p99, 1, False)),
    ]
    table(f"Ledger ({machine()}; {PROMPT_TOKENS}-token prompts)", ("", "measured", ""), rows)
    growth = [(n, f"{size:.0f}", f"{size / n:.1f}") for n, size in sizes.items()]
    table("One session, 12,000-token system prompt", ("turns", "database KB", "KB per turn"), growth)
    late, early = (sizes[30] - sizes[20]) / 10, (sizes[20] - sizes[10]) / 10
    print(f"  per added turn: {early:.1f} KB (turns 11 to 20), {late:.1f} KB (turns 21 to 30): linear")


if __name__ == "__main__":
    argument_parser(__doc__).parse_args()
    random.seed(0)
    with tempfile.TemporaryDirectory() as scratch_folder:
        asyncio.run(measure(Path(scratch_folder)))
