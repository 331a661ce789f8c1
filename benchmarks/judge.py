"""Measures how fast rules judge turns, and how many tokens a language model reads for its votes.

Tokens read: both questions about a turn with m votes each, as the loop asks them (votes share a prompt, the questions
share the quoted turn), compared with the same number of independent requests to an engine without a prefix cache.
"""

import asyncio
import tempfile
import time
from pathlib import Path

import torch
from common import argument_parser, machine, model_folder, sized, table, verdict
from prometheus_client import CollectorRegistry

from openclaw_rl.engines.local.model.decoder import load_decoder
from openclaw_rl.engines.local.process.sampler_worker import Worker
from openclaw_rl.engines.local.process.worker_messages import Add, WorkerOptions
from openclaw_rl.judge.judges.base import Case, Explicit, FeedbackReader, JudgePanel
from openclaw_rl.judge.judges.llm import question_chat
from openclaw_rl.judge.loop import JudgeLoop, JudgeMetrics
from openclaw_rl.judge.rules import read_reply
from openclaw_rl.ledger.store import Ledger
from openclaw_rl.ledger.turns import ready_turns, record_turn, set_next_state
from openclaw_rl.methods.options import MethodOptions
from openclaw_rl.methods.rl import Rl
from openclaw_rl.rendering.chat import ChatRenderer
from openclaw_rl.types import (
    Continuation,
    Priority,
    Question,
    SampleRequest,
    SamplingParams,
    SessionKey,
    State,
    Turn,
    TurnKind,
)

REQUEST = "Could you explain how a suspension bridge carries its load, and why the cables have that shape? " * 3
RESPONSE = "The deck hangs from vertical hangers, and those from the main cables, which carry it to the towers. " * 8
REPLIES = (
    "Thanks, that is exactly what I needed!",
    "No, I asked about the shape of the cables. Please explain why it is nearly a parabola.",
    "Can you make it shorter? Two sentences are enough.",
    "Perfect. Now the same for cable-stayed bridges, please.",
    "And how long do they last?",
)
#: Short answers, because only the tokens that are read are compared.
ANSWER_TOKENS = 8
ROUNDS = sized(3, 1)


def a_turn(number: int) -> Turn:
    return Turn(
        completion=f"chatcmpl-{number}",
        choice=0,
        session=SessionKey("bench", f"s{number}"),
        kind=TurnKind.MAIN,
        kind_reason="chat",
        version=0,
        messages=[{"role": "user", "content": REQUEST}],
        message={"role": "assistant", "content": RESPONSE},
        prompt_ids=list(range(200)),
        response_ids=list(range(200)),
        logprobs=[-0.5] * 200,
        sampling=SamplingParams(max_tokens=200),
        finish_reason="stop",
        continuation=Continuation.NEW,
        parent=None,
        request_key=b"request %d" % number,
        end_key=b"end %d" % number,
    )


def reply(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": REPLIES[number % len(REPLIES)]}]


async def judge_all(folder: Path, turns: int) -> float:
    """Seconds from ready to judged for this many turns, through the loop and the ledger."""
    ledger = Ledger(folder)

    def fill(db: object) -> None:
        for number in range(turns):
            stored = record_turn(db, a_turn(number), "bench", None, 0, State.AWAITING)
            set_next_state(db, stored, reply(number))

    ledger.submit(fill).result()
    metrics = JudgeMetrics(CollectorRegistry())
    loop = JudgeLoop(ledger, JudgePanel([Explicit(), FeedbackReader()]), None, Rl(MethodOptions(method="rl")), metrics)
    started = time.perf_counter()
    running = asyncio.create_task(loop.run())
    while ledger.read(ready_turns, (), 1):
        await asyncio.sleep(0.01)
    seconds = time.perf_counter() - started
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    ledger.close()
    return seconds


def read_alone(turns: int) -> float:
    started = time.perf_counter()
    for number in range(turns):
        read_reply(REQUEST, RESPONSE, reply(number))
    return time.perf_counter() - started


def chats(renderer: ChatRenderer) -> list[list[int]]:
    case = Case(1, REQUEST, RESPONSE, reply(1), ())
    return [
        renderer.prompt(renderer.text(question_chat(case, question))).ids
        for question in (Question.SCORE, Question.HINT)
    ]


def prompt_tokens_read(worker: Worker, requests: list[SampleRequest]) -> int:
    """Prompt tokens that go through the model for requests that arrive together."""
    for number, request in enumerate(requests):
        worker.obey(Add(number, request, 0))
    read = 0
    plan = worker.scheduler.plan

    def counted() -> list[object]:
        nonlocal read
        work = plan()
        read += sum(max(0, min(w.stop, w.sequence.prompt_length) - w.start) for w in work)
        return work

    worker.scheduler.plan = counted
    while not worker.scheduler.idle:
        worker.step()
    worker.scheduler.plan = plan
    return read


def reading(votes: int) -> tuple[int, int]:
    """Prompt tokens read for one turn: as the loop asks, and with independent requests."""
    folder = model_folder()
    decoder = load_decoder(folder, torch.float32, torch.device("cpu"))
    worker = Worker(decoder, WorkerOptions(folder, "cpu", "float32", 16, None, 0.5, 2, 8))
    params = SamplingParams(max_tokens=ANSWER_TOKENS)
    prompts_ = chats(ChatRenderer(folder))
    together = [SampleRequest(ids, params, votes, priority=Priority.BACKGROUND) for ids in prompts_]
    ours = prompt_tokens_read(worker, together)
    alone = 0
    for ids in prompts_:
        for _ in range(votes):
            worker.scheduler.pool.forget()
            alone += prompt_tokens_read(worker, [SampleRequest(ids, params)])
    return ours, alone


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--turns", type=int, default=sized(2000, 20), help="to judge by rules")
    parser.add_argument("--votes", type=int, default=sized(3, 1), help="of a model about each question")
    options = parser.parse_args()
    print(machine())
    with tempfile.TemporaryDirectory() as folder:
        through = min(asyncio.run(judge_all(Path(folder) / str(i), options.turns)) for i in range(ROUNDS))
    alone = min(read_alone(options.turns) for _ in range(ROUNDS))
    rows = [
        ("the reader alone (baseline)", f"{options.turns / alone:,.0f}", f"{1e3 * alone / options.turns:.3f}", "1"),
        (
            "loop and ledger, durable",
            f"{options.turns / through:,.0f}",
            f"{1e3 * through / options.turns:.3f}",
            f"{alone / through:.2f}",
        ),
    ]
    table("Judging by rules", ["", "turns/s", "ms/turn", "ratio"], rows)
    ours, independent = reading(options.votes)
    ratio = ours / independent
    rows = [
        (f"{2 * options.votes} independent requests (baseline)", independent, "1", ""),
        ("as the loop asks", ours, f"{ratio:.2f}", verdict(ratio, 1 / 3, at_least=False)),
    ]
    table(f"Prompt tokens read for a turn, {options.votes} votes on each question", ["", "tokens", "ratio", ""], rows)


if __name__ == "__main__":
    main()
