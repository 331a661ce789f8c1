"""Every benchmark runs to its end, with tiny sizes: the quickest in `make test`, all by `make test-benchmarks`."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from support.server_program import ROOT
from support.tiny_models import save_tiny_model

QUICK = ["ledger", "scale"]
#: Left to `make test-more`.
MORE = ["freeze", "serving", "wish_weights"]
SLOWER = [
    "environments",
    "families",
    "judge",
    "learning",
    "lines",
    "live",
    "ranks",
    "sampling",
    "swapping",
    "team",
]
#: These have nothing to measure without a GPU.
ON_CUDA = {"decoding"}
HELPERS = {"common", "cuda_engine", "measuring", "shapes"}
PROGRAMS = (*QUICK, *MORE, *SLOWER, *ON_CUDA, "shapes")

slow = pytest.mark.skipif("OPENCLAW_RL_BENCHMARKS" not in os.environ, reason="make test-benchmarks runs it")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), context=8192)


def test_every_benchmark_is_run_here_if_it_can_be() -> None:
    assert {path.stem for path in (ROOT / "benchmarks").glob("*.py")} == {*QUICK, *MORE, *SLOWER, *ON_CUDA, *HELPERS}


@pytest.mark.parametrize(
    "script",
    [
        *QUICK,
        *(pytest.param(name, marks=pytest.mark.more) for name in MORE),
        *(pytest.param(name, marks=slow) for name in SLOWER),
    ],
)
def test_a_benchmark_runs_to_its_end(script: str, model: Path) -> None:
    environment = {**os.environ, "BENCH_SMOKE": "1", "BENCH_MODEL": str(model)}
    command = [sys.executable, str(ROOT / "benchmarks" / f"{script}.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    # A table has this line below its head.
    assert "----" in done.stdout
    assert "smoke run" in done.stdout


@pytest.mark.parametrize("script", PROGRAMS)
def test_a_benchmark_says_what_it_measures_and_refuses_what_it_does_not_know(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = ROOT / "benchmarks" / f"{script}.py"
    monkeypatch.syspath_prepend(file.parent)

    def run(given: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [str(file), given])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(file), run_name="__main__")
        assert isinstance(ended.value.code, int)
        return ended.value.code, *capsys.readouterr()

    status, said, wrong = run("--help")
    assert (status, wrong) == (0, "")
    assert file.read_text().splitlines()[0].removeprefix('"""') in said
    assert "BENCH_SMOKE" in said
    status, said, wrong = run("--nonsense")
    assert (status, said) == (2, "")
    assert "usage:" in wrong
