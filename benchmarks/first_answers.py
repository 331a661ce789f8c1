"""Asks the model 50 plain questions, as somebody does who tries the server, and checks the answers.

    python benchmarks/first_answers.py ['{"temperature": 0.5}' …]

Requests say nothing about sampling, so they get the server's defaults; each argument is one more row with these fields.
An answer is sensible if it passes the quality guard: not empty, not repetitive, not garbled, and about the question.
"""

import asyncio
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common import MODEL, machine, percentile, sized, table

from openclaw_rl.client import CHAT, ApiClient
from openclaw_rl.evals.conversation import EvalQuestion, questions
from openclaw_rl.lab.server import run_server
from openclaw_rl.sense import check

QUESTIONS = sized(50, 2)
AT_ONCE = 8
SECONDS = 1800.0
#: Where the answers are written, to be read.
OUT = Path(tempfile.gettempdir()) / "first-answers.jsonl"


def plain_questions() -> list[EvalQuestion]:
    """As many of each of two simulated people: short questions, and those that ask for lists and steps."""
    both = [questions(persona, "train") for persona in ("brief", "student")]
    return [question for pair in zip(*both, strict=False) for question in pair][:QUESTIONS]


async def ask(api: ApiClient, question: EvalQuestion, fields: Mapping[str, Any], seed: int) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": question.text}], "seed": seed, "store": False, **fields}
    told = (await api.call("POST", CHAT, body, seconds=SECONDS)).json()
    choice = told["choices"][0]
    text = choice["message"]["content"] or ""
    return {
        "question": question.text,
        "fields": dict(fields),
        "answer": text,
        "tokens": told["usage"]["completion_tokens"],
        "ended": choice["finish_reason"],
        "faults": check(text, question.text, question.reference).reasons,
    }


async def measure(url: str, settings: Sequence[Mapping[str, Any]]) -> list[list[dict[str, Any]]]:
    api = ApiClient(url)
    slots = asyncio.Semaphore(AT_ONCE)

    async def one(question: EvalQuestion, fields: Mapping[str, Any], seed: int) -> dict[str, Any]:
        async with slots:
            return await ask(api, question, fields, seed)

    asked = list(enumerate(plain_questions()))
    try:
        return [list(await asyncio.gather(*(one(q, fields, seed) for seed, q in asked))) for fields in settings]
    finally:
        await api.close()


def row(fields: Mapping[str, Any], answers: Sequence[Mapping[str, Any]]) -> list[object]:
    tokens = [answer["tokens"] for answer in answers]
    lines = [len(answer["answer"].splitlines()) for answer in answers]
    faults = Counter(fault for answer in answers for fault in answer["faults"])
    return [
        json.dumps(fields) if fields else "the defaults",
        f"{sum(not answer['faults'] for answer in answers)} of {len(answers)}",
        sum(answer["ended"] == "stop" for answer in answers),
        f"{percentile(tokens, 0.5)} / {max(tokens)}",
        f"{percentile(lines, 0.5)} / {max(lines)}",
        "; ".join(f"{count} {fault}" for fault, count in faults.most_common()),
    ]


async def main() -> None:
    settings = [{}, *map(json.loads, sys.argv[1:])]
    model = ["--model-name", MODEL] if MODEL else []
    with tempfile.TemporaryDirectory() as folder:
        async with run_server(Path(folder), "--preset", "personal", "--max-steps", "0", *model) as server:
            rows = await measure(server.url, settings)
    OUT.write_text("".join(json.dumps(answer) + "\n" for answers in rows for answer in answers))
    table(
        f"{QUESTIONS} plain questions: {machine()}; answers in {OUT}",
        ["fields of the request", "sensible", "ended by itself", "tokens, median / most", "lines", "faults"],
        [row(fields, answers) for fields, answers in zip(settings, rows, strict=True)],
    )


if __name__ == "__main__":
    asyncio.run(main())
