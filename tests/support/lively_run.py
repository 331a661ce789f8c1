"""A run that looks like one that people use: conversations, verdicts, steps, evaluations and environments."""

import base64
import math
from typing import Any

from openclaw_rl.dashboard.evaluations import Evaluation, record_evaluations
from openclaw_rl.ledger import sessions, training, verdicts
from openclaw_rl.ledger.screenshot_folders import FOLDER as SCREENSHOTS
from openclaw_rl.ledger.turns import load_turn, set_next_state
from openclaw_rl.types import EpisodeResult, Hint, NextStep, Question, SampleKind, Source, State, Verdict, Vote
from support.judged_run import a_report
from support.live_page import LivePage
from support.practice import CanPractise

#: The smallest picture, and the episode that it is of.
PICTURE = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
LOOKED = "browser-shop-1"
#: What was asked and answered, what came next, and its score; None: nothing came next yet.
CONVERSATIONS: dict[str, list[tuple[str, str, float | None]]] = {
    "kitchen": [
        (
            "How long do I boil an egg?",
            "It depends on how you like it. For a soft yolk you should boil the egg for about six minutes, for a firm "
            "one about nine or ten minutes, counted from the moment the water boils.",
            -1.0,
        ),
        ("Shorter, please. Only the minutes.", "Soft: 6. Firm: 10.", 1.0),
        ("And for quail eggs?", "Soft: 2. Firm: 4.", None),
    ],
    "travel": [
        ("Which train goes from Bern to Milan?", "The EuroCity, every two hours, via Brig and Domodossola.", 1.0),
        ("Does it have a restaurant car?", "Yes, most of them have one.", 0.0),
        ("And how do I take a bicycle along?", "Buy a bicycle ticket and reserve a place.", None),
    ],
    "homework": [
        ("Explain photosynthesis in one sentence.", "Plants turn light, water and CO₂ into sugar and oxygen.", 1.0),
        ("Now in Hebrew: מה זה פוטוסינתזה?", "צמחים הופכים אור, מים ופחמן דו-חמצני לסוכר ולחמצן.", None),
    ],
    "code": [
        (
            "Write a function that reverses a list.",
            "def reverse(items):\n    return items[::-1]",
            1.0,
        ),
        ("Without slicing.", "def reverse(items):\n    return list(reversed(items))", None),
    ],
}


class HalfWay(CanPractise):
    """Judging is on, and the next step has some of its turns."""

    def judge(self) -> str:
        return "on"

    def learner(self) -> str:
        return "3 of the 8 judged turns that a step needs (--batch-size)"

    def next_step(self) -> NextStep | None:
        return NextStep(13, 3, 8)


def fill_page(page: LivePage, owner: str = "anyone") -> dict[str, int]:
    """Record conversations, judge them, train steps on them, and run two groups of episodes; turns by session."""
    last: dict[str, int] = {}
    for session, turns in CONVERSATIONS.items():
        messages: list[dict[str, Any]] = []
        for place, (question, answer, score) in enumerate(turns):
            messages.append({"role": "user", "content": question})
            messages.append(page.say(answer, messages, {"X-Session-Id": session}))
            last[session] = page.turns()[-1].number
            if score is not None:
                change(page, set_next_state, last[session], [{"role": "user", "content": turns[place + 1][0]}])
                judge(page, last[session], score)
    for step in range(1, 13):
        train(page, step)
    for group in ("towers-of-hanoi-3", "grid-5"):
        for attempt, reward in enumerate((1.0, 0.0, 0.25, 1.0)):
            run_episode(page, f"{group}/{attempt}", group, reward)
    measured = [Evaluation(version, "brief", 2 + 3 * version, 40) for version in range(0, 13, 4)]
    record_evaluations(page.folder, measured)
    keep_screenshots(page, LOOKED, "000.png", "001.png")
    # The conversations are the latest.
    change(page, lambda db: db.execute("UPDATE sessions SET last = last + 60 WHERE number <= ?", (len(CONVERSATIONS),)))
    return last


def keep_screenshots(page: LivePage, folder: str, *names: str) -> None:
    """As the browser environment does."""
    (page.folder / SCREENSHOTS / folder).mkdir(parents=True)
    for name in names:
        (page.folder / SCREENSHOTS / folder / name).write_bytes(PICTURE)


def change(page: LivePage, made: Any, *arguments: Any) -> Any:
    return page.ledger.submit(made, *arguments).result(60)


def judge(page: LivePage, turn: int, score: float) -> None:
    count = len(page.ledger.read(load_turn, turn).response_ids)
    hints = ()
    if score < 0:
        logprobs = [-0.2 if place < count / 3 else -2.5 for place in range(count)]
        hints = (Hint("Answer with the numbers only, in a few words.", logprobs),)
    vote = Vote(
        Question.SCORE, score, text="The next message asks for a shorter answer." if score < 0 else "It thanks."
    )
    verdict = Verdict(score, Source.LLM, hints, (vote, vote, vote), seconds=0.4)
    sample = SampleKind.OPD_RL if hints else SampleKind.RL if score else None
    change(page, verdicts.record, turn, verdict, sample, "" if sample else "the judge abstained: neutral", 0)


def train(page: LivePage, step: int) -> None:
    """A step that used the turns that are judged by now, and numbers that look like learning."""
    turns = [turn.number for turn in page.turns() if turn.state is State.JUDGED][:2] if step == 12 else []
    for turn in turns:
        change(page, sessions.move, turn, State.BATCHED)
    wave = math.sin(step)
    report = a_report(
        step,
        reward=min(0.9, -0.5 + 0.12 * step + 0.05 * wave),
        loss=0.6 / step + 0.02 * wave,
        kl_old=0.004 + 0.001 * wave,
        kl_base=0.004 * step,
        clip_fraction=0.05 + 0.01 * wave,
        grad_norm=1.2 / math.sqrt(step),
        logprob_gaps={"logprob_gap": 0.004 + 0.0005 * wave},
    )
    change(page, training.apply_step, step, step, turns, report.as_json())


def run_episode(page: LivePage, session: str, group: str, reward: float) -> None:
    page.say(
        "move(1, 3)",
        [{"role": "user", "content": f"Task {group}: solve it."}],
        {"X-Session-Id": session, "X-Episode": "1"},
    )
    result = EpisodeResult(reward=reward, task=group, group=group, group_size=4, solved=reward == 1.0)
    page.send(
        f"sessions/{session}/reward",
        {"reward": result.reward, "task": group, "group": group, "group_size": 4, "solved": result.solved},
    )
