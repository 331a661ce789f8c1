"""GPUs as counts and lists, and their assignment to the roles of a server."""

from typing import Any

import pytest

from openclaw_rl.app.config import load
from openclaw_rl.config.options import ConfigError
from openclaw_rl.engines.gpus import Split, Visible, environment_of

EIGHT = Visible((80 << 30,) * 8)


def split(visible: Visible = EIGHT, **given: Any) -> Split:
    return load(given, {}).config.gpus.split(visible)


def test_counts_take_the_lowest_numbers_in_the_order_of_the_published_script() -> None:
    shown = split(train_gpus="4", rollout_gpus="2", judge_gpus="1", teacher_gpus="1")
    assert shown == Split((0, 1, 2, 3), ((4, 5),), ((6, 7),))


def test_lists_are_taken_as_they_are_and_counts_go_around_them() -> None:
    assert split(train_gpus="2", rollout_gpus="0,2", judge_gpus="7,") == Split((1, 3), ((0, 2),), ((7,),))


def test_without_a_choice_every_process_uses_what_it_sees() -> None:
    assert split() == Split() == split(train_gpus="0", num_gpus=8)


@pytest.mark.parametrize(
    ("size", "servers"), [(1, ((0,), (1,), (2,), (3,))), (2, ((0, 1), (2, 3))), (4, ((0, 1, 2, 3),))]
)
def test_a_size_of_one_server_makes_several_of_them(size: int, servers: tuple[tuple[int, ...], ...]) -> None:
    assert split(rollout_gpus="4", rollout_tp=size).policy == servers
    assert split(judge_gpus="4", judge_tp=size).other == servers


def test_roles_may_share_a_gpu_if_lists_say_so() -> None:
    shared = split(train_gpus="0,", rollout_gpus="0,1")
    assert shared.shares_gpus
    assert not split(train_gpus="1", rollout_gpus="1").shares_gpus


def test_without_a_count_of_gpus_any_number_is_assigned() -> None:
    assert split(Visible(None), train_gpus="2", rollout_gpus="9,") == Split((0, 1), ((9,),), ())


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"TRAIN_GPUS": "0,1,2,3", "ROLLOUT_GPUS": "4,5,6,7"}, Split((0, 1, 2, 3), ((4, 5, 6, 7),), ())),
        ({"ACTOR_GPUS": "4", "ROLLOUT_GPUS": "2", "TP": "1"}, Split((0, 1, 2, 3), ((4,), (5,)), ())),
        ({"PRM_GPUS": "1", "PRM_TEACHER_GPUS": "1", "PRM_TP": "1"}, Split((), (), ((0,), (1,)))),
    ],
)
def test_the_variables_of_the_published_scripts_are_read(variables: dict[str, str], expected: Split) -> None:
    assert load({}, variables).config.gpus.split(EIGHT) == expected


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            {"train_gpus": "4", "rollout_gpus": "2", "num_gpus": 4},
            r"--train-gpus 4 \+ --rollout-gpus 2 are 6 GPUs, and there are 4",
        ),
        ({"train_gpus": "6", "rollout_gpus": "0,1,2"}, r"--train-gpus 6 \+ 3 named ones are 9 GPUs, and there are 8"),
        ({"rollout_gpus": "0,8"}, "--rollout-gpus names GPU 8, and there are 8, which are numbered from 0"),
        ({"rollout_gpus": "3", "rollout_tp": 2}, "these are 3 GPUs, and --rollout-tp 2 leaves 1 over"),
        ({"train_gpus": "two"}, "give a count of GPUs such as 4, or their numbers such as 0,1"),
        ({"train_gpus": "-1"}, "give a count of GPUs"),
        ({"judge_gpus": "1,1"}, "a GPU is named twice"),
    ],
)
def test_what_cannot_be_is_refused_with_the_arithmetic(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        split(**given)


def test_numbers_count_the_gpus_that_this_process_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert environment_of((0, 1)) == {"CUDA_VISIBLE_DEVICES": "0,1"}
    assert environment_of(()) == {}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert environment_of((1,)) == {"CUDA_VISIBLE_DEVICES": "6"}
