"""A run that contains every case: verdicts of all kinds, hints, steps, a batch that was set aside."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from openclaw_rl.learn.reporting import StepReport
from openclaw_rl.ledger import training, verdicts
from openclaw_rl.ledger.turns import add_feedback, set_next_state
from openclaw_rl.rendering.tokenizer import ChatTokenizer
from openclaw_rl.types import Feedback, Hint, SampleKind, Source, State, Verdict
from support.records import Book, a_turn


def a_report(step: int, **given: Any) -> StepReport:
    numbers = {
        "samples": 4,
        "opd_rl": 2,
        "opd": 1,
        "rl": 1,
        "reward": 0.5,
        "loss": 1.25,
        "kl_old": 0.01,
        "kl_base": 0.02 * step,
        "clip_fraction": 0.125,
        "grad_norm": 0.75,
        "staleness": 1.0,
        "tokens": 400,
        "response_tokens": 100,
        "step_seconds": 5.0,
        "latency_seconds": 7.5,
        "time": 1.7e9,
    }
    return StepReport(**{"step": step, "version": step, **numbers, **given})


def write_metrics(folder: Path, reports: Sequence[StepReport]) -> None:
    lines = [json.dumps(report.as_json()) for report in reports]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")


def answered(
    book: Book, tokenizer: ChatTokenizer, question: str, answer: str, came_next: str, session: str = "s", **given: Any
) -> int:
    """Record a turn with this question and answer, and the reply that came next."""
    ids = [*tokenizer.encode_text(answer), tokenizer.eos_id]
    number = book.capture(
        a_turn(
            session,
            messages=[{"role": "user", "content": question}],
            message={"role": "assistant", "content": answer},
            prompt_ids=tokenizer.encode_text(question),
            response_ids=ids,
            logprobs=[-0.25 * (place % 5) for place in range(len(ids))],
            **given,
        )
    )
    book.change(set_next_state, number, [{"role": "user", "content": came_next}])
    return number


def judged(book: Book, turn: int, verdict: Verdict, sample: SampleKind | None, reason: str = "") -> int:
    book.change(verdicts.record, turn, verdict, sample, reason, len(book.read(turn).feedback))
    return turn


def hinted(book: Book, turn: int, text: str = "Be brief.") -> int:
    """Judge a turn as bad, with a hint under which the teacher's log-probs differ from token to token."""
    count = len(book.read(turn).response_ids)
    hint = Hint(text, [-0.5 if place % 2 else -3.0 for place in range(count)])
    return judged(book, turn, Verdict(-1.0, Source.FEEDBACK, (hint,), reason="asked to change"), SampleKind.OPD_RL)


def fill(book: Book, tokenizer: ChatTokenizer, word: str = "hello", step: int = 2) -> dict[str, int]:
    """Record one turn of every kind, with `word` in every text; the turns' numbers by kind."""

    def one(name: str) -> int:
        return answered(book, tokenizer, f"Ask {name} {word}", f"Say {name} {word}", f"Next {name} {word}", name)

    turns = {name: one(name) for name in ("hint", "best", "worst", "silent", "aside", "explicit", "waiting")}
    hinted(book, turns["hint"], f"Hint {word}")
    judged(book, turns["best"], Verdict(1.0, Source.LLM, reason=f"Because {word}"), SampleKind.RL)
    judged(book, turns["worst"], Verdict(-1.0, Source.LLM), SampleKind.RL)
    judged(book, turns["silent"], Verdict(None, None, reason=f"Silence {word}"), None, f"the judge abstained: {word}")
    judged(book, turns["aside"], Verdict(-1.0, Source.FEEDBACK), SampleKind.RL)
    book.move(turns["aside"], State.BATCHED)
    book.change(training.quarantine, 3, [turns["aside"]], f"Refused {word}")
    completion = book.read(turns["explicit"]).completion
    book.change(add_feedback, "me", completion, 0, Feedback(1.0, f"Told {word}"))
    judged(book, turns["explicit"], Verdict(1.0, Source.EXPLICIT), SampleKind.RL)
    book.move(turns["explicit"], State.BATCHED)
    book.change(training.apply_step, step, step, [turns["explicit"]])
    return turns
