"""Which policy versions stay in mind: those that requests wait for, and what served before the newest one."""

import pytest

from openclaw_rl.engines.base import VersionGone
from openclaw_rl.engines.versions import PolicyVersions


@pytest.fixture
def versions() -> PolicyVersions[str]:
    held = PolicyVersions[str](2, reloads=True)
    held.add(0, "base")
    held.add(5, "five", line="ben", loaded=False)
    return held


def test_a_version_that_a_request_waits_for_stays_until_the_request_ends(versions: PolicyVersions[str]) -> None:
    version, _ = versions.find(None, "ben")
    versions.use(version)
    for newer in (6, 7):
        versions.add(newer, "newer", candidate=True, line="ben")
        versions.promote(newer)
    assert versions.find(version) == (5, "five")
    versions.release(version)
    with pytest.raises(VersionGone):
        versions.find(version)
    assert versions.newest_of("ben") == 7


@pytest.mark.parametrize("loaded", [False, True])
def test_what_served_before_serves_again_if_its_successor_is_taken_back(
    versions: PolicyVersions[str], loaded: bool
) -> None:
    if loaded:
        versions.loaded(5, "five")
    versions.add(6, "six", line="ben", loaded=False)
    versions.add(1, "other")
    assert versions.evict() is not None
    versions.retract(6)
    assert versions.newest_of("ben") == 5
    assert versions.find(None, "ben") == (5, "five")
