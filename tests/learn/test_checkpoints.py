"""Checkpoints: there whole or not at all, never believed unseen, and only as many as are wanted."""

import asyncio
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openclaw_rl.config.options import ConfigError
from openclaw_rl.learn import checkpoints as module
from openclaw_rl.learn.build import Beginning, where_to_begin
from openclaw_rl.learn.checkpoints import RECORD, BadCheckpoint, Checkpoint, Checkpoints, read_record, verify
from openclaw_rl.learn.options import TrainingOptions
from openclaw_rl.types import Batch
from support.properties import examples

BATCHES = (Batch(3, 3, (5, 6)), Batch(4, 5, (7, 9)))
FILES = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"weights", "learner.optimizer": b"moments"}


async def write(folder: Path) -> None:
    for name, content in FILES.items():
        (folder / name).write_bytes(content)


def save(checkpoints: Checkpoints, step: int, version: int, batches: tuple[Batch, ...] = ()) -> Checkpoint:
    return asyncio.run(checkpoints.save(step, version, batches, write))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run" / "checkpoints"


@pytest.fixture
def checkpoints(folder: Path) -> Checkpoints:
    return Checkpoints(folder, keep=3)


def versions(checkpoints: Checkpoints) -> list[int]:
    return [checkpoint.version for checkpoint in checkpoints.all()]


def test_a_checkpoint_is_read_as_it_was_written(checkpoints: Checkpoints) -> None:
    made = save(checkpoints, 4, 5, BATCHES)
    assert (made.step, made.version, made.batches) == (4, 5, BATCHES)
    assert checkpoints.latest() == made
    verify(made.folder)
    assert {path.name: path.read_bytes() for path in made.folder.iterdir() if path.name != RECORD} == FILES


def test_without_any_there_is_none(checkpoints: Checkpoints) -> None:
    assert checkpoints.all() == []
    assert checkpoints.latest() is None


def test_the_newest_is_that_of_the_highest_version_whatever_its_step(checkpoints: Checkpoints) -> None:
    """After a rollback learning goes on at an earlier step; also 10 is more than 9."""
    for step, version in ((9, 9), (10, 10), (2, 11)):
        save(checkpoints, step, version)
    assert versions(checkpoints) == [9, 10, 11]
    latest = checkpoints.latest()
    assert latest is not None
    assert latest.step == 2


def test_pruning_keeps_the_newest(checkpoints: Checkpoints) -> None:
    for number in range(1, 8):
        save(checkpoints, number, number)
        assert versions(checkpoints) == list(range(max(1, number - 2), number + 1))
    assert len(list(checkpoints.folder.iterdir())) == 3


