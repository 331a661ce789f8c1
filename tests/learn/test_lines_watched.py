"""A gate, a guard, a rollback and a quarantine are about one line, and the others go on."""

import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from openclaw_rl.engines.base import StepRefused
from openclaw_rl.learn import build
from openclaw_rl.learn.build import GuardWatch
from openclaw_rl.learn.checkpoints import RECORD, Checkpoints, line_folder, write_new_record
from openclaw_rl.learn.guard import FILE as GUARD_FILE
from openclaw_rl.learn.lineage import Budget
from openclaw_rl.learn.merging import NotMerged, merge_into
from openclaw_rl.ledger import deletion, training
from openclaw_rl.rendering.chat import ChatRenderer
from openclaw_rl.types import SHARED, State
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


async def average_of_lines(team: TeamRun) -> tuple[Path, list[list[int]]]:
    """What stands for an average of anna's and ben's lines: anna's policy. And her steps."""
    await team.start()
    imported = team.judged("imported")
    await team.trained(*imported)
    turns = {owner: team.judged(owner, session=owner) for owner in ("anna", "ben")}
    await team.trained(*turns["anna"], *turns["ben"])
    await team.lines.finish()
    await team.stop_learning()
    await team.start()
    for owner in turns:
        await team.lines.serve(owner)
    saved = {owner: Checkpoints.of_run(line_folder(team.folder, owner), 1).latest() for owner in turns}
    folder = team.folder.parent / "average"
    shutil.copytree(saved["anna"].folder, folder, ignore=lambda *_: {RECORD})
    write_new_record(folder, [one.version for one in saved.values()])
    return folder, [imported, turns["anna"]]


@pytest.mark.more
async def test_what_lines_have_in_common_is_merged_into_the_shared_line_and_can_be_forgotten(team: TeamRun) -> None:
    team.options["save_interval"] = 1
    average, learned = await average_of_lines(team)
    before = team.lines.shared.version
    version = await merge_into(team.lines.shared, average)
    assert team.served(SHARED) == learned == team.served("carl"), "everybody without a line is served by it"
    assert team.sampler.newest_of(SHARED) == version
    later = team.judged("imported")
    await team.trained(*later)
    assert team.served(SHARED) == [*learned, later]
    await team.kill()
    await team.start()
    assert team.served(SHARED) == [*learned, later], "a restart continues from it"

    # What ben taught is in the shared line now, and the ledger knows it.
    (session,) = {row for (row,) in team.book.rows("SELECT number FROM sessions WHERE owner = 'ben'")}
    team.book.change(deletion.delete_sessions, [session])
    assert version in team.book.ledger.read(training.versions_with_deleted_turns, SHARED)
    assert before not in team.book.ledger.read(training.versions_with_deleted_turns, SHARED)
    with pytest.raises(NotMerged, match="deleted since"):
        await merge_into(team.lines.shared, average)
    await team.lines.retrain()
    assert team.served(SHARED)[:1] == learned[:1]
    assert learned[1] not in team.served(SHARED)


@pytest.mark.more
@pytest.mark.parametrize("refuses", ["gate", "guard"])
async def test_an_average_that_the_gate_or_the_guard_refuses_changes_nothing(
    team: TeamRun, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, refuses: str
) -> None:
    team.renderer = ChatRenderer(tiny_model)
    team.options["guard"] = refuses == "guard"
    average, learned = await average_of_lines(team)
    if refuses == "guard":
        team.bad |= set(learned[1])
    else:
        monkeypatch.setattr(team.lines.shared.steps, "gate", LosingGate(team.sampler.newest_of(SHARED)))
    served, files = team.served(SHARED), sorted((team.folder / "checkpoints").iterdir())
    with pytest.raises(NotMerged, match=refuses if refuses == "gate" else "worse"):
        await merge_into(team.lines.shared, average)
    assert team.served(SHARED) == served == learned[:1]
    assert sorted((team.folder / "checkpoints").iterdir()) == files


class LosingGate:
    """Passes one version alone."""

    margin = 0.0

    def __init__(self, good: int) -> None:
        self.good = good

    async def examine(self, version: int) -> float:
        return float(version == self.good)
