"""`--learner-ranks` and `--shard-weights`: what they mean, and what is refused."""

import contextlib
from typing import Any

import pytest

from openclaw_rl.app.checks import check
from openclaw_rl.app.config import Config, load
from openclaw_rl.config.options import ConfigError
from openclaw_rl.engines.local.options import LocalOptions


def configured(**given: Any) -> Config:
    return load(given, {}).config


def test_ranks_are_a_count_or_devices() -> None:
    assert configured().section(LocalOptions).rank_devices() == ("auto",)
    assert configured().section(LocalOptions).rank_devices(train_gpus=4) == ("auto",) * 4
    assert configured(learner_ranks="3", device="cpu").section(LocalOptions).rank_devices() == ("cpu",) * 3
    named = configured(learner_ranks="cuda:2, cuda:3", shard_weights=True).section(LocalOptions)
    assert named.names_gpus
    assert named.rank_devices() == ("cuda:2", "cuda:3")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"learner_ranks": "0"}, "give a count, or devices"),
        ({"learner_ranks": "gpu"}, "give a count, or devices"),
        ({"learner_ranks": "cpu,cuda:0"}, "all run on the CPU or all on CUDA"),
        ({"learner_ranks": "cuda:0,cuda:0"}, "a CUDA device of its own"),
        ({"shard_weights": True}, "--shard-weights needs several --learner-ranks"),
        ({"learner_ranks": "2", "train_gpus": "0,1,2", "num_gpus": 4}, "--train-gpus: these are 3 GPUs"),
        ({"learner_ranks": "cuda:0,cuda:1", "train_gpus": "2,3", "num_gpus": 4}, "leave out one of the two"),
    ],
)
def test_ranks_that_make_no_sense_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check(configured(**given))


@pytest.mark.parametrize(("version", "refused"), [("2.11.0+cu130", True), ("2.13.0+cpu", False), ("3.0", False)])
def test_sharding_needs_a_pytorch_that_can(version: str, refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda _name: version)
    sharded = configured(learner_ranks="2", shard_weights=True, device="cpu")
    with pytest.raises(ConfigError, match=r"needs PyTorch 2\.13 or newer") if refused else contextlib.nullcontext():
        check(sharded)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"learner_ranks": "cuda:0,cuda:1"}, "Ray chooses the GPUs, so give a count"),
        ({"train_gpus": "0,1"}, "--train-gpus 0,1: Ray chooses the GPUs, so give a count"),
        ({"ray_address": "ray://10.0.0.1:10001"}, "give HOST:PORT of the cluster itself"),
    ],
)
def test_what_ray_decides_is_refused(given: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    with pytest.raises(ConfigError, match=words):
        check(configured(launcher="ray", **given))


def test_without_ray_its_launcher_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"--launcher ray needs Ray: pip install 'openclaw-rl\[ray\]'"):
        check(configured(launcher="ray"))