def test_other_things_in_the_folder_are_left_alone(checkpoints: Checkpoints, caplog: pytest.LogCaptureFixture) -> None:
    save(checkpoints, 1, 1)
    (checkpoints.folder / "notes").mkdir()
    (checkpoints.folder / "notes" / "why.txt").write_text("mine")
    (checkpoints.folder / "README").write_text("mine")
    for number in range(2, 6):
        save(checkpoints, number, number)
    assert versions(checkpoints) == [3, 4, 5]
    assert (checkpoints.folder / "notes" / "why.txt").read_text() == "mine"
    assert (checkpoints.folder / "README").read_text() == "mine"
    assert not caplog.records


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("harm", ["changed", "cut", "gone", "folder"])
def test_a_damaged_one_is_named_and_the_one_before_it_is_used(
    checkpoints: Checkpoints, name: str, harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    good = save(checkpoints, 1, 1)
    path = save(checkpoints, 2, 2).folder / name
    if harm == "changed":
        path.write_bytes(b"\0" + path.read_bytes()[1:])
    elif harm == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        path.unlink()
        if harm == "folder":
            path.mkdir()
    with caplog.at_level(logging.ERROR):
        assert checkpoints.latest() == good
    (said,) = caplog.messages
    assert str(path.parent) in said
    assert name in said
    assert "The one before it is used" in said


@pytest.mark.parametrize(
    "record",
    [
        "",
        "{",
        "[]",
        "null",
        "{}",
        '{"step": 2, "version": 2, "created": 0, "batches": []}',
        '{"step": 2, "version": 2, "created": 0, "batches": [], "files": null}',
        '{"step": 2, "version": null, "created": 0, "batches": [], "files": {}}',
        '{"step": "two", "version": "2", "created": 0, "batches": [], "files": {}}',
        '{"step": 2, "version": 2, "created": 0, "batches": [{"step": 2}], "files": {}}',
        "[" * 100_000,
        b"\xff\xfe\x00",
    ],
)
def test_a_damaged_record_is_named_and_the_one_before_it_is_used(
    checkpoints: Checkpoints, record: str | bytes, caplog: pytest.LogCaptureFixture
) -> None:
    good = save(checkpoints, 1, 1)
    bad = save(checkpoints, 2, 2)
    (bad.folder / RECORD).write_bytes(record if isinstance(record, bytes) else record.encode())
    assert checkpoints.latest() == good
    assert bad.folder.name in caplog.text
    with pytest.raises(BadCheckpoint):
        verify(bad.folder)


json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
records = json_values | st.fixed_dictionaries(
    dict.fromkeys(("step", "version", "created", "batches", "files"), json_values)
)


@given(record=records)
@examples(150)
def test_whatever_is_in_a_record_the_others_can_be_used(record: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    checkpoints = Checkpoints(tmp_path_factory.getbasetemp() / "wild", keep=3)
    if not checkpoints.folder.is_dir():
        save(checkpoints, 1, -(10**9))
        (checkpoints.folder / "other").mkdir()
    (checkpoints.folder / "other" / RECORD).write_text(json.dumps(record))
    found = checkpoints.latest()
    assert found is not None
    assert all(isinstance(checkpoint, Checkpoint) for checkpoint in checkpoints.all())


def test_if_all_are_damaged_there_is_none(checkpoints: Checkpoints) -> None:
    for number in (1, 2):
        (save(checkpoints, number, number).folder / "adapter_config.json").unlink()
    assert checkpoints.latest() is None


def test_one_whose_writing_failed_is_not_there(checkpoints: Checkpoints) -> None:
    async def fail(folder: Path) -> None:
        await write(folder)
        raise OSError(28, "No space left on device")

    good = save(checkpoints, 1, 1)
    with pytest.raises(OSError, match="No space"):
        asyncio.run(checkpoints.save(2, 2, (), fail))
    assert checkpoints.latest() == good
    assert save(checkpoints, 2, 2) == checkpoints.latest()


def test_serving_goes_on_while_files_are_compared_and_brought_to_the_disk(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint may be gigabytes: whatever reads them must not hold up the event loop."""
    free = threading.Event()
    held = []

    def slow(function: Any) -> Any:
        def wait(path: Path) -> Any:
            held.append(not free.wait(5))
            return function(path)

        return wait

    monkeypatch.setattr(module, "digest", slow(module.digest))
    monkeypatch.setattr(module, "sync", slow(module.sync))

    async def run() -> None:
        asyncio.get_running_loop().call_later(0.05, free.set)
        await checkpoints.save(1, 1, (), write)

    asyncio.run(run())
    assert held
    assert not any(held)


def test_one_that_serves_again_is_the_newest_and_stays_in_its_folder(checkpoints: Checkpoints) -> None:
    first, second = save(checkpoints, 1, 1, BATCHES), save(checkpoints, 2, 2)
    for version in (3, 4):
        again = checkpoints.renumber(checkpoints.all()[0 if version == 3 else 1], version)
        assert (again.folder, again.batches, again.version) == (first.folder, BATCHES, version)
        assert checkpoints.latest() == again
    assert again.versions == (1, 3, 4)
    verify(again.folder)
    assert sorted(checkpoints.folder.iterdir()) == [first.folder, second.folder]
    # It is removed as one that is as new as its newest number.
    for number in (5, 6):
        save(checkpoints, number, number)
    assert versions(checkpoints) == [4, 5, 6]


KILLED = """
import asyncio, os, signal, sys
from pathlib import Path
from openclaw_rl.learn import checkpoints as module

count = 0
def fatal(number, point):
    global count
    count += 1
    if count == point:
        os.kill(os.getpid(), signal.SIGKILL)

point = int(sys.argv[2])
watched = ("os.open", "os.mkdir", "os.rename", "open", "shutil.rmtree", "os.remove", "os.rmdir")
async def write(folder):
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (folder / name).write_text(name * 10)

checkpoints = module.Checkpoints(Path(sys.argv[1]), 2)
inside = lambda arguments: any(sys.argv[1] in str(argument) for argument in arguments)
sys.addaudithook(lambda event, arguments: fatal(event, point) if event in watched and inside(arguments) else None)
if WORK == "save":
    asyncio.run(checkpoints.save(3, 3, (), write))
else:
    checkpoints.renumber(checkpoints.all()[0], 3)
"""


@pytest.mark.more
@pytest.mark.parametrize("work", ["save", "renumber"])
def test_killed_at_any_operation_on_the_disk_there_is_no_half_checkpoint(tmp_path: Path, work: str) -> None:
    """A process that saves the third of at most two checkpoints, or makes the first the newest one.

    It is killed before its 1st, 2nd, ... operation.
    """
    pristine = Checkpoints(tmp_path / "pristine", keep=2)
    for number in (1, 2):
        save(pristine, number, number)
    seen = set()
    for first in range(1, 200, 6):
        points = range(first, first + 6)
        folders = {point: tmp_path / str(point) for point in points}
        for point in points:
            shutil.copytree(pristine.folder, folders[point])
        script = (
            "import sys, os\n"
            + f"source = {f'WORK = {work!r}' + KILLED!r}\n"
            + (
                "import openclaw_rl.learn.checkpoints\n"
                "from pathlib import Path\n"
                "for point in sys.argv[2:]:\n"
                "    child = os.fork()\n"
                "    if not child:\n"
                "        sys.argv = [sys.argv[0], str(Path(sys.argv[1]) / point), point]\n"
                "        exec(source, {})\n"
                "        os._exit(0)\n"
                "    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
            )
        )
        command = [sys.executable, "-B", "-c", script, str(tmp_path), *map(str, points)]
        running = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        for point, status in zip(points, map(int, running), strict=True):
            assert status in (0, -signal.SIGKILL)
            found = Checkpoints(folders[point], keep=2)
            latest = found.latest()
            assert latest is not None
            seen.add(latest.version)
            assert latest.version in (2, 3)
            # Whatever was left behind is in nobody's way, and does not stay.
            assert save(found, 4, 4) == found.latest()
            assert len(os.listdir(folders[point])) == 2
        if "0" in running:
            break
    else:
        pytest.fail("there were always more operations")
    assert seen == {2, 3}


# --resume-from-ckpt


def beginning(folder: Path, **given: Any) -> Beginning:
    return where_to_begin(TrainingOptions(**given), folder.parent)


def test_auto_is_the_runs_last_one_and_none_without(checkpoints: Checkpoints, folder: Path) -> None:
    assert beginning(folder).checkpoint is None
    assert beginning(folder).of_this_run
    save(checkpoints, 1, 1)
    last = save(checkpoints, 2, 2)
    assert beginning(folder).checkpoint == last
    assert beginning(folder).of_this_run


def test_none_begins_anew(checkpoints: Checkpoints, folder: Path) -> None:
    save(checkpoints, 1, 1)
    found = beginning(folder, resume_from_ckpt="none")
    assert (found.checkpoint, found.of_this_run) == (None, False)


def test_a_folder_is_the_runs_own_or_another_ones(checkpoints: Checkpoints, folder: Path, tmp_path: Path) -> None:
    first = save(checkpoints, 1, 1)
    save(checkpoints, 2, 2)
    foreign = save(Checkpoints(tmp_path / "elsewhere" / "checkpoints", 1), 7, 7)
    own = beginning(folder, resume_from_ckpt=str(first.folder))
    assert (own.checkpoint, own.of_this_run) == (first, True)
    other = beginning(folder, resume_from_ckpt=str(foreign.folder))
    assert (other.checkpoint, other.of_this_run) == (foreign, False)


@pytest.mark.parametrize("harm", ["missing", "not one", "damaged"])
def test_a_folder_that_cannot_be_used_is_said_before_anything_starts(
    checkpoints: Checkpoints, folder: Path, tmp_path: Path, harm: str
) -> None:
    given = save(checkpoints, 1, 1).folder
    if harm == "missing":
        given = tmp_path / "nowhere"
    elif harm == "not one":
        given = tmp_path
    else:
        (given / "learner.optimizer").write_bytes(b"")
    with pytest.raises(ConfigError, match="--resume-from-ckpt") as said:
        beginning(folder, resume_from_ckpt=str(given))
    assert str(given) in str(said.value)


def test_a_record_is_read_without_its_files(checkpoints: Checkpoints) -> None:
    made = save(checkpoints, 1, 1)
    (made.folder / "learner.optimizer").unlink()
    assert read_record(made.folder) == made
