"""Lines on the double of Tinker: each ends where it would alone, and the service holds few training runs for them."""

from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from openclaw_rl.engines.tinker.training_run import paths_in
from openclaw_rl.learn.checkpoints import Checkpoints, line_folder
from openclaw_rl.types import SHARED
from support.team_run import TeamRun
from support.tinker_double import Cloud, Training, status_error, tinker
from support.tinker_learners import connected, saved
from support.training_settings import USUAL

OWNERS = ("imported", "anna", "ben")
#: Who steps when; what was imported teaches the shared line, from which the others begin.
ORDER = ("imported", "anna", "ben", "anna", "ben", "ben", "anna")


class TinkerTeam(TeamRun):
    """A run directory with lines whose policies are on Tinker."""

    def __init__(self, folder: Path, model: Path, most: int) -> None:
        super().__init__(folder, most)
        self.model = model

    async def start_engines(self) -> tuple[Any, Any]:
        learner = await connected(self.model, policies=max(2, self.most), lines=True, training=USUAL)
        return learner, learner.primitives.sampler

    async def kill(self) -> None:
        await super().kill()
        await self.learner.primitives.connection.close()

    async def teach(self, owners: Iterable[str]) -> None:
        """Steps of these owners one after the other, each on answers of their own."""
        for owner in owners:
            own = [10 + OWNERS.index(owner), 20, 30]
            await self.trained(*self.judged(owner, response_ids=own, logprobs=[-5.0] * len(own)))

    def ended(self, cloud: Cloud, owner: str) -> Any:
        """Where a line is, of which everything is saved."""
        latest = Checkpoints.of_run(line_folder(self.folder, SHARED if owner == "imported" else owner), 3).latest()
        assert latest is not None
        return saved(cloud, latest.folder)


@pytest.fixture
def cloud(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cloud:
    cloud = Cloud(tiny_model, tmp_path / "cloud")
    monkeypatch.setattr(tinker, "ServiceClient", cloud.service)
    return cloud


@pytest_asyncio.fixture
async def alone(cloud: Cloud, tiny_model: Path, tmp_path: Path) -> dict[str, Any]:
    """Where each line ends on a server that has only the shared one besides."""
    ends = {}
    for owner in OWNERS[1:]:
        team = await TinkerTeam(tmp_path / f"alone-{owner}", tiny_model, 4).start()
        await team.teach(name for name in ORDER if name in ("imported", owner))
        await team.lines.finish()
        ends |= {name: team.ended(cloud, name) for name in ("imported", owner)}
        await team.kill()
        team.book.close()
    assert len(set(map(str, ends.values()))) == len(OWNERS)
    return ends


@pytest_asyncio.fixture
async def few(tiny_model: Path, cloud: Cloud, tmp_path: Path) -> AsyncIterator[TinkerTeam]:
    """A team whose learner holds one line at a time."""
    team = TinkerTeam(tmp_path / "run", tiny_model, 1)
    yield team
    await team.kill()
    team.book.close()


async def test_lines_that_make_room_for_each_other_and_are_killed_end_where_each_would_alone(
    cloud: Cloud, alone: dict[str, Any], few: TinkerTeam
) -> None:
    await few.start()
    for number, owner in enumerate(ORDER):
        await few.teach([owner])
        assert cloud.clients(Training) == 1
        if number == 4:
            await few.kill()
            await few.start()
    await few.lines.finish()
    assert {owner: few.ended(cloud, owner) for owner in OWNERS} == alone


async def test_a_step_that_fails_and_a_line_that_is_dropped_leave_the_others(
    cloud: Cloud, alone: dict[str, Any], few: TinkerTeam
) -> None:
    await few.start()
    await few.teach(ORDER[:-1])
    cloud.fail("optim_step", status_error(401, "key expired"))
    await few.teach(["anna"])
    assert not cloud.faults["optim_step"]
    assert await few.lines.drop("ben")
    await few.lines.finish()
    assert not line_folder(few.folder, "ben").exists()
    assert few.sampler.newest_of("ben") == few.sampler.newest_of(SHARED)
    assert {owner: few.ended(cloud, owner) for owner in OWNERS[:2]} == {owner: alone[owner] for owner in OWNERS[:2]}


async def test_who_was_away_until_all_but_checkpoints_had_expired_goes_on_from_one(
    cloud: Cloud, alone: dict[str, Any], few: TinkerTeam
) -> None:
    few.options["save_interval"] = 2
    await few.start()
    await few.teach(["imported", "anna", "anna"])
    await few.teach(["anna", "ben"])
    await few.kill()
    for path in paths_in(line_folder(few.folder, "anna")):
        if cloud.kept_seconds[path] is not None:
            cloud.states.pop(path, cloud.slots.pop(path, None))
    await few.start()
    anna = await few.lines.open("anna")
    (kept,) = [one for one in anna.line.checkpoints.all() if one.step == 2]
    await anna.roll_back(kept)
    await few.teach(["anna"])
    await few.lines.finish()
    assert few.ended(cloud, "anna") == alone["anna"]
