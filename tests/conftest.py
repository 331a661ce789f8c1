"""Settings and fixtures that all tests share."""

import functools
import gc
import os
import signal
import ssl
from collections.abc import Iterator
from pathlib import Path

# What is imported stays: the garbage collector looks at it neither now nor later (`pytest_collection_finish`).
gc.disable()

# Without a GPU, kernels are tested in Triton's interpreter. The variable must be set before any library imports Triton.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Tiny models gain nothing from a second thread, and waiting threads spin: with worker processes beside them, tests
# would take several times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# No test asks the Hugging Face Hub: where a network drops packets, each question would take seconds.
os.environ.setdefault("HF_ENDPOINT", "http://127.0.0.1:9")

# The guard's examinations cost seconds of every learning server. Those that are about it say --guard.
os.environ.setdefault("GUARD", "false")

# What a tiny model draws differs between precisions, and the default is the one that is fastest on this machine.
os.environ.setdefault("DTYPE", "float32")

# A shell starts jobs in the background with Ctrl-C ignored, and what tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Every client of httpx and of OpenAI reads all certificates of the machine, which takes 50 ms. Tests make thousands.
ssl.create_default_context = functools.cache(ssl.create_default_context)

import hypothesis
import pytest

import openclaw_rl.cli
from support import properties
from support.records import Book
from support.tiny_models import save_adapters, save_tiny_model

# Every command in the test's own process would build the same parser of all commands, which takes as long.
openclaw_rl.cli.build_parser = functools.cache(openclaw_rl.cli.build_parser)

# Its assertions are to say as much as those of a test module.
pytest.register_assert_rewrite("engines.conformance")

properties.register()


def pytest_configure(config: pytest.Config) -> None:
    fewer = "not more" in config.getoption("markexpr")
    hypothesis.settings.load_profile(properties.SOME if fewer else properties.ALL)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every property is tried with all of its examples in `make test-more`."""
    for item in items:
        if properties.tries_all() and hypothesis.is_hypothesis_test(getattr(item, "obj", None)):
            item.add_marker("more")


def pytest_collection_finish() -> None:
    gc.freeze()
    # Nor need it look after every few hundred objects.
    gc.set_threshold(20_000, 20, 20)
    gc.enable()


@pytest.fixture(autouse=True)
def same_umask() -> Iterator[None]:
    """Commands that run in the test's own process make new files private, as they should in theirs."""
    before = os.umask(0o022)
    os.umask(before)
    yield
    os.umask(before)


@pytest.fixture
def book(tmp_path: Path) -> Iterator[Book]:
    """A ledger, open as in a server."""
    book = Book(tmp_path / "run")
    yield book
    book.close()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def adapters(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return save_adapters(tiny_model, tmp_path_factory.mktemp("adapters"))


def pytest_unconfigure() -> None:
    # Otherwise Triton counts all that it still holds as leaks, in fifty lines after the result.
    gc.unfreeze()
