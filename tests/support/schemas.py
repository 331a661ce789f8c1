"""Random JSON schemas, and answers that a constraint lets an undecided model write."""

import random
from pathlib import Path
from typing import Any

import numpy as np

from openclaw_rl.engines.constraints import Automaton, Vocabulary
from openclaw_rl.types import Constraint

WORDS = ("a", "the fox", 'quote " here', "back\\slash", "é", "名前", "", "line\nbreak", "<tool_call>", "</think>")
PATTERNS = ("^[a-c]{1,4}$", "^(fox|dog)s?$", "^[0-9]{2}-[0-9]{2}$")


def random_schema(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    """A schema that can be met by a short value."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const"]
    if depth:
        kinds += ["object", "object", "array", "anyOf"]
    match rng.choice(kinds):
        case "string":
            low = rng.randint(0, 3)
            bounds = {"minLength": low, "maxLength": low + rng.randint(0, 6)}
            return {"type": "string", **(bounds if rng.random() < 0.7 else {"pattern": rng.choice(PATTERNS)})}
        case "integer":
            low = rng.randint(-1000, 1000)
            return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 300)}
        case "number":
            low = rng.randint(-50, 50)
            return {"type": "number", "exclusiveMinimum": low, "maximum": low + rng.randint(1, 9)}
        case "enum":
            return {"enum": rng.sample([*WORDS, 1, 2.5, None, True, [1], {"a": 1}], rng.randint(1, 5))}
        case "const":
            return {"const": rng.choice(WORDS)}
        case "object":
            return random_object(rng, depth - 1)
        case "array":
            low = rng.randint(0, 2)
            bounds = {"minItems": low, "maxItems": low + rng.randint(0, 2)}
            return {"type": "array", "items": random_schema(rng, depth - 1), **bounds}
        case "anyOf":
            return {"anyOf": [random_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]}
        case simple:
            return {"type": simple}


def random_object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(["name", "a b", 'q"t', "ключ", "n", "x/y"], rng.randint(0, 4))
    properties = {name: random_schema(rng, depth) for name in names}
    required = [name for name in names if rng.random() < 0.6]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


class UndecidedModel:
    """Draws every allowed token with the same probability; forced texts and ends come as they come."""

    def __init__(self, model: Path) -> None:
        self.vocabulary = Vocabulary(model, None)
        self.end = self.vocabulary.tokens.eos_token

    def answer(self, constraint: Constraint, seed: int, at_most: int = 400) -> tuple[str, bool]:
        """The text of an answer, and whether it ended by itself."""
        rng = np.random.default_rng(seed)
        automaton = Automaton.compile(self.vocabulary, constraint).copy([self.end])
        ids: list[int] = []
        while len(ids) < at_most:
            allowed = automaton.allowed()
            token = int(rng.choice(allowed.mask.nonzero()[0]))
            if token == self.end:
                return self.vocabulary.tokens.decode_bytes(ids).decode(), True
            assert automaton.accept(token)
            ids.append(token)
        return self.vocabulary.tokens.decode_bytes(ids).decode(errors="replace"), False
