"""`openclaw-rl forget` deletes what it is asked to, and says what remains."""

import asyncio
import contextlib
from pathlib import Path

import pytest

from openclaw_rl.learn.build import where_to_begin
from openclaw_rl.learn.checkpoints import Checkpoints, line_folder
from openclaw_rl.learn.options import TrainingOptions
from openclaw_rl.ledger import deletion, pages, schema, training, verdicts
from openclaw_rl.ledger.run_dir import RunDirLock
from openclaw_rl.ledger.schema import FILE, connect
from openclaw_rl.types import SampleKind, Source, State, Verdict
from support.commands import Program, status
from support.harness import Bench, running
from support.records import Book, a_turn


def test_forgetting_a_session(book: Book, program: Program) -> None:
    for name in ("one", "one", "two"):
        book.capture(a_turn(name))
    code, out, _err = program("forget", "--session", "one")
    assert code == 0
    assert "Forgot 1 session with 2 turns: one." in out
    assert "Training steps that had used them: none." in out
    assert [summary.key.id for summary in pages.session_summaries(book.db)] == ["two"]


def test_forgetting_a_user(book: Book, program: Program) -> None:
    for name, owner in (("one", "me"), ("two", "me"), ("one", "you")):
        book.capture(a_turn(name, owner))
    code, out, _err = program("forget", "--user", "me")
    assert code == 0
    assert "Forgot 2 sessions with 2 turns." in out
    assert [summary.key for summary in pages.session_summaries(book.db)] == [("you", "one")]


@pytest.mark.parametrize("whose", [("--session", "x"), ("--user", "x")])
def test_forgetting_what_is_not_there_is_said_and_changes_nothing(
    book: Book, program: Program, whose: tuple[str, str]
) -> None:
    book.capture(a_turn("one"))
    code, _out, err = program("forget", *whose)
    assert code == 2
    assert ("There is no session x" if whose[0] == "--session" else "nothing of the user x") in err
    assert len(pages.session_summaries(book.db)) == 1


@pytest.mark.parametrize("whose", [(), ("--session", "one", "--user", "me")])
def test_forgetting_needs_either_a_session_or_a_user(book: Book, program: Program, whose: tuple[str, ...]) -> None:
    book.capture(a_turn("one"))
    code, _out, err = program("forget", *whose)
    assert code == 2
    assert "--session" in err
    assert "--user" in err
    assert len(pages.session_summaries(book.db)) == 1


def test_a_ledger_that_another_program_holds_is_said_in_a_sentence(
    book: Book, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schema, "LOCK_SECONDS", 0)
    book.capture(a_turn("one"))
    other = connect(book.folder / FILE)
    other.execute("BEGIN EXCLUSIVE")
    code, _out, err = program("forget", "--session", "one")
    assert code == 2
    assert "locked" in err
    # Looking is not held up.
    assert program("status")[0] == program("sessions")[0] == 0
    other.execute("ROLLBACK")
    other.close()
    assert program("forget", "--session", "one")[0] == 0


