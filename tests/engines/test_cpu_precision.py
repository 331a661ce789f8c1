"""What `--dtype auto` stands for on a CPU: measured once, kept, and the same for sampler and learner."""

import asyncio
import contextlib
import json
import math
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from openclaw_rl.app.config import Config
from openclaw_rl.engines.factory import Resources
from openclaw_rl.engines.local.factory import LEARNER, SAMPLER
from openclaw_rl.engines.local.model import cpu_precision, kept_measurements, ops
from openclaw_rl.engines.local.model.cpu_precision import FILE, Measurement, choose_on_cpu, measure
from openclaw_rl.engines.local.model.kept_measurements import machine
from openclaw_rl.engines.local.model.packed import NarrowLinear
from openclaw_rl.engines.local.process.learner_worker import open_trainer

FASTER = Measurement({"8 rows": 4.0, "1 row": 1.0}, 0.002)
SLOWER = Measurement({"8 rows": 1.5, "1 row": 0.5}, 0.002)


def never() -> Measurement:
    raise AssertionError("it was measured again")


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Measurement]], None]:
    """Replaces the measurement."""
    return lambda instead: monkeypatch.setattr(cpu_precision, "measure", instead)


@pytest.mark.parametrize(
    ("measurement", "dtype", "reason"),
    [
        (FASTER, "bfloat16", "bfloat16 is 2 × as fast as float32 here"),
        (SLOWER, "float32", "bfloat16 is 0.87 × as fast as float32 here"),
        (Measurement({"8 rows": 4.0}, 0.02), "float32", "bfloat16 gives wrong products here"),
        (Measurement({"8 rows": 4.0}, math.nan), "float32", "bfloat16 gives wrong products here"),
    ],
)
def test_bfloat16_is_chosen_where_it_is_faster_and_right(
    measured: Any, tmp_path: Path, measurement: Measurement, dtype: str, reason: str
) -> None:
    measured(lambda: measurement)
    assert choose_on_cpu(tmp_path) == (dtype, reason)
    measured(never)
    assert choose_on_cpu(tmp_path) == (dtype, reason), "the file says the same"


def test_a_machine_without_such_products_computes_in_float32(measured: Any, tmp_path: Path) -> None:
    def fails() -> Measurement:
        raise RuntimeError("no such kernel\nframe #0")

    measured(fails)
    assert choose_on_cpu(tmp_path) == ("float32", "bfloat16 cannot be computed here: no such kernel")


def test_a_measurement_counts_for_its_processor_and_threads_only(
    measured: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured(lambda: FASTER)
    assert choose_on_cpu(tmp_path).dtype == "bfloat16"
    other = tmp_path / "cpuinfo"
    other.write_text("processor : 0\nmodel name : Other\nflags : amx_bf16\n\nprocessor : 1\nmodel name : X\n")
    measured(lambda: SLOWER)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(kept_measurements, "CPU_INFO", other)
        assert machine().startswith("Other (")
        assert choose_on_cpu(tmp_path).dtype == "float32"
        named = machine()
        other.write_text(other.read_text().replace("amx_bf16", "avx2"))
        assert machine() != named, "the same name with other instructions"
    with monkeypatch.context() as fewer:
        fewer.setattr(torch, "get_num_threads", lambda: 77)
        assert choose_on_cpu(tmp_path).dtype == "float32"
    measured(never)
    assert choose_on_cpu(tmp_path).dtype == "bfloat16", "the first measurement is still there"


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "\x00",
        '{"MACHINE": 1}',
        '{"MACHINE": {}}',
        '{"MACHINE": {"speedups": {}, "error": 0}}',
        '{"MACHINE": {"speedups": {"8 rows": 0}, "error": 0}}',
        '{"MACHINE": {"speedups": {"8 rows": "fast"}, "error": 0}}',
        '{"MACHINE": {"speedups": {"8 rows": 9}, "error": null}}',
    ],
)
def test_a_damaged_file_is_replaced(measured: Any, tmp_path: Path, content: str) -> None:
    (tmp_path / FILE).write_text(content.replace("MACHINE", machine()))
    measured(lambda: SLOWER)
    assert choose_on_cpu(tmp_path).dtype == "float32"
    assert json.loads((tmp_path / FILE).read_text())[machine()]["error"] == SLOWER.error
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


def test_a_folder_that_cannot_be_written_stops_nothing(measured: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    measured(lambda: FASTER)
    for cache in (tmp_path / "file", tmp_path / "file" / "below", None):
        assert choose_on_cpu(cache).dtype == "bfloat16"
    assert choose_on_cpu(tmp_path, keep=False).dtype == "bfloat16"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products that are quick on every machine."""
    monkeypatch.setattr(cpu_precision, "WIDTH", 32)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("ratio", "cases"),
    [(0.05, ["first look"]), (0.3, ["8 rows"]), (3.0, ["8 rows", "64 rows", "512 rows", "backward", "1 row"])],
)
def test_slow_products_end_the_measurement(monkeypatch: pytest.MonkeyPatch, ratio: float, cases: list[str]) -> None:
    def seconds(products: list[Any]) -> float:
        product = products[0]
        is_narrow = isinstance(product.func, NarrowLinear) or any(part.dtype == torch.bfloat16 for part in product.args)
        return 1.0 if is_narrow else ratio

    monkeypatch.setattr(cpu_precision, "seconds", seconds)
    found = measure()
    assert list(found.speedups) == cases
    assert found.speedup == pytest.approx(ratio)
    assert 0 < found.error <= cpu_precision.MAX_ERROR


@pytest.mark.usefixtures("small")
def test_wrong_products_are_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    right = ops.linear_backward

    def wrong(grad: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return right(grad, weight) * (1.02 if weight.dtype == torch.bfloat16 else 1.0)

    monkeypatch.setattr(ops, "linear_backward", wrong)
    monkeypatch.setattr(cpu_precision, "seconds", lambda products: 1.0)
    assert choose_on_cpu(tmp_path) == ("float32", "bfloat16 gives wrong products here")


@pytest.mark.more
async def test_sampler_and_learner_agree_also_after_a_crash(tiny_model: Path, tmp_path: Path) -> None:
    content = {machine(): {"speedups": {"8 rows": 3.0}, "error": 0.002}}
    (tmp_path / FILE).write_text(json.dumps(content))
    given: dict[str, Any] = {"device": "cpu", "lora_rank": 4, "kv_cache_gib": 0.05, "max_sequences": 2}
    settings = Config.of(model_name=str(tiny_model), cache_dir=tmp_path, **given).engine_settings
    async with contextlib.AsyncExitStack() as stack, asyncio.timeout(300):
        sampler: Any = SAMPLER.open(settings, Resources(stack), tiny_model, "tiny")
        stack.push_async_callback(sampler.close)
        await sampler.start()
        assert "on cpu, bfloat16 (bfloat16 is 3 × as fast as float32 here)" in sampler.describe()
        (tmp_path / FILE).write_text(json.dumps({machine(): {"speedups": {"8 rows": 0.1}, "error": 0.002}}))
        pid = sampler.worker_pid
        os.kill(pid, signal.SIGKILL)
        while sampler.worker_pid in (None, pid):
            await asyncio.sleep(0.01)
        assert sampler.ready.dtype == "bfloat16"
        learner: Any = LEARNER.open(settings, Resources(stack), tiny_model, sampler)
        # As on a machine where the weights cannot be shared.
        trainer: Any = open_trainer(None, learner.process.options)  # type: ignore[arg-type]
        assert trainer.decoder.embed.dtype == torch.bfloat16
