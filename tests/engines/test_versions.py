"""Which policy versions stay in mind: those that requests wait for, and what served before the newest one."""

import asyncio

import pytest

from openclaw_rl.engines.base import VersionGone
from openclaw_rl.engines.serving import PolicyVersions


@pytest.fixture
def versions() -> PolicyVersions[str]:
    async def load(_version: int, weights: str) -> str:
        await held.make_room()
        return weights

    held = PolicyVersions[str](2, load=load)
    held.add(0, "base")
    held.add(5, "five", line="ben", loaded=False)
    return held


def test_a_version_that_a_request_waits_for_stays_until_the_request_ends(versions: PolicyVersions[str]) -> None:
    version, _ = versions.find(None, "ben")
    use = versions.use(version)
    for newer in (6, 7):
        versions.add(newer, "newer", candidate=True, line="ben")
        versions.promote(newer)
    assert versions.find(version) == (5, "five")
    versions.release(use)
    with pytest.raises(VersionGone):
        versions.find(version)
    assert versions.newest_of("ben") == 7


@pytest.mark.parametrize("loaded", [False, True])
async def test_what_served_before_serves_again_if_its_successor_is_taken_back(
    versions: PolicyVersions[str], loaded: bool
) -> None:
    if loaded:
        use = versions.use(5)
        assert await versions.loaded(use) == "five"
        versions.release(use)
    versions.add(6, "six", line="ben", loaded=False)
    versions.add(1, "other")
    assert versions.evict() is not None
    versions.retract(6)
    assert versions.newest_of("ben") == 5
    assert versions.find(None, "ben") == (5, "five")


async def test_new_requests_of_the_version_that_makes_room_wait_behind_whoever_waits(
    versions: PolicyVersions[str],
) -> None:
    versions.add(6, "six", line="anna", loaded=False)
    versions.add(7, "seven", line="carl", loaded=False)
    ben, anna, carl = (versions.use(version) for version in (5, 6, 7))
    await versions.loaded(ben)
    await versions.loaded(anna)
    first = asyncio.create_task(versions.loaded(carl))
    await asyncio.sleep(0.01)
    later, other = versions.use(5), versions.use(6)
    assert (later.waits, other.waits) == (True, False), "ben's version was used least recently"
    second = asyncio.create_task(versions.loaded(later))
    versions.release(ben)
    async with asyncio.timeout(5):
        assert await first == "seven"
        await asyncio.sleep(0.01)
        assert not second.done()
        # Now anna's version may go first. Carl's goes instead, because it is free before.
        last = versions.use(6)
        assert last.waits
        versions.release(carl)
        assert await second == "five"
        assert await versions.loaded(last) == "six"
    assert set(versions.held) == {5, 6}
