"""Constrained completions of inference servers: what is streamed, what is scored again, and what was forced."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from openclaw_rl.engines.remote.constrained import ConstrainedCompletion, ConstrainedCompletions
from openclaw_rl.engines.remote.dialect import SampledPiece, ServerScores
from openclaw_rl.types import (
    Constraint,
    FinishReason,
    JsonForm,
    Priority,
    SampledToken,
    SampleRequest,
    SamplingParams,
    Scores,
    Thinking,
    TopTokens,
)
from support.schemas import UndecidedModel

LOOK = JsonForm('{"enum": [1, 22]}', "<tool_call>", "</tool_call>")
PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> UndecidedModel:
    return UndecidedModel(tiny_model)


def follow(folder: Path, constraint: Constraint, stop: int) -> ConstrainedCompletion:
    completions = ConstrainedCompletions(folder)
    params = SamplingParams(max_tokens=99, stop_token_ids=frozenset([stop]), top_logprobs=2)
    try:
        completion = asyncio.run(completions.follow(SampleRequest(PROMPT, params, owner="ann", constraint=constraint)))
    finally:
        completions.close()
    assert completion is not None
    return completion


def sampled(model: UndecidedModel, text: str) -> list[SampledToken]:
    ids = [*model.vocabulary.tokens.tokenize_str(text), model.end]
    tokens = [SampledToken(0, id, -0.1) for id in ids]
    return [*tokens[:-1], SampledToken(0, model.end, -0.1, finish=FinishReason.STOP)]


def spelled(model: UndecidedModel, tokens: list[SampledToken]) -> str:
    text: bytes = model.vocabulary.tokens.decode_bytes([token.token_id for token in tokens])
    return text.decode(errors="replace")


def test_text_before_a_call_is_passed_on_and_the_call_is_held(model: UndecidedModel, tiny_model: Path) -> None:
    completion = follow(tiny_model, Constraint(calls=(LOOK,), trigger="<tool_call>"), model.end)
    tokens = sampled(model, "Let me see 🙂. <tool_call>22</tool_call>")
    passed = [token for each in tokens for token in completion.add(SampledPiece([each], None))]
    assert spelled(model, passed) == "Let me see 🙂. <tool_call>"
    assert [token.token_id for token in passed + completion.held] == [token.token_id for token in tokens]
    assert not any(token.forced for token in passed[:-1])
    assert passed[-1].forced is (len(model.vocabulary.tokens.tokenize_str("<tool_call>")) > 1)
    assert completion.held[-2].forced


def test_text_without_a_call_is_never_held(model: UndecidedModel, tiny_model: Path) -> None:
    completion = follow(tiny_model, Constraint(calls=(LOOK,), trigger="<tool_call>"), model.end)
    tokens = sampled(model, "No call, only <tool_cal")
    assert len(completion.add(SampledPiece(tokens, None))) == len(tokens)
    assert completion.held == []


def test_what_was_held_gets_raw_logprobs_in_the_users_place(model: UndecidedModel, tiny_model: Path) -> None:
    completion = follow(tiny_model, Constraint(JsonForm('{"enum": [1, 22]}')), model.end)
    tokens = sampled(model, "22")
    assert completion.add(SampledPiece(tokens, None, ("w1",))) == []
    scoring = completion.scoring()
    assert scoring.ids == [*PROMPT, *(token.token_id for token in tokens)]
    assert (scoring.last_n, scoring.top_k) == (len(tokens), 2)
    assert (scoring.owner, scoring.priority) == ("ann", Priority.USER)
    count = len(tokens)
    likeliest = TopTokens(np.full((count, 2), 3, np.int32), np.full((count, 2), -2.5, np.float32))
    raw = completion.scored(ServerScores(Scores([-4.0] * count, likeliest), ("w1",)))
    assert [token.logprob for token in raw] == [-4.0] * count
    assert {token.top for token in raw} == {((3, -2.5), (3, -2.5))}
    assert raw[-1].finish is FinishReason.STOP
    assert not all(token.forced for token in raw)
    of_others = completion.scored(ServerScores(Scores([-4.0] * count, likeliest), ("w2",)))
    assert all(token.forced for token in of_others)


def test_reasoning_that_the_prompt_has_begun_is_passed_on(model: UndecidedModel, tiny_model: Path) -> None:
    constraint = Constraint(JsonForm('{"enum": [1, 22]}'), thinking=Thinking.BEGUN)
    completion = follow(tiny_model, constraint, model.end)
    passed = completion.add(SampledPiece(sampled(model, "Hm.</think>\n\n22"), None))
    assert spelled(model, passed).startswith("Hm.</think>")
    assert "22" in spelled(model, completion.held)


def test_whitespace_that_only_the_server_allows_ends_no_marks(model: UndecidedModel, tiny_model: Path) -> None:
    form = JsonForm('{"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}', "", "</end>")
    completion = follow(tiny_model, Constraint(form), model.end)
    completion.add(SampledPiece(sampled(model, '{\n"a"\t:\n1\n}</end>'), None))
    assert completion.held[-1].forced
    assert not completion.held[1].forced
