"""`--learner-ranks` and `--shard-weights`: what they mean, and what is refused."""

from typing import Any

import pytest

from openclaw_rl.app.checks import check
from openclaw_rl.app.config import Config, load
from openclaw_rl.config.options import ConfigError
from openclaw_rl.engines.local.options import LocalOptions


def configured(**given: Any) -> Config:
    return load(given, {}).config


def test_ranks_are_a_count_or_devices() -> None:
    assert configured().section(LocalOptions).rank_devices == ("auto",)
    assert configured(learner_ranks="3", device="cpu").section(LocalOptions).rank_devices == ("cpu",) * 3
    named = configured(learner_ranks="cuda:2, cuda:3", shard_weights=True).section(LocalOptions)
    assert (named.rank_devices, named.rank_cuda_numbers) == (("cuda:2", "cuda:3"), ["2", "3"])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"learner_ranks": "0"}, "give a count, or devices"),
        ({"learner_ranks": "gpu"}, "give a count, or devices"),
        ({"learner_ranks": "cpu,cuda:0"}, "all run on the CPU or all on CUDA"),
        ({"learner_ranks": "cuda:0,cuda:0"}, "a CUDA device of its own"),
        ({"shard_weights": True}, "--shard-weights needs two or more --learner-ranks"),
        ({"learner_ranks": "2", "learner_device": "1"}, "--learner-device is for one process"),
    ],
)
def test_ranks_that_make_no_sense_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check(configured(**given))


@pytest.mark.parametrize(
    ("given", "overlap"),
    [
        ({}, True),
        ({"sampler_device": "0,1", "learner_ranks": "cuda:2,cuda:3"}, False),
        ({"sampler_device": "0,1", "learner_ranks": "cuda:1,cuda:2"}, True),
        ({"sampler_device": "0,1", "learner_ranks": "2"}, True),
        ({"sampler_device": "0", "learner_device": "1"}, False),
    ],
)
def test_a_server_of_our_own_and_the_ranks_may_share_gpus(given: dict[str, Any], overlap: bool) -> None:
    assert configured(sampler="vllm", **given).engine_settings.devices_overlap is overlap
