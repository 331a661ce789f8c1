"""Five conversations with the embedded model, through the real server, judged as a person would judge them."""

import sys
from pathlib import Path

import pytest

from openclaw_rl.types import SampleKind, State
from support.harness import wait_for
from support.records import stored_turns
from support.server_program import Program, serving

QUESTION = "What is the planet Mercury made of?"

#: What the user says next; the score, what the hint says (None: there is none), and what the turn is good for.
CONVERSATIONS = {
    "thanks": ("Thanks, that is exactly what I wanted to know!", 1.0, None, SampleKind.RL),
    "shorter": (
        "That is too long. Please answer in one short sentence.",
        -1.0,
        "one short sentence",
        SampleKind.OPD_RL,
    ),
    "meant": ("No, I meant the metal mercury, not the planet.", -1.0, "the metal mercury", SampleKind.OPD_RL),
    "again": (QUESTION, -1.0, None, SampleKind.RL),
    "goes-on": ("How far away from here is it, by the way?", None, None, None),
}


def converse(program: Program, session: str, reply: str) -> None:
    """One answer, and what the user says to it."""
    asked = [{"role": "user", "content": QUESTION}]
    settings = {"model": "smollm2-135m", "max_tokens": 24, "extra_headers": {"X-Session-Id": session}}
    answer = program.client.chat.completions.create(messages=asked, **settings)
    said = {"role": "assistant", "content": answer.choices[0].message.content}
    program.client.chat.completions.create(messages=[*asked, said, {"role": "user", "content": reply}], **settings)


@pytest.mark.more
def test_five_conversations_end_with_the_verdicts_a_person_would_expect(tmp_path: Path) -> None:
    flags = ("--run-dir", str(tmp_path), "--max-steps", "0")
    with serving([sys.executable, "run.py"], None, *flags) as program:
        for session, (reply, *_) in CONVERSATIONS.items():
            converse(program, session, reply)
        wait_for(lambda: sum(turn.verdict is not None for turn in stored_turns(tmp_path)) == len(CONVERSATIONS))
        assert "too small to judge" in " ".join(program.log.split())
    judged = {turn.session.id: turn for turn in stored_turns(tmp_path) if turn.verdict is not None}
    for session, (_reply, score, hint, sample) in CONVERSATIONS.items():
        turn = judged[session]
        assert turn.verdict is not None
        assert (turn.verdict.score, turn.sample) == (score, sample), session
        assert turn.state is (State.JUDGED if sample else State.DROPPED), session
        if hint is None:
            assert not turn.verdict.hints, session
        else:
            assert hint in turn.verdict.hints[0].text
            assert len(turn.verdict.hints[0].logprobs) == len(turn.response_ids)
            assert turn.verdict.hints[0].logprobs != pytest.approx(turn.logprobs), "the hint makes a difference"
