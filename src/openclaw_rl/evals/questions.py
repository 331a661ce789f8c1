"""Everyday questions with reference answers, for simulated people to ask.

The file fixes which questions are held out: these are never asked in training, only in examinations.
"""

import json
import random
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Literal

Split = Literal["train", "held-out"]


@dataclass(frozen=True, slots=True)
class EvalQuestion:
    """A question and its reference answer."""

    text: str
    topic: str
    reference: str
    """An answer of one or two sentences. It shows the content of a good answer, not its form."""
    split: Split
    personas: tuple[str, ...]
    """The built-in personas that would ask it."""


def questions(persona: str | None = None, split: Split | None = None, seed: int = 0) -> list[EvalQuestion]:
    """The questions of a persona, of one split or both, shuffled by the seed.

    A persona that no question names, such as one from a user's file, asks all of them.
    """
    known = persona is not None and any(persona in question.personas for question in all_questions())
    chosen = [
        question
        for question in all_questions()
        if (split is None or question.split == split) and (not known or persona in question.personas)
    ]
    random.Random(seed).shuffle(chosen)
    return chosen


@cache
def all_questions() -> tuple[EvalQuestion, ...]:
    """Every question, in the order of the file."""
    lines = (files("openclaw_rl.evals") / "data" / "questions.jsonl").read_text("utf-8").splitlines()
    return tuple(_question(json.loads(line)) for line in lines)


def _question(given: dict[str, object]) -> EvalQuestion:
    personas = given["personas"]
    split: Split = "held-out" if given["split"] == "held-out" else "train"
    assert isinstance(personas, list)
    return EvalQuestion(
        str(given["text"]), str(given["topic"]), str(given["reference"]), split, tuple(map(str, personas))
    )
