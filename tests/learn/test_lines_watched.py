"""A gate, a guard, a rollback and a quarantine are about one line, and the others go on."""

import math
from pathlib import Path
from typing import Any

import pytest

from openclaw_rl.engines.base import StepRefused
from openclaw_rl.learn import build
from openclaw_rl.learn.build import GuardWatch
from openclaw_rl.learn.checkpoints import line_folder
from openclaw_rl.learn.guard import FILE as GUARD_FILE
from openclaw_rl.learn.lineage import Budget
from openclaw_rl.rendering.chat import ChatRenderer
from openclaw_rl.types import State
from support.team_run import TeamRun


async def test_a_rollback_is_about_one_line(team: TeamRun) -> None:
    await team.start()
    anna, ben = team.judged("anna"), team.judged("ben")
    await team.trained(*anna, *ben)
    await (await team.lines.open("anna")).roll_back(None)
    assert (team.served("anna"), team.served("ben")) == ([], [ben])
    assert (team.steps("anna"), team.steps("ben")) == ([], [ben])
    later = team.judged("anna")
    await team.trained(*later)
    assert team.served("anna") == [later]


async def test_a_refused_batch_is_quarantined_in_its_line_and_others_go_on(team: TeamRun) -> None:
    await team.start()
    learner = team.learner.for_line("anna")

    def refuse(_sequences: Any) -> None:
        raise StepRefused("the loss is not finite")

    learner.hooks["step"] = refuse
    team.judged("anna")
    ben = team.judged("ben")
    await team.trained(*ben)
    await team.until(lambda: ("anna", "quarantined") in team.book.rows("SELECT line, outcome FROM updates"))


async def test_the_gate_keeps_a_policy_of_one_line_from_serving(team: TeamRun, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []

    class OfLine:
        margin = 0.1

        def __init__(self, _items: Any, _margin: float, sampler: Any, _renderer: Any) -> None:
            self.line = sampler.line

        async def examine(self, version: int) -> float:
            asked.append((self.line, version))
            return 0.0 if self.line == "anna" and version else 1.0

    monkeypatch.setattr(build, "Gate", OfLine)
    monkeypatch.setattr(build, "read_items", lambda _path: [])
    team.options["gate"] = Path("gate.jsonl")
    await team.start()
    team.judged("anna")
    ben = team.judged("ben")
    await team.trained(*ben)
    await team.until(lambda: ("anna", "quarantined") in team.book.rows("SELECT line, outcome FROM updates"))
    assert (team.served("anna"), team.served("ben")) == ([], [ben])
    assert {line for line, _ in asked} == {"anna", "ben"}


async def test_the_guard_takes_back_the_policy_of_one_line(
    team: TeamRun, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "GuardWatch", lambda registry: GuardWatch(registry, Budget(math.inf)))
    team.options["guard"] = True
    team.renderer = ChatRenderer(tiny_model)
    await team.start()
    good = {owner: team.judged(owner) for owner in ("anna", "ben")}
    await team.trained(*good["anna"], *good["ben"])
    bad = team.judged("anna")
    team.bad |= set(bad)
    await team.until(lambda: {team.book.state(turn) for turn in bad} == {State.DROPPED})
    await team.until(lambda: team.served("anna") == [good["anna"]])
    assert (team.steps("anna"), team.served("ben")) == ([good["anna"]], [good["ben"]])
    anna, ben = (team.lines.loops[owner].guard for owner in ("anna", "ben"))
    await team.until(lambda: anna.is_cautious)
    assert not ben.is_cautious
    assert (line_folder(team.folder, "anna") / GUARD_FILE).is_file()
    later = team.judged("ben")
    await team.trained(*later)


@pytest.mark.more
async def test_a_guard_that_leaves_a_line_blames_no_step_of_the_shared_one(
    team: TeamRun, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Later(Budget):
        is_due = False

    budget = Later(0.05)
    monkeypatch.setattr(build, "GuardWatch", lambda registry: GuardWatch(registry, budget))
    team.options["guard"] = True
    team.renderer = ChatRenderer(tiny_model)
    await team.start()
    imported = team.judged("imported")
    await team.trained(*imported)
    bad = team.judged("anna")
    team.bad |= set(bad)
    await team.trained(*bad)
    monkeypatch.setattr(Later, "is_due", True)
    await team.until(lambda: team.lines.loops["anna"].guard.is_cautious)
    assert team.served("anna") == [imported], "anna has the policy again that her line began from"
    assert team.book.rows("SELECT outcome, reason FROM updates WHERE line = 'shared'") == [("applied", "")]
    assert {team.book.state(turn) for turn in bad} == {State.DROPPED}
