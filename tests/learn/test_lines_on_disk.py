"""What lines have on disk: killed at any moment they resume exactly, and one that is dropped is gone alone."""

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from openclaw_rl.engines.base import StepRefused
from openclaw_rl.learn.build import ServedLines, serve_learned
from openclaw_rl.learn.checkpoints import Checkpoints, line_folder, lines_on_disk
from openclaw_rl.learn.options import TrainingOptions
from openclaw_rl.learn.step import Phase
from openclaw_rl.ledger import deletion, training
from openclaw_rl.types import SHARED, State
from support.learning_run import forever
from support.team_run import SamplerOfLines, TeamRun


@pytest.mark.parametrize("most", [1, 2, 6])
async def test_no_turn_is_ever_in_a_step_of_another_line(tmp_path: Path, most: int) -> None:
    """Also when lines make room for each other, and the server is killed at any moment."""
    dice = random.Random(most)
    owners = ["anna", "ben", "carl", "imported"]
    # Whatever the order of the steps is, none of the turns is too old for its step.
    team = TeamRun(tmp_path / "run", most, max_staleness=1000)
    own: dict[str, list[int]] = {owner: [] for owner in owners}
    try:
        for _ in range(4):
            await team.start()
            for _ in range(6):
                owner = dice.choice(owners)
                own[owner] += team.judged(owner, dice.choice([1, 2, 4]))
                await asyncio.sleep(dice.choice([0, 0.01, 0.05]))
            held = sum(loop.phase is not Phase.UNPREPARED for loop in team.loops())
            assert held <= most
            await team.kill()
        await team.start()
        full = [turn for turns in own.values() for turn in turns[: len(turns) // 2 * 2]]
        await team.trained(*full)
        for owner in owners:
            line = SHARED if owner == "imported" else owner
            steps = team.steps(line)
            flat = [turn for step in steps for turn in step]
            assert len(set(flat)) == len(flat)
            assert set(flat) <= set(own[owner])
            await team.lines.serve(line)
            policy = team.served(line)
            assert policy[len(policy) - len(steps) :] == steps
    finally:
        await team.kill()
        team.book.close()


@pytest.mark.parametrize("is_asked", [True, False])
async def test_killed_in_a_step_of_one_line_all_lines_resume_exactly(team: TeamRun, is_asked: bool) -> None:
    await team.start()
    first = {owner: team.judged(owner) for owner in ("anna", "ben")}
    await team.trained(*first["anna"], *first["ben"])
    reached = asyncio.Event()

    def hang(_sequences: Any) -> Any:
        reached.set()
        return forever()

    team.learner.lines["anna"].hooks["step"] = hang
    second = {"anna": team.judged("anna")}
    await reached.wait()
    second["ben"] = team.judged("ben")
    await team.kill()
    assert lines_on_disk(team.folder) == ["anna", "ben"]
    await team.start(learning=False)
    for owner in ("anna", "ben") if is_asked else ():
        await team.lines.serve(owner)
        assert team.served(owner) == [first[owner]], "what served last serves again at once"
    team.learn()
    await team.trained(*second["anna"], *second["ben"])
    for owner in ("anna", "ben"):
        assert team.served(owner) == [first[owner], second[owner]] == team.steps(owner)


async def test_a_line_that_is_dropped_is_gone_and_others_are_as_they_were(team: TeamRun) -> None:
    await team.start()
    anna, ben = team.judged("anna"), team.judged("ben")
    await team.trained(*anna, *ben)
    await team.lines.finish()
    before = {path: path.read_bytes() for path in line_folder(team.folder, "anna").rglob("*") if path.is_file()}
    assert before
    assert await team.lines.drop("ben")
    assert not line_folder(team.folder, "ben").exists()
    assert team.sampler.versions_of("ben") == []
    assert team.sampler.newest_of("ben") == 0
    assert {path: path.read_bytes() for path in before} == before
    assert team.steps("ben") == []
    for nobody in ("ben", "", ".", "..", "../anna", SHARED):
        assert not await team.lines.drop(nobody)
    assert {path: path.read_bytes() for path in before} == before


async def test_a_line_that_is_being_trained_can_be_dropped(team: TeamRun) -> None:
    await team.start()
    ready = asyncio.Event()
    learner = team.learner.for_line("ben")

    async def hang() -> None:
        ready.set()
        await learner.stopped.wait()
        raise StepRefused("stopped")

    learner.hooks["step"] = lambda _sequences: hang()
    team.judged("ben")
    await ready.wait()
    assert await team.lines.drop("ben")
    assert not line_folder(team.folder, "ben").exists()
    learner.hooks.clear()
    anna = team.judged("anna")
    await team.trained(*anna)


async def test_each_line_learns_again_without_what_was_deleted_from_it(tmp_path: Path) -> None:
    team = TeamRun(tmp_path / "run", save_interval=1)
    try:
        await team.start()
        kept = team.judged("imported", session="kept")
        await team.trained(*kept)
        deleted = team.judged("imported", session="deleted")
        await team.trained(*deleted)
        anna = team.judged("anna", session="anna")
        await team.trained(*anna)
        await team.stop_learning()
        # A sampler forgets versions that serve nobody.
        team.sampler.policies.pop(1)
        sessions = {
            row for (row,) in team.book.rows(f"SELECT session FROM turns WHERE number IN ({deleted[0]}, {anna[0]})")
        }
        team.book.change(deletion.delete_sessions, sorted(sessions))
        await team.lines.retrain()
        assert team.served(SHARED) == [kept]
        assert team.served("anna") == []
    finally:
        await team.kill()
        team.book.close()


async def test_killed_while_a_line_is_dropped_its_old_turns_are_not_learned_again(
    team: TeamRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    await team.start()
    old = team.judged("ben")
    await team.trained(*old)
    await team.lines.finish()
    write = team.book.ledger.write

    async def killed(change: Any, *given: Any, **named: Any) -> Any:
        if change is training.follow:
            raise asyncio.CancelledError
        return await write(change, *given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(team.book.ledger, "write", killed)
        with pytest.raises(asyncio.CancelledError):
            await team.lines.drop("ben")
    await team.kill()
    await team.start()
    new = team.judged("ben")
    await team.trained(*new)
    assert team.served("ben") == [old, new], "the line was not deleted: whoever asked for it asks again"
    assert team.learner.order == ["ben"]


async def test_a_policy_that_serves_since_a_restart_keeps_its_files(team: TeamRun) -> None:
    team.options["save_interval"] = 100
    await team.start()
    anna = team.judged("anna")
    await team.trained(*anna)
    await team.lines.loops["anna"].park()
    await team.kill()
    assert list(line_folder(team.folder, "anna").glob("recovery/*"))
    await team.start(learning=False)
    await team.lines.serve("anna")
    loop = team.lines.loops["anna"]
    await loop.prepare()
    # It writes a checkpoint, which replaces the state for recovery.
    assert await loop.save()
    assert team.served("anna") == [anna]
    assert team.sampler.folders[team.sampler.newest_of("anna")].is_dir()


async def test_a_line_that_is_dropped_while_another_makes_room_for_it_is_not_begun(team: TeamRun) -> None:
    team.most = 1
    await team.start()
    saving, saved = asyncio.Event(), asyncio.Event()
    hooks = team.learner.for_line(SHARED).hooks

    def full(_folder: Path) -> None:
        raise OSError("the disk is full")

    async def slowly() -> None:
        saving.set()
        await saved.wait()

    hooks["save_recovery"] = full
    imported = team.judged("imported")
    await team.trained(*imported)
    hooks["save_recovery"] = lambda _folder: slowly()
    ben = team.judged("ben")
    await saving.wait()
    dropping = asyncio.create_task(team.lines.drop("ben"))
    await asyncio.sleep(0.01)
    saved.set()
    assert await dropping
    await team.trained(*ben)
    assert team.served("ben") == [imported, ben], "his line begins anew"
    assert team.book.rows("SELECT count(*) FROM policies WHERE line = 'ben'") == [(2,)]


async def test_at_the_start_only_lines_with_lost_steps_are_opened(team: TeamRun) -> None:
    """There may be thousands of others, whose files need not be read before somebody asks for them."""
    await team.start()
    turns = {owner: team.judged(owner) for owner in ("anna", "ben")}
    await team.trained(*turns["anna"], *turns["ben"])
    await team.lines.loops["anna"].park()
    team.learner.lines["ben"].hooks["save_recovery"] = lambda _folder: forever()
    lost = team.judged("ben")
    await team.until(lambda: team.book.state(lost[0]) is State.APPLIED)
    await team.kill()
    await team.start()
    await team.until(lambda: team.learner.order == ["ben"])
    assert list(team.lines.loops) == [SHARED, "ben"]
    await team.trained(*lost)
    assert team.served("ben") == [turns["ben"], lost]
    await team.lines.serve("anna")
    assert team.served("anna") == [turns["anna"]]


def test_names_that_differ_only_in_case_have_folders_that_differ_in_more(tmp_path: Path) -> None:
    names = ["anna", "Anna", "ANNA", "%41nna", "anna.", "../anna", "Änna", "änna", "a-b_c", "a b"]
    folders = [line_folder(tmp_path, name) for name in names]
    assert len({str(folder).casefold() for folder in folders}) == len(names)
    for folder in folders:
        folder.mkdir(parents=True)
    assert lines_on_disk(tmp_path) == sorted(names)


async def test_a_server_that_does_not_learn_reads_a_line_when_somebody_asks(team: TeamRun) -> None:
    await team.start()
    turns = {owner: team.judged(owner) for owner in ("anna", "ben")}
    await team.trained(*turns["anna"], *turns["ben"])
    await team.stop_learning()
    sampler = SamplerOfLines()
    lines = ServedLines(TrainingOptions(), team.folder, team.folder, sampler)
    assert (lines.names, sampler.policies) == ([SHARED, "anna", "ben"], {})
    await asyncio.gather(*(lines.serve(name) for name in ("anna", "anna", "nobody")))
    assert [line for line, _ in sampler.policies.values()] == ["anna"]
    assert list(sampler.policies.values()) == [("anna", [turns["anna"]])]


async def test_what_another_run_learned_has_no_number_of_a_line_of_this_one(team: TeamRun, tmp_path: Path) -> None:
    """On a server that does not learn, which serves it as the shared line."""
    other = TeamRun(tmp_path / "other", save_interval=1)
    learned = {}
    for run, owner in ((other, "imported"), (team, "anna")):
        await run.start()
        learned[owner] = run.judged(owner)
        await run.trained(*learned[owner])
        await run.stop_learning()
    other.book.close()
    foreign = Checkpoints.of_run(other.folder, 1).latest()
    assert foreign is not None
    assert foreign.version == team.sampler.newest_of("anna") == 1
    options, sampler = TrainingOptions(resume_from_ckpt=str(foreign.folder)), SamplerOfLines()
    lines = ServedLines(options, team.folder, team.folder, sampler)
    await serve_learned(options, team.folder, team.folder, sampler)
    await lines.serve("anna")
    served = {line: sampler.policies[sampler.newest_of(line)][1] for line in (SHARED, "anna")}
    assert served == {SHARED: [learned["imported"]], "anna": [learned["anna"]]}