def test_a_large_ledger_is_not_written_anew_beside_a_server(
    book: Book, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It could not record anything meanwhile."""
    monkeypatch.setattr(deletion, "MAX_BYTES_REWRITTEN_BESIDE_SERVER", 0)
    for session in ("one", "two"):
        book.capture(a_turn(session))
    with contextlib.closing(RunDirLock(book.folder)):
        code, _out, err = program("forget", "--session", "one")
        assert code == 1
        assert "'openclaw-rl forget --wipe' again when it is stopped" in " ".join(err.split())
    assert program("forget", "--wipe") == (0, "Finished an earlier deletion.\n", "")
    assert program("forget", "--session", "two")[0] == 0
    assert pages.session_summaries(book.db) == []


def test_a_line_beside_a_server_without_lines_is_deleted(book: Book, program: Program, tiny_model: Path) -> None:
    folder = line_folder(book.folder, "ben")
    folder.mkdir(parents=True)
    with running(Bench(tiny_model)) as bench, contextlib.closing(RunDirLock(book.folder)) as lock:
        lock.tell(bench.url)
        code, out, err = program("forget", "--user", "ben")
    assert (code, err) == (0, "")
    assert "Deleted the line ben" in out
    assert "Start the server again" in out
    assert not folder.exists()


def test_what_could_not_be_wiped_yet_is_said(book: Book, program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody still reads an older state of the ledger, so its log cannot be emptied."""
    monkeypatch.setattr(schema, "LOCK_SECONDS", 0)
    book.capture(a_turn("one", messages=[{"role": "user", "content": "a-very-private-matter"}]))
    reader = connect(book.folder / FILE)
    reader.execute("BEGIN")
    reader.execute("SELECT * FROM turns").fetchall()
    code, _out, err = program("forget", "--session", "one")
    left = b"a-very-private-matter" in book.raw_bytes()
    reader.execute("ROLLBACK")
    reader.close()
    assert left == (code != 0)
    assert left == ("again" in err)


def test_the_beginning_of_an_id_is_enough(book: Book, program: Program) -> None:
    for name in ("alpha-1", "alpha-2", "beta", "alpha"):
        book.capture(a_turn(name))
    code, _out, err = program("forget", "--session", "alpha-")
    assert code == 2
    assert "2 sessions begin with alpha-: alpha-1, alpha-2." in err
    code, out, _err = program("forget", "--session", "be")
    assert (code, "Forgot 1 session with 1 turn: beta." in out) == (0, True)
    # A whole id is that session, also if others begin with it.
    assert program("forget", "--session", "alpha")[0] == 0
    assert {summary.key.id for summary in pages.session_summaries(book.db)} == {"alpha-1", "alpha-2"}


def keep_screenshots(book: Book, *names: str) -> None:
    for name in names:
        (book.folder / "screenshots" / name).mkdir(parents=True)
        (book.folder / "screenshots" / name / "000.png").write_bytes(b"a picture")


def kept_screenshots(book: Book) -> list[str]:
    return sorted(path.name for path in (book.folder / "screenshots").iterdir())


def test_screenshots_go_with_their_session(book: Book, program: Program) -> None:
    for name in ("a b", "one", "two"):
        book.capture(a_turn(name))
    keep_screenshots(book, "a-b", "one", "one-3", "two", "one-and-more")
    assert program("forget", "--session", "a b")[0] == 0
    assert "a-b" not in kept_screenshots(book)
    assert program("forget", "--session", "one")[0] == 0
    assert kept_screenshots(book) == ["one-and-more", "two"]
    assert b"a b" not in book.raw_bytes(), "nor does the ledger have a name that was deleted"


class Killed(BaseException):
    """The program ends here, as if it were killed."""


@pytest.mark.parametrize("instant", ["rollback.prune_records", "screenshot_folders.shutil.rmtree", "deletion.wipe"])
@pytest.mark.parametrize("again", [("--wipe",), ("--session", "two"), ("--user", "me")])
def test_a_deletion_that_was_killed_is_finished_by_the_next(
    book: Book, program: Program, monkeypatch: pytest.MonkeyPatch, instant: str, again: tuple[str, ...]
) -> None:
    book.capture(a_turn("a-private-name", "me"))
    book.capture(a_turn("two", "you"))
    keep_screenshots(book, "a-private-name", "a-private-name-2", "other")
    (book.folder / "records.jsonl").write_text('{"turn": 1}\n')

    def kill(*_given: object, **_named: object) -> None:
        raise Killed

    folder = "learn" if instant.startswith("rollback") else "ledger"
    with monkeypatch.context() as patch:
        patch.setattr(f"openclaw_rl.{folder}.{instant}", kill)
        with pytest.raises(Killed):
            program("forget", "--user", "me")
    code, out, err = program("forget", *again)
    assert "Finished an earlier deletion." in out
    # The ledger no longer knows whose it was.
    assert (code, err) == (0, "") if again[-1] != "me" else "nothing of the user me" in err
    assert kept_screenshots(book) == ["other"]
    assert (book.folder / "records.jsonl").read_text() == ""
    assert b"a-private-name" not in book.raw_bytes()


def test_what_cannot_be_deleted_is_said_until_it_is_gone(book: Book, program: Program) -> None:
    book.capture(a_turn("one"))
    (book.folder / "screenshots").mkdir()
    # A link is not followed: what it leads to is not ours.
    link = book.folder / "screenshots" / "one"
    link.symlink_to(book.folder.parent)
    code, out, err = program("forget", "--session", "one")
    assert (code, "Forgot 1 session" in out) == (1, True)
    assert f"{link} could not be deleted" in " ".join(err.split())
    code, _out, err = program("forget", "--wipe")
    assert (code, f"{link} could not be deleted" in " ".join(err.split())) == (1, True)
    link.unlink()
    assert program("forget", "--wipe")[::2] == (0, "")
    assert program("forget", "--wipe") == (0, "", "")


@pytest.mark.parametrize(
    ("deleted", "kept", "name"),
    [("talk-2", "talk", "talk-2"), ("talk", "talk-2", "talk-2"), ("talk", "talk", "talk"), ("talk", "talk", "talk-2")],
)
def test_screenshots_that_may_be_somebody_elses_stay_and_are_said(
    book: Book, program: Program, deleted: str, kept: str, name: str
) -> None:
    """The second folder of a session "talk" has the name of the first one of a session "talk-2"."""
    book.capture(a_turn(deleted, "me"))
    book.capture(a_turn(kept, "you"))
    keep_screenshots(book, name)
    code, out, err = program("forget", "--user", "me")
    assert (code, "Forgot 1 session" in out) == (1, True)
    assert f"{book.folder / 'screenshots' / name} may be of the session {kept}" in " ".join(err.split())
    assert kept_screenshots(book) == [name]
    # It is said once: the owner may well decide that it stays.
    assert program("forget", "--wipe") == (0, "", "")
    assert program("forget", "--user", "you")[0] == 0
    assert kept_screenshots(book) == []


def test_a_report_that_may_quote_deleted_turns_is_named(book: Book, program: Program) -> None:
    book.capture(a_turn("one"))
    book.capture(a_turn("two"))
    assert "may quote" not in program("forget", "--session", "one")[1]
    (book.folder / "report.html").write_text("<p>what they said</p>")
    assert f"{book.folder / 'report.html'} may quote them" in program("forget", "--session", "two")[1].replace(
        "\n", " "
    )


def test_wiping_also_removes_the_records_of_turns_that_were_deleted_one_by_one(book: Book, program: Program) -> None:
    book.capture(a_turn("one"))
    (book.folder / "records.jsonl").write_text('{"turn": 1}\n{"turn": 2}\n')
    assert program("forget", "--wipe") == (0, "", "")
    assert (book.folder / "records.jsonl").read_text() == '{"turn": 1}\n'


def test_records_that_cannot_be_written_do_not_keep_the_ledger_from_being_wiped(book: Book, program: Program) -> None:
    book.capture(a_turn("one", messages=[{"role": "user", "content": "a-very-private-matter"}]))
    records = book.folder / "records.jsonl"
    records.write_text('{"turn": 1}\n')
    (book.folder / "records.new").mkdir()
    code, _out, err = program("forget", "--session", "one")
    assert (code, f"{records} still has deleted turns" in " ".join(err.split())) == (1, True)
    assert b"a-very-private-matter" not in book.raw_bytes()
    (book.folder / "records.new").rmdir()
    assert program("forget", "--wipe") == (0, "", "")
    assert records.read_text() == ""


class TrainedRun:
    """A run directory in which steps were made, each on one turn of a session of its own: s1, s2, ..."""

    def __init__(self, book: Book, folder: Path) -> None:
        self.book, self.folder = book, folder
        self.checkpoints = Checkpoints(folder / "checkpoints", 3)
        self.turns: list[int] = []

    def train(self, steps: int, *saved: int) -> None:
        for step in range(1, steps + 1):
            turn = self.book.put(State.READY, session=f"s{step}")
            assert self.book.change(verdicts.record, turn, Verdict(1.0, Source.LLM), SampleKind.RL, "", 0)
            self.book.move(turn, State.BATCHED)
            self.book.change(training.apply_step, step, step, [turn])
            self.turns.append(turn)
            policy = self.folder / "policies" / f"v{step:06d}"
            policy.mkdir(parents=True)
            (policy / "weights").write_text(str(step))
            if step in saved:
                asyncio.run(self.checkpoints.save(step, step, (), self.write))

    async def write(self, target: Path) -> None:
        (target / "adapter_config.json").write_text("{}")

    def on_disk(self) -> list[str]:
        return sorted(path.name for name in ("checkpoints", "policies") for path in self.folder.glob(f"{name}/*"))

    def states(self) -> list[State | None]:
        """Of the turns, in the order of their steps; None for those that were deleted."""
        rows = dict(self.book.rows("SELECT number, state FROM turns"))
        return [rows.get(turn) for turn in self.turns]

    def start(self) -> tuple[str, int] | None:
        """The checkpoint from which the next start continues, and its version."""
        latest = where_to_begin(TrainingOptions(), self.folder).checkpoint
        return latest and (latest.folder.name, latest.version)


@pytest.fixture
def trained(book: Book, folder: Path) -> TrainedRun:
    return TrainedRun(book, folder)


def test_forgetting_answers_from_the_policy_that_serves_whatever_way_it_came(
    trained: TrainedRun, program: Program
) -> None:
    trained.train(2, 2)
    assert "(the base model)" in program("rollback")[1]
    assert trained.start() is None
    assert status(program)["step"] == 0
    assert "(the weights of step 2)" in program("rollback", "2")[1]
    told = status(program)
    assert (told["step"], told["policy_version"], told["turns"]["applied"]) == (2, 4, 2)
    assert trained.start() == ("step-000002-v2", 4)
    _code, out, _err = program("forget", "--session", "s1")
    assert "Training steps that had used them: 1." in out
    assert "policy 4, which serves" in out
    assert str(trained.folder / "checkpoints" / "step-000002-v2") in out
    for version in (1, 2):
        assert str(trained.folder / "policies" / f"v00000{version}") in out
    assert "openclaw-rl rollback 0" in out
    assert "openclaw-rl forget --retrain" in out


def test_a_policy_that_was_rolled_back_still_has_what_it_learned(trained: TrainedRun, program: Program) -> None:
    trained.train(4, 2, 4)
    program("rollback")
    _code, out, _err = program("forget", "--session", "s3")
    assert "Training steps that had used them: 3." in out
    assert "which serves" not in out
    assert "step-000004-v4" in out
    assert "step-000002-v2" not in out
    assert "rollback" not in out
    _code, out, _err = program("forget", "--retrain")
    assert "Deleted 1 checkpoint and 2 policies" in out
    assert trained.on_disk() == ["step-000002-v2", "v000001", "v000002"]
    assert trained.start() == ("step-000002-v2", 5)
    # The owner had left these steps behind: nothing of them is trained on again.
    assert trained.states() == [State.APPLIED, State.APPLIED, None, State.APPLIED]
    assert "nothing to train again" in program("forget", "--retrain")[1]


def test_a_checkpoint_that_an_older_program_saved_again_is_known_by_its_step(
    trained: TrainedRun, program: Program
) -> None:
    trained.train(3, 2)
    # As those programs rolled back: the same state under a new number, of which the ledger was told nothing.
    trained.checkpoints.remove(trained.checkpoints.all())
    asyncio.run(trained.checkpoints.save(2, 4, (), trained.write))
    assert "step-000002-v4" not in program("forget", "--session", "s3")[1]
    _code, out, _err = program("forget", "--session", "s1")
    assert "policy 4, which serves" in out
    assert str(trained.folder / "checkpoints" / "step-000002-v4") in out
    assert program("forget", "--retrain")[0] == 0
    assert not [name for name in trained.on_disk() if not name.startswith("step-000000")]


def test_training_again_goes_back_to_before_the_turns_and_queues_the_others(
    trained: TrainedRun, program: Program
) -> None:
    trained.train(6, 2, 4, 6)
    code, out, err = program("forget", "--session", "s3", "--retrain")
    assert (code, err) == (0, "")
    assert "Training steps that had used them: 3." in out
    assert "Deleted 2 checkpoints and 4 policies" in out
    assert "The next start serves policy 7, which was not. 3 turns wait to be trained on." in out
    assert trained.on_disk() == ["step-000002-v2", "v000001", "v000002"]
    assert trained.start() == ("step-000002-v2", 7)
    assert trained.states() == [State.APPLIED, State.APPLIED, None, *[State.JUDGED] * 3]
    told = status(program)
    assert (told["step"], told["policy_version"]) == (2, 7)


@pytest.mark.parametrize("saved", [(), (2,), (1, 2)])
def test_training_again_from_the_base_model(trained: TrainedRun, program: Program, saved: tuple[int, ...]) -> None:
    trained.train(3, *saved)
    _code, out, _err = program("forget", "--session", "s1")
    assert "openclaw-rl rollback 0" in out
    code, out, _err = program("forget", "--retrain")
    assert code == 0
    assert "2 turns wait to be trained on." in out
    assert trained.start() is None
    assert not [name for name in trained.on_disk() if not name.startswith("step-000000")]
    assert trained.states() == [None, State.JUDGED, State.JUDGED]
    assert status(program)["step"] == 0


def test_turns_that_nothing_was_trained_on_leave_policies_alone(trained: TrainedRun, program: Program) -> None:
    trained.train(2, 2)
    trained.book.capture(a_turn("new"))
    before = trained.on_disk()
    code, out, _err = program("forget", "--session", "new", "--retrain")
    assert code == 0
    assert "Training steps that had used them: none." in out
    assert "nothing to train again" in out
    assert trained.on_disk() == before
    assert trained.states() == [State.APPLIED] * 2
