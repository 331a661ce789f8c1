"""Thousands of random schemas: every constrained answer fits (`make test-schemas`)."""

import json
import os
import random
from pathlib import Path

import pytest

from openclaw_rl.lab.schema import mismatch
from openclaw_rl.types import Constraint, JsonForm
from support.schemas import UndecidedModel, random_schema

COUNT = int(os.environ.get("OPENCLAW_RL_SCHEMAS", "0"))


@pytest.mark.skipif(not COUNT, reason="OPENCLAW_RL_SCHEMAS says how many schemas to try")
def test_every_answer_fits_its_schema_thousands_of_times(tiny_model: Path) -> None:
    model = UndecidedModel(tiny_model)
    ended = 0
    for seed in range(COUNT):
        schema = random_schema(random.Random(f"slow {seed}"), depth=4)
        text, complete = model.answer(Constraint(JsonForm(json.dumps(schema))), seed)
        if complete:
            ended += 1
            assert not mismatch(json.loads(text), schema), (seed, schema, text)
    assert ended > 0.9 * COUNT
