"""Lines: each person's turns teach their own line, on one learner that steps for whoever has waited longest."""

from pathlib import Path
from sqlite3 import Connection
from typing import Any

import pytest
from prometheus_client import generate_latest

from openclaw_rl.engines.base import EngineUnavailable, StepStopped
from openclaw_rl.learn.checkpoints import Checkpoints, line_folder
from openclaw_rl.learn.reporting import MAX_LINES_SHOWN
from openclaw_rl.learn.step import Phase
from openclaw_rl.ledger import notes, practices
from openclaw_rl.types import SHARED
from support.fakes import read_policy
from support.practice import begin
from support.team_run import TeamRun


async def test_each_persons_turns_teach_their_own_line(team: TeamRun) -> None:
    await team.start()
    anna, ben = team.judged("anna"), team.judged("ben")
    await team.trained(*anna, *ben)
    assert (team.served("anna"), team.served("ben"), team.served(SHARED)) == ([anna], [ben], [])
    assert team.sampler.newest_of("carl") == 0, "who has taught nothing is served by the shared line"
    lines = dict(team.book.rows("SELECT version, line FROM policies"))
    assert sorted(lines.values()) == ["anna", "ben"], "version numbers are those of the whole run"
    assert team.lines.names() == [SHARED, "anna", "ben"]


async def test_what_was_imported_or_rewarded_by_an_environment_teaches_the_shared_line(team: TeamRun) -> None:
    await team.start()
    imported = team.judged("imported")
    await team.trained(*imported)
    assert team.served(SHARED) == [imported] == team.served("anna")
    anna = team.judged("anna")
    await team.trained(*anna)
    assert team.served("anna") == [imported, anna], "a new line begins from the shared policy"
    assert team.served(SHARED) == [imported]


async def test_whoever_writes_most_does_not_keep_others_from_learning(team: TeamRun) -> None:
    await team.start(learning=False)
    much = team.judged("anna", 12)
    little = [*team.judged("ben"), *team.judged("carl")]
    team.learn()
    await team.trained(*much, *little)
    assert set(team.learner.order[:3]) == {"anna", "ben", "carl"}
    assert team.learner.order[3:] == ["anna"] * 5


async def test_a_step_that_fails_is_tried_again_though_nobody_says_more(team: TeamRun) -> None:
    await team.start()
    hooks = team.learner.for_line("anna").hooks
    step = hooks["step"]

    def fail(_sequences: Any) -> None:
        hooks["step"] = step
        raise EngineUnavailable("the process has ended")

    hooks["step"] = fail
    anna = team.judged("anna")
    await team.trained(*anna)
    assert team.steps("anna") == [anna]


async def test_turns_that_wait_are_counted_before_their_line_has_made_a_step(team: TeamRun) -> None:
    await team.start(learning=False)
    team.judged("anna", 3)
    assert {state.line: state.samples for state in team.lines.states()} == {SHARED: 0, "anna": 3}


async def test_more_lines_than_the_learner_holds_are_saved_before_they_make_room(tmp_path: Path) -> None:
    team = TeamRun(tmp_path / "run", most=1)
    try:
        await team.start()
        turns: dict[str, list[list[int]]] = {}
        for _ in range(3):
            for owner in ("anna", "ben", "carl"):
                batch = team.judged(owner)
                await team.trained(*batch)
                turns.setdefault(owner, []).append(batch)
        for owner, batches in turns.items():
            assert team.served(owner) == batches
        assert sum(loop.phase is not Phase.UNPREPARED for loop in team.loops()) == 1
        saved = Checkpoints.of_run(line_folder(team.folder, "anna"), 3).latest()
        assert saved is not None
        assert read_policy(saved.folder) == turns["anna"]
    finally:
        await team.kill()
        team.book.close()


async def test_the_number_of_lines_in_the_metrics_is_bounded(team: TeamRun) -> None:
    await team.start(learning=False)
    for number in range(MAX_LINES_SHOWN + 5):
        await team.lines.open(f"person-{number}")
    told = generate_latest(team.registry).decode()
    assert told.count("openclaw_line_steps_total{") == MAX_LINES_SHOWN + 1
    assert 'openclaw_line_steps_total{line="other"}' in told


