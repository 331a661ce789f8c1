"""reasoning-gym's generators as an environment. Most of these tests need the package."""

import importlib.util
import json
import sys
from itertools import islice
from types import ModuleType
from typing import Any

import pytest

from openclaw_rl.config.options import ConfigError
from openclaw_rl.envs.registry import make_environment
from support.policies import attempt, says

needs_package = pytest.mark.skipif(
    importlib.util.find_spec("reasoning_gym") is None, reason="reasoning-gym is not installed: openclaw-rl[reasoning]"
)
SMALL = ["chain_sum", "count_bits", "letter_counting"]


def test_a_missing_package_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs the package reasoning-gym: pip install 'openclaw-rl\[reasoning\]'"):
        make_environment("reasoning")


@pytest.mark.parametrize(
    ("source", "dangerous"),
    [
        ("def score_answer(self, answer, entry): return eval(answer)", True),
        ("def score_answer(self, answer, entry): return parse_expr(user_answer, {})", True),
        ("def score_answer(self, answer, entry): return eval(entry['problem'])", False),
    ],
)
def test_checkers_that_run_answers_are_known_by_their_source(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, source: str, dangerous: bool
) -> None:
    from openclaw_rl.envs.reasoning import runs_answers

    module = ModuleType("some_generator")
    module.__file__ = str(tmp_path / "some_generator.py")
    (tmp_path / "some_generator.py").write_text(source)
    monkeypatch.setitem(sys.modules, "some_generator", module)
    assert runs_answers(type("Dataset", (), {"__module__": "some_generator"})) == dangerous


@needs_package
async def test_right_answers_are_solved_and_others_are_not() -> None:
    environment = make_environment("reasoning", {"datasets": SMALL})
    for task in islice(environment.tasks("held-out", 3), 30):
        episode: Any = environment.open(task)
        messages = await episode.start()
        assert [message["role"] for message in messages] == ["system", *["user", "assistant"] * 2, "user"]
        _, right = await attempt(
            episode, lambda messages, turn, e=episode: says(f"<answer>{e._entry['answer']}</answer>")
        )
        assert (right.reward, right.solved) == (1.0, True)
        for text in ("", "I do not know", "<answer></answer>", "<answer>no</answer>"):
            steps, wrong = await attempt(environment.open(task), lambda messages, turn, t=text: says(t))
            assert (wrong.solved, wrong.reward < 1, bool(steps[0].hint)) == (False, True, True)


@needs_package
def test_the_same_seed_gives_the_same_questions_and_splits_share_none() -> None:
    def questions(split: str, seed: int) -> list[str]:
        environment = make_environment("reasoning", {"datasets": ",".join(SMALL)})
        return [task.data["messages"][-1]["content"] for task in islice(environment.tasks(split, seed), 60)]

    assert questions("train", 1) == questions("train", 1) != questions("train", 2)
    assert not set(questions("train", 1)) & set(questions("held-out", 1))


@needs_package
@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"datasets": "chess"}, "has no dataset chess"),
        ({"datasets": "countdown"}, "countdown is refused: its checker runs the model's answer as code"),
        ({"datasets": "chain_sum", "config": {"digits": 2}}, "does not take these settings"),
        ({"config": {"min_digits": 2}}, "takes one dataset"),
        ({"examples": -1}, "from 0 to 8, not -1"),
    ],
)
def test_wrong_settings_are_one_sentence(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        make_environment("reasoning", settings)


@needs_package
def test_settings_of_a_generator_are_used() -> None:
    environment = make_environment("reasoning", {"datasets": "chain_sum", "config": {"min_digits": 3, "max_digits": 3}})
    text = json.dumps(next(environment.tasks("train", 0)).data["messages"][-1]["content"])
    numbers = [word for word in text.split() if word.isdigit()]
    assert numbers
    assert all(len(number) == 3 for number in numbers)
