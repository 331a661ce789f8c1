"""What people's lines have in common is taken into the shared line, which nothing that happens meanwhile spoils."""

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from openclaw_rl.engines.base import EngineUnavailable
from openclaw_rl.learn.checkpoints import RECORD, Checkpoints, line_folder, write_new_record
from openclaw_rl.learn.merging import NotMerged, merge_into
from openclaw_rl.ledger import deletion, training
from openclaw_rl.rendering.chat import ChatRenderer
from openclaw_rl.types import SHARED, State
from support.team_run import SECONDS, TeamRun


class ActingGate:
    """Passes every policy, and does something while it examines one other than those that serve at first."""

    margin = 0.0

    def __init__(self, team: TeamRun, act: Callable[[], Awaitable[Any]]) -> None:
        self.served = team.sampler.newest_of(SHARED)
        self.act = act

    async def examine(self, version: int) -> float:
        if version != self.served:
            async with asyncio.timeout(SECONDS):
                await self.act()
        return 1.0


async def merge(team: TeamRun, average: Path, *, is_gone: bool = False) -> int:
    async def gone() -> bool:
        return is_gone

    return await merge_into(team.lines, average, gone)


def forget(team: TeamRun, owner: str) -> None:
    (session,) = {row for (row,) in team.book.rows(f"SELECT number FROM sessions WHERE owner = '{owner}'")}
    team.book.change(deletion.delete_sessions, [session])


def shared_files(team: TeamRun) -> list[Path]:
    return sorted((team.folder / "checkpoints").iterdir())


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
    versions = [one.version for one in saved.values()]
    write_new_record(folder, versions, team.book.ledger.read(training.last_step_at, versions))
    return folder, [imported, turns["anna"]]


@pytest.mark.more
async def test_what_lines_have_in_common_is_merged_into_the_shared_line_and_can_be_forgotten(team: TeamRun) -> None:
    team.options["save_interval"] = 1
    average, learned = await average_of_lines(team)
    before = team.lines.shared.version
    version = await merge(team, average)
    assert team.served(SHARED) == learned == team.served("carl"), "everybody without a line is served by it"
    assert team.sampler.newest_of(SHARED) == version
    later = team.judged("imported")
    await team.trained(*later)
    assert team.served(SHARED) == [*learned, later]
    await team.kill()
    await team.start()
    assert team.served(SHARED) == [*learned, later], "a restart continues from it"

    # What ben taught is in the shared line now, and the ledger knows it.
    forget(team, "ben")
    assert version in team.book.ledger.read(training.versions_with_deleted_turns, SHARED)
    assert before not in team.book.ledger.read(training.versions_with_deleted_turns, SHARED)
    with pytest.raises(NotMerged, match="deleted since"):
        await merge(team, average)
    await team.lines.retrain()
    assert team.served(SHARED)[:1] == learned[:1]
    assert learned[1] not in team.served(SHARED)


async def test_steps_that_the_average_does_not_hold_are_made_again_after_it(team: TeamRun) -> None:
    team.options["save_interval"] = 1
    average, learned = await average_of_lines(team)
    imported, late = learned[0], team.judged("imported")
    await team.trained(*late)
    assert team.served(SHARED) == [imported, late]
    await team.stop_learning()
    version = await merge(team, average)
    assert team.served(SHARED) == learned
    assert team.steps(SHARED) == [imported], "what the policy that serves does not hold does not count"
    assert {team.book.state(turn) for turn in late} == {State.JUDGED}
    await team.kill()
    await team.start(learning=False)
    assert team.served(SHARED) == learned
    assert {team.book.state(turn) for turn in late} == {State.JUDGED}, "a restart finds the same"
    assert version not in team.book.ledger.read(training.versions_with, late)
    team.learn()
    await team.trained(*late)
    assert team.served(SHARED) == [*learned, late]
    assert team.steps(SHARED) == [imported, late]
    # What served before the merge counts again with it.
    before = next(one for one in team.lines.shared.line.checkpoints.all() if len(one.batches) == 1 and one.step == 2)
    await team.lines.shared.roll_back(before)
    assert team.served(SHARED) == team.steps(SHARED) == [imported, late]


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
    served, files = team.served(SHARED), shared_files(team)
    with pytest.raises(NotMerged, match=refuses if refuses == "gate" else "worse"):
        await merge(team, average)
    assert team.served(SHARED) == served == learned[:1]
    assert shared_files(team) == files


class LosingGate:
    """Passes one version alone."""

    margin = 0.0

    def __init__(self, good: int) -> None:
        self.good = good

    async def examine(self, version: int) -> float:
        return float(version == self.good)


