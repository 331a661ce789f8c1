"""Servers with a scripted model that the tests of the API share. Each test finds them as new."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from openclaw_rl.ledger.options import NotesOptions
from support.harness import Bench, running
from support.practice import CanPractise
from support.recording import KEYS, Recording


@pytest.fixture(scope="session")
def server(tiny_model: Path) -> Iterator[Bench]:
    with running(Bench(tiny_model)) as bench:
        yield bench


@pytest.fixture
def bench(server: Bench) -> Bench:
    """A server that records nothing."""
    server.says = "hello world"
    server.sampler.__init__(server.script)  # type: ignore[misc]
    return server


@pytest.fixture(scope="session")
def recording_server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recording]:
    with running(Recording(tiny_model, tmp_path_factory.mktemp("ledger"))) as bench:
        yield bench  # type: ignore[misc]
        bench.ledger.close()  # type: ignore[attr-defined]


@pytest.fixture(scope="session")
def noting_server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recording]:
    settings: dict[str, Any] = {"notes": NotesOptions(note_probes=4), "keys": KEYS, "operations": CanPractise()}
    with running(Recording(tiny_model, tmp_path_factory.mktemp("ledger"), **settings)) as bench:
        yield bench  # type: ignore[misc]
        bench.ledger.close()  # type: ignore[attr-defined]


@pytest.fixture
def noting(noting_server: Recording) -> Recording:
    """A server with an empty ledger that keeps notes of sam and of kim."""
    noting_server.empty()
    return noting_server


@pytest.fixture
def recording(recording_server: Recording) -> Recording:
    """A server with an empty ledger."""
    recording_server.empty()
    recording_server.says = "hello world"
    return recording_server
