"""Settings and fixtures that all tests share."""

import os
from collections.abc import Iterator
from pathlib import Path

# Kernels are tested in Triton's interpreter where there is no GPU. It has to be asked for before Triton is first
# imported, which other libraries do when they are.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Tiny models gain nothing from a second thread, and threads that wait for each other spin: tests that run beside their
# own worker processes would take several times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest

from support.records import Book
from support.tiny_models import save_adapter, save_tiny_model

# Its assertions are to say as much as those of a test module.
pytest.register_assert_rewrite("engines.conformance")

# A machine that is busy for a moment is no fault of the code.
hypothesis.settings.register_profile("patient", deadline=None)
hypothesis.settings.load_profile("patient")


@pytest.fixture
def book(tmp_path: Path) -> Iterator[Book]:
    """A ledger, open in a server, as it were."""
    book = Book(tmp_path / "run")
    yield book
    book.close()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def adapters(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three adapters of the tiny model, one of another rank."""
    folder = tmp_path_factory.mktemp("adapters")
    return [save_adapter(tiny_model, folder / str(seed), seed, rank) for seed, rank in ((1, 4), (2, 4), (3, 2))]
