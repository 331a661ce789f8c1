"""Measures what running episodes costs: the driver's overhead a turn, and episodes a second with an instant sampler.

The server runs in its own process: its real API, renderer, tokenizer (the embedded model's) and ledger, with a sampler
that answers at once. The driver's overhead is the time of an episode minus that of a minimal client, which sends the
same requests over one connection. A further table: a training step on the attempts of a group.
"""

import asyncio
import json
import tempfile
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from statistics import median

import uvicorn
from common import argument_parser, machine, model_folder, sized, table, verdict
from learning import show_siblings
from serving import ANSWER, Connection, InstantSampler, Server

from openclaw_rl.envs.base import Message, Outcome, Step, Task
from openclaw_rl.envs.connection import PolicyServer, Sampling
from openclaw_rl.envs.driver import Driver, EpisodeLimits, RolloutPlan
from openclaw_rl.envs.host import EnvironmentHost
from openclaw_rl.envs.tally import Tally

MAX_OVERHEAD_MS = 3
TURNS = 4
ROUNDS = sized(5, 1)
#: Episodes one after another, for the overhead.
SINGLE_EPISODES = sized(50, 2)
#: Episodes that run at once → their number.
PARALLEL = sized({8: 240, 64: 640}, {2: 4})
FIRST: Message = {"role": "user", "content": "Hello, what can you do for me today?"}
NEXT: Message = {"role": "user", "content": "Go on."}
LIMITS = EpisodeLimits(TURNS, turn_seconds=60, episode_seconds=600, sampling=Sampling(64))


class Talk:
    """An environment that costs nothing: every episode has the same number of turns."""

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        return (Task(str(number)) for number in count())

    def open(self, task: Task) -> "TalkEpisode":
        return TalkEpisode()


class TalkEpisode:
    tools = ()

    def __init__(self) -> None:
        self.turns = 0

    async def start(self) -> list[Message]:
        return [FIRST]

    async def step(self, answer: Message) -> Step:
        self.turns += 1
        return Step([NEXT], done=self.turns == TURNS)

    async def outcome(self) -> Outcome:
        return Outcome(1.0, solved=True)

    async def close(self) -> None: ...


class Unwatched:
    def ended(self, tally: Tally) -> None: ...

    def waiting(self, tally: Tally) -> None: ...


def serve(port: int) -> None:
    from openclaw_rl.api.app import create_app
    from openclaw_rl.api.completion import TokenSettings
    from openclaw_rl.api.service import ChatService
    from openclaw_rl.ledger.store import Ledger
    from openclaw_rl.rendering.chat import ChatRenderer

    renderer = ChatRenderer(model_folder())
    sampler = InstantSampler([*renderer.tokenizer.backend.encode(ANSWER).ids, *renderer.tokenizer.eos_ids])
    with tempfile.TemporaryDirectory() as folder:
        service = ChatService(sampler, renderer, TokenSettings(), ledger=Ledger(Path(folder)))
        uvicorn.run(create_app(service, "bench"), port=port, log_level="critical", access_log=False, lifespan="off")


async def drive(port: int, episodes: int, parallel: int) -> float:
    """Seconds that the driver takes for a number of episodes."""
    host = EnvironmentHost(Talk())
    plan = RolloutPlan("talk", "train", 0, episodes, group=1, parallel=parallel, limits=LIMITS)
    async with PolicyServer(f"http://127.0.0.1:{port}") as server:
        tally = await Driver(host, server, plan, Unwatched()).run()
    await host.close()
    if tally.failures:
        raise RuntimeError(f"episodes failed: {tally.failures}")
    return tally.seconds


async def send(port: int, episodes: int, run: str) -> float:
    """Seconds that a minimal client takes for the requests of the same episodes."""
    connection = await Connection.open(port)
    start = time.perf_counter()
    for number in range(episodes):
        session, messages = f"bare-{run}-{number}", [FIRST]
        for turn in range(TURNS):
            body = {"messages": messages, "max_tokens": 64, "seed": turn}
            content = await connection.post(request("/v1/chat/completions", body, session))
            messages = [*messages, json.loads(content)["choices"][0]["message"], NEXT]
        reward = {"task": f"talk/{number}", "reward": 1.0, "solved": True}
        await connection.post(request(f"/v1/sessions/{session}/reward", reward, session))
    return time.perf_counter() - start


def request(path: str, body: object, session: str) -> bytes:
    content = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
    lines += [f"X-Session-Id: {session}", "X-Episode: 1", f"Content-Length: {len(content)}", "", ""]
    return "\r\n".join(lines).encode() + content


def overhead(port: int) -> list[tuple[object, ...]]:
    driven, bare = [], []
    for number in range(ROUNDS):
        turns = SINGLE_EPISODES * TURNS
        bare.append(1e3 * asyncio.run(send(port, SINGLE_EPISODES, f"r{number}")) / turns)
        driven.append(1e3 * asyncio.run(drive(port, SINGLE_EPISODES, 1)) / turns)
    added = median(driven) - median(bare)
    met = verdict(added, MAX_OVERHEAD_MS, at_least=False)
    return [
        ("a minimal client, ms a turn", f"{median(bare):.2f}", ""),
        ("the driver, ms a turn", f"{median(driven):.2f}", ""),
        ("the driver's overhead, ms a turn", f"{added:.2f}", met),
    ]


def throughput(port: int) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = []
    for parallel, episodes in PARALLEL.items():
        seconds = asyncio.run(drive(port, episodes, parallel))
        rows.append((f"{parallel} at once, episodes a second", f"{episodes / seconds:.1f}", ""))
    return rows


def main() -> None:
    with Server(serve) as server:
        asyncio.run(drive(server.port, sized(20, 1), 4))
        rows = [*overhead(server.port), *throughput(server.port)]
    table(f"Episodes of {TURNS} turns ({machine()})", ("", "measured", "target"), rows)
    show_siblings("cpu")


if __name__ == "__main__":
    argument_parser(__doc__).parse_args()
    main()
