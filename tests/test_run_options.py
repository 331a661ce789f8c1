"""What a run remembers of how it was started, and who makes use of it."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openclaw_rl.app.config import OPTIONS_FILE, keep_options, load, load_for_run, to_toml
from openclaw_rl.cli import main
from openclaw_rl.config.options import ConfigError
from openclaw_rl.types import State
from support.properties import examples
from support.records import Book

VALUES = st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text()


def kept(run_dir: Path, **flags: Any) -> dict[str, Any]:
    """The options that a server remembers which was given these flags."""
    keep_options(load({"run_dir": run_dir, **flags}, environment={}).config)
    return tomllib.loads((run_dir / OPTIONS_FILE).read_text())


@examples(100)
@given(st.dictionaries(st.from_regex(r"[a-z]+(_[a-z]+)*", fullmatch=True), VALUES))
def test_a_file_says_what_was_written(options: dict[str, Any]) -> None:
    text = to_toml(options)
    assert tomllib.loads(text) == {name.replace("_", "-"): value for name, value in options.items()}


def test_a_server_started_with_the_file_has_the_same_options(tmp_path: Path) -> None:
    flags: dict[str, Any] = {
        "method": "topk-select",
        "topk_k": 8,
        "record": True,
        "learning_rate": 1e-6,
        "judge": "llm",
    }
    kept(tmp_path, **flags, lora_rank=8, batch_timeout=2.5, custom_loss_function_path="my.package:loss")
    again = load({"run_dir": tmp_path}, environment={}, file=tmp_path / OPTIONS_FILE).config
    assert (
        again
        == load(
            {"run_dir": tmp_path, **flags, "lora_rank": 8, "batch_timeout": 2.5}
            | {"custom_loss_function_path": "my.package:loss"},
            environment={},
        ).config
    )


def test_secrets_and_what_belongs_to_one_start_are_not_kept(tmp_path: Path) -> None:
    told = kept(tmp_path, api_key="alice=S3CRET", judge_api_key="S3CRET", resume_from_ckpt="none", proxy_port=31000)
    assert told == {"proxy-port": 31000}
    assert "S3CRET" not in (tmp_path / OPTIONS_FILE).read_text()


def test_the_passwords_of_urls_are_not_kept(tmp_path: Path) -> None:
    urls = "http://a:S3CRET,S3CRET@one:8001,http://b:S3CRET@two:8002/v1"
    told = kept(
        tmp_path,
        judge_base_url="https://alice:S3CRET@judge.example.org/v1",
        judge_model="judge",
        tinker_base_url="http://S3CRET@host:9",
        vllm_url=urls,
        sglang_url=urls,
        teacher_url=urls,
    )
    without = "http://one:8001,http://two:8002/v1"
    assert told == {
        "judge-base-url": "https://judge.example.org/v1",
        "judge-model": "judge",
        "tinker-base-url": "http://host:9",
        "vllm-url": without,
        "sglang-url": without,
        "teacher-url": without,
    }
    assert "S3CRET" not in (tmp_path / OPTIONS_FILE).read_text()
    assert "passwords in URLs, are left out" in (tmp_path / OPTIONS_FILE).read_text()


def test_places_are_kept_wherever_the_next_command_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("model", "run", "ledger"):
        (tmp_path / name).mkdir()
    for name in ("judge.py", "method.py"):
        (tmp_path / name).touch()
    flags = {"model_name": "./model", "rl_buffer_dir": "ledger", "custom_rm_path": "judge.py:mine"}
    flags["method"] = "method.py:Mine"
    assert kept(tmp_path / "run", **flags, teacher_model_name="some/teacher") == {
        "model-name": str(tmp_path / "model"),
        "rl-buffer-dir": str(tmp_path / "ledger"),
        "custom-rm-path": f"{tmp_path / 'judge.py'}:mine",
        "teacher-model-name": "some/teacher",
        "method": f"{tmp_path / 'method.py'}:Mine",
    }


def test_commands_take_what_the_run_is_and_not_who_judges_or_serves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SGLANG_API_KEY", raising=False)
    served = {"proxy_host": "0.0.0.0", "api_key": "S3CRET", "custom_rm_path": "mine.py"}
    kept(tmp_path, **served, method="opd", eval_mode=True, keep_checkpoints=9, lora_rank=8)
    config = load_for_run({"run_dir": tmp_path, "judge": "llm"}).config
    assert (
        config.method.method,
        config.method.eval_mode,
        config.training.keep_checkpoints,
        config.model.lora_rank,
    ) == (
        "opd",
        True,
        9,
        8,
    )
    assert (config.judge.judge, config.judge.custom_rm_path, config.server.proxy_host) == ("llm", None, None)
    assert load_for_run({"run_dir": tmp_path, "keep_checkpoints": 2}).config.training.keep_checkpoints == 2
    monkeypatch.setenv("KEEP_CHECKPOINTS", "4")
    assert load_for_run({"run_dir": tmp_path}).config.training.keep_checkpoints == 4


def test_who_only_serves_a_run_does_not_say_how_it_learned(tmp_path: Path) -> None:
    assert kept(tmp_path, method="rl", max_steps=0) == {"method": "rl", "max-steps": 0}
    learned = kept(tmp_path, method="opd", w_opd=0.5)
    assert learned == {"method": "opd", "w-opd": 0.5}
    for only_serving in ({"max_steps": 0}, {"capture": False}, {"judge": "none"}):
        assert kept(tmp_path, **only_serving) == learned


def test_a_run_of_text_stays_with_its_api_wherever_that_is_now(tmp_path: Path) -> None:
    for port in (1, 2):
        kept(tmp_path, sampler="upstream", upstream_url=f"http://127.0.0.1:{port}/v1", upstream_model="theirs")
    config = load_for_run({"run_dir": tmp_path}).config
    assert (config.sampler.name, config.policy_name) == ("upstream", "theirs")
    assert config.sampler.urls(config.engine_settings) == ["http://127.0.0.1:2/v1"]
    assert not config.learns


def test_a_configuration_file_is_taken_instead(tmp_path: Path) -> None:
    kept(tmp_path, method="opd")
    other = tmp_path / "other.toml"
    other.write_text("w-rl = 0.5\n")
    config = load_for_run({"run_dir": tmp_path}, other).config
    assert (config.method.method, config.method.w_rl) == ("combine", 0.5)


def test_commands_find_the_ledger_elsewhere(tmp_path: Path, book: Book, capsys: pytest.CaptureFixture[str]) -> None:
    book.put(State.READY)
    run_dir = tmp_path / "other"
    run_dir.mkdir()
    kept(run_dir, rl_buffer_dir=book.folder)
    assert main(["status", "--run-dir", str(run_dir), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["turns"]["ready"] == 1


def test_a_file_that_was_broken_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / OPTIONS_FILE).write_text("method = ")
    assert main(["status", "--run-dir", str(tmp_path)]) == 2
    assert f"{tmp_path / OPTIONS_FILE} is not valid TOML" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / OPTIONS_FILE).mkdir()
    with pytest.raises(ConfigError, match=r"options\.toml cannot be written .*--run-dir"):
        kept(tmp_path)
