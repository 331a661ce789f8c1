"""Tokens that a constraint forced teach nothing, whatever the method."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from openclaw_rl.learn.samples import to_sequences
from openclaw_rl.ledger import verdicts
from openclaw_rl.methods.base import NoSignal
from openclaw_rl.types import Hint, SampleKind, Source, State, StoredTurn, TopTokens, Verdict
from support.methods import a_method
from support.records import Book

METHODS = ("rl", "opd", "combine", "topk-select")
FORCED = [True, False, False, True]
K = 2


def top_tokens(logprob: float) -> TopTokens:
    return TopTokens(np.arange(4 * K, dtype=np.int32).reshape(4, K), np.full((4, K), logprob, np.float32))


def judged(folder: Path, forced: list[bool], **verdict: Any) -> StoredTurn:
    """A turn of four tokens as the learner reads it from the ledger."""
    book = Book(folder)
    number = book.put(
        State.READY,
        response_ids=[4, 5, 6, 7],
        logprobs=[-1.0, -1.0, -2.0, -1.0],
        forced=forced,
        top=top_tokens(-1.5),
    )
    hint = Hint("Be brief.", [-0.5, -0.5, -0.75, -0.25], top=top_tokens(-0.5), of_policy_top=top_tokens(-0.5).logprobs)
    given = Verdict(**{"score": 1.0, "source": Source.LLM, "hints": (hint,), **verdict})
    assert book.change(verdicts.record, number, given, SampleKind.OPD_RL, "", 0)
    turn = book.read(number)
    book.close()
    return turn


@pytest.mark.parametrize("name", METHODS)
def test_a_forced_token_has_no_advantage_and_the_others_have_theirs(name: str, tmp_path: Path) -> None:
    method = a_method(name, topk_k=K)
    (constrained,), (free,) = (
        to_sequences([judged(tmp_path / case, forced)], method)[0].spans
        for case, forced in (("constrained", FORCED), ("free", []))
    )
    assert all(free.advantages)
    assert constrained.advantages == [0.0 if forced else x for x, forced in zip(free.advantages, FORCED, strict=True)]
    assert (constrained.alternatives is not None) == (name == "topk-select")
    if constrained.alternatives is not None and free.alternatives is not None:
        assert free.alternatives.advantages.all()
        assert not constrained.alternatives.advantages[FORCED].any()
        kept = ~np.array(FORCED)
        assert (constrained.alternatives.advantages[kept] == free.alternatives.advantages[kept]).all()


@pytest.mark.parametrize("name", METHODS)
def test_measured_from_the_batch_a_forced_token_still_has_none(name: str, tmp_path: Path) -> None:
    method = a_method(name, topk_k=K, baseline="batch")
    turn = judged(tmp_path / "a", FORCED)
    other = judged(tmp_path / "b", [], score=-1.0)
    lesson = method.lesson(turn, method.baseline([turn, other]))
    assert [x for x, forced in zip(lesson.advantages, FORCED, strict=True) if forced] == [0.0, 0.0]
    if lesson.alternatives is not None:
        assert not lesson.alternatives.advantages[FORCED].any()


@pytest.mark.parametrize("name", METHODS)
def test_an_answer_that_was_forced_as_a_whole_is_not_trained_on(name: str, tmp_path: Path) -> None:
    with pytest.raises(NoSignal, match=r"constraint|zero"):
        a_method(name, topk_k=K).lesson(judged(tmp_path, [True] * 4))