@pytest.mark.parametrize("what", ["forget", "drop", "retrain", "roll back", "stop", "another"])
async def test_what_happens_during_the_examination_does_not_wait_for_it_and_refuses_the_average(
    team: TeamRun, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    average, learned = await average_of_lines(team)
    others: list[asyncio.Task[Any]] = []

    async def act() -> None:
        if others:
            return
        if what in ("forget", "retrain"):
            forget(team, "ben")
        happens = {
            "forget": lambda: team.lines.drop("ben"),
            "drop": lambda: team.lines.drop("ben"),
            "retrain": lambda: team.lines.retrain(),
            "roll back": lambda: team.lines.shared.roll_back(None),
            "stop": lambda: team.lines.finish(),
            "another": lambda: merge(team, average),
        }[what]
        others.append(asyncio.create_task(happens()))
        await asyncio.wait(others)

    monkeypatch.setattr(team.lines.shared.steps, "gate", ActingGate(team, act))
    with pytest.raises(NotMerged, match="deleted since" if what in ("forget", "drop") else "was stopped"):
        await merge(team, average)
    async with asyncio.timeout(SECONDS):
        await asyncio.gather(*others)
    served = {"roll back": [], "another": learned}.get(what, learned[:1])
    assert team.served(SHARED) == served
    assert team.sampler.newest_of(SHARED) not in team.book.ledger.read(training.versions_with_deleted_turns)
    await team.kill()
    await team.start()
    assert team.served(SHARED) == served, "a restart continues from the same"


async def test_retraining_after_turns_were_forgotten_while_the_average_is_saved_takes_it_back(
    team: TeamRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    average, learned = await average_of_lines(team)
    line, others = team.lines.shared.line, []
    load = line.learner.load

    async def load_late(folder: Path) -> None:
        if not others:
            forget(team, "ben")
            others.append(asyncio.create_task(team.lines.shared.retrain()))
            # It waits for the end of the merge.
            await asyncio.wait(others, timeout=0.01)
        await load(folder)

    monkeypatch.setattr(line.learner, "load", load_late)
    await merge(team, average)
    await asyncio.gather(*others)
    assert team.served(SHARED) == learned[:1]
    assert team.sampler.newest_of(SHARED) == line.version
    tainted = team.book.ledger.read(training.versions_with_deleted_turns)
    assert not {one for saved in line.checkpoints.states() for one in saved.versions} & tainted


async def test_other_lines_learn_during_the_examination_and_the_shared_one_after_it(
    team: TeamRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    average, learned = await average_of_lines(team)
    shared, late = team.lines.shared, []
    save = shared.line.checkpoints.save

    async def act() -> None:
        if not late:
            late.append(team.judged("imported"))
            await team.trained(*team.judged("anna"))

    async def save_late(*given: Any, **options: Any) -> Any:
        if len(late) == 1:
            late.append(team.judged("imported"))
            assert not await shared.take_turn()
        return await save(*given, **options)

    monkeypatch.setattr(shared.steps, "gate", ActingGate(team, act))
    monkeypatch.setattr(shared.line.checkpoints, "save", save_late)
    await merge(team, average)
    await team.trained(*late[0], *late[1])
    assert team.served(SHARED) == [*learned, *late]
    assert team.steps(SHARED) == [learned[0], *late]


async def test_an_average_that_cannot_be_loaded_leaves_nothing(team: TeamRun, monkeypatch: pytest.MonkeyPatch) -> None:
    team.options["keep_checkpoints"] = 1
    average, learned = await average_of_lines(team)

    async def no(_folder: Path) -> None:
        raise EngineUnavailable("it has another rank")

    files = shared_files(team)
    with monkeypatch.context() as patched:
        patched.setattr(team.lines.shared.line.learner, "load", no)
        with pytest.raises(EngineUnavailable):
            await merge(team, average)
    assert team.served(SHARED) == learned[:1]
    assert shared_files(team) == files
    await team.kill()
    await team.start()
    assert team.served(SHARED) == learned[:1]
    later = team.judged("imported")
    await team.trained(*later)
    assert team.served(SHARED) == [learned[0], later]


async def test_an_average_of_another_run_is_refused(team: TeamRun, tmp_path: Path) -> None:
    other = TeamRun(tmp_path / "another" / "run")
    theirs, _ = await average_of_lines(other)
    await other.kill()
    other.book.close()
    _, learned = await average_of_lines(team)
    with pytest.raises(NotMerged, match="another run"):
        await merge(team, theirs)
    assert team.served(SHARED) == learned[:1]


async def test_nothing_is_merged_for_a_client_that_is_gone(team: TeamRun) -> None:
    average, learned = await average_of_lines(team)
    files = shared_files(team)
    with pytest.raises(NotMerged, match="nobody waits"):
        await merge(team, average, is_gone=True)
    assert team.served(SHARED) == learned[:1]
    assert shared_files(team) == files