async def test_practised_answers_teach_the_line_of_their_owner(team: TeamRun) -> None:
    await team.start()
    note = team.book.change(notes.add, "anna", "Call me chef.")
    practised = team.book.change(begin, note.number, *[None] * practices.BATCH)
    ben = team.judged("ben")
    await team.trained(*practised, *ben)
    assert (team.served("anna"), team.served("ben"), team.served(SHARED)) == ([practised], [ben], [])


async def test_who_is_next_is_read_once_for_all_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With --batch-timeout each line with a turn is asked, and the server answers nobody meanwhile."""
    team = await TeamRun(tmp_path / "run", batch_timeout=3600.0).start(learning=False)
    people = [f"person{number}" for number in range(8)]
    for person in people:
        team.judged(person, 1)
        await team.lines.open(person)
    read, reads = team.book.ledger.read, []

    def counted(query: Any, *given: Any) -> Any:
        reads.append(query)
        return read(query, *given)

    monkeypatch.setattr(team.book.ledger, "read", counted)
    assert not await team.lines._take_turn()
    assert len(reads) == 1
    await team.kill()
    team.book.close()


@pytest.mark.more
async def test_a_line_that_cannot_be_saved_pauses_alone(tmp_path: Path) -> None:
    team = TeamRun(tmp_path / "run", most=1)

    def full(_folder: Any) -> None:
        raise OSError("the disk is full")

    try:
        await team.start()
        learner = team.learner.for_line("anna")
        learner.hooks["save_recovery"] = full
        anna = team.judged("anna")
        await team.trained(*anna)
        ben = team.judged("ben")
        await team.until(lambda: any(loop.trouble for loop in team.loops()))
        assert team.lines.loops["anna"].trouble == "the disk is full"
        assert not team.lines.loops["ben"].trouble
        assert team.served("anna") == [anna]
        learner.hooks.clear()
        await team.trained(*ben)
        assert (team.served("anna"), team.served("ben")) == ([anna], [ben])
    finally:
        await team.kill()
        team.book.close()


async def test_a_wish_that_most_people_have_in_the_same_words_teaches_the_shared_line(team: TeamRun) -> None:
    await team.start(learning=False)
    wishes = {"anna": "Be brief.", "ben": "be brief", "emil": "", "fred": "", "dora": "Be brief, I am ill."}
    wishes |= {"carl": "Be brief.", "gina": "Be Brief.", "hugo": "Be brief."}
    for owner, text in wishes.items():
        turns = team.judged(owner, practices.MIN_REACTIONS)
        if text:
            note = team.book.change(notes.add, owner, text).number
            kept = [(turn, note, 1, 1, 2e9) for turn in turns]
            team.book.change(Connection.executemany, "INSERT INTO note_outcomes VALUES (?, ?, ?, ?, ?)", kept)
        common = team.book.change(practices.add_common)
        assert (common is not None) == (owner == "gina"), "not two of two, nor three of six; four of seven, and once"
        if common:
            assert (common.owner, common.text.casefold().rstrip(".")) == (SHARED, "be brief")
            practised = team.book.change(begin, common.number, *[None] * practices.BATCH)
    assert team.book.ledger.read(practices.questions, SHARED) == [], "nobody's messages are practised with"
    team.learn()
    await team.trained(*practised)
    assert team.served(SHARED) == [practised]
    assert practised not in [*team.steps("anna"), *team.steps("ben"), *team.steps("carl")]


async def test_a_practice_that_rests_keeps_nobody_from_learning(team: TeamRun) -> None:
    await team.start(learning=False)
    anna = team.learner.for_line("anna")

    async def work(*_: object) -> None:
        await anna.stopped.wait()
        anna.hooks.pop("step")
        raise StepStopped("the step was stopped")

    anna.hooks["step"] = work
    note = team.book.change(notes.add, "anna", "Call me chef.")
    practised = team.book.change(begin, note.number, *[None] * practices.BATCH)
    team.learn()
    await team.until(lambda: any(loop.phase is Phase.TRAINING for loop in team.loops()))
    loop = team.lines.loops["anna"]
    loop.pause_practice(paused=True)
    assert (anna.is_paused, anna.stopped.is_set()) == (True, False)
    ben = team.judged("ben")
    # As what practises notes does, again and again while somebody writes.
    loop.pause_practice(paused=True)
    await team.trained(*ben)
    await team.trained(*practised)
    assert (team.served("anna"), team.served("ben")) == ([practised], [ben])
