"""Every option has one meaning wherever it is set, mistakes are said in one sentence, and keys are never shown."""

import argparse
import json
import re
import sys
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openclaw_rl.api.options import ApiKey
from openclaw_rl.app.config import FIELDS, Config, Loaded, load
from openclaw_rl.cli import build_parser, main
from openclaw_rl.config.general import PRESETS
from openclaw_rl.config.options import ConfigError, add_flags, option_of, options_list, shown_default
from openclaw_rl.envs.options import FIELDS as DRIVER_FIELDS
from openclaw_rl.types import LossSettings, TrainingSettings

#: What users of the original scripts rely on: (flag, environment variable, default).
SEED_OPTIONS = [
    ("--model-name", "MODEL_NAME", None),
    ("--lora-rank", "LORA_RANK", 32),
    ("--teacher-model-name", "TEACHER_MODEL_NAME", None),
    ("--learning-rate", "LEARNING_RATE", 1e-4),
    ("--batch-size", "BATCH_SIZE", 4),
    ("--max-steps", "MAX_STEPS", 1000),
    ("--loss-fn", "LOSS_FN", "ppo"),
    ("--kl-loss-coef", "KL_LOSS_COEF", 0.0),
    ("--save-interval", "SAVE_INTERVAL", 20),
    ("--resume-from-ckpt", "RESUME_FROM_CKPT", "auto"),
    ("--w-opd", "OPENCLAW_COMBINE_W_OPD", 1.0),
    ("--w-rl", "OPENCLAW_COMBINE_W_RL", 1.0),
    ("--train-epochs", "TRAIN_EPOCHS", 1),
    ("--eval-mode", "EVAL_MODE", False),
    ("--prm-m", "PRM_M", 3),
    ("--prm-temperature", "PRM_TEMPERATURE", 0.6),
    ("--prm-max-tokens", "PRM_MAX_TOKENS", 4096),
    ("--proxy-host", "PROXY_HOST", None),
    ("--proxy-port", "PROXY_PORT", 30000),
    ("--served-model-name", "SERVED_MODEL_NAME", None),
    ("--api-key", "SGLANG_API_KEY", ""),
]


VARIABLES = list(chain.from_iterable(option_of(field).env for field in FIELDS.values()))


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (*VARIABLES, "TINKER_API_KEY", "TINKER_BASE_URL"):
        monkeypatch.delenv(variable, raising=False)


def configured(environment: Mapping[str, str] | None = None, /, **flags: Any) -> Config:
    return load(flags, environment or {}).config


def mistake(environment: Mapping[str, str] | None = None, /, file: Path | None = None, **flags: Any) -> str:
    """What a user is told; always one line."""
    with pytest.raises(ConfigError) as caught:
        load(flags, environment or {}, file)
    message = str(caught.value)
    assert re.fullmatch(r"\S.*[.?]", message), message
    return message


def shown(loaded: Loaded, name: str) -> tuple[str, str]:
    """(value, origin) of an option in the table."""
    return next((value, origin) for option, value, origin in loaded.describe() if option == name)


class TestSources:
    """Flag before environment before file before default."""

    @given(flag=st.booleans(), environment=st.booleans(), file=st.booleans())
    def test_the_first_that_is_given_counts(
        self, tmp_path_factory: pytest.TempPathFactory, flag: bool, environment: bool, file: bool
    ) -> None:
        path = tmp_path_factory.getbasetemp() / "server.toml"
        path.write_text("batch-size = 7" if file else "")
        loaded = load({"batch_size": "5"} if flag else {}, {"BATCH_SIZE": "6"} if environment else {}, path)
        sources = [(flag, 5, "flag"), (environment, 6, "environment BATCH_SIZE"), (file, 7, f"file {path}")]
        expected = next(((value, origin) for given, value, origin in sources if given), (4, "default"))
        assert (loaded.config.training.batch_size, loaded.origins["batch_size"]) == expected
        assert shown(loaded, "--batch-size") == (str(expected[0]), expected[1])

    def test_a_file_may_write_names_either_way(self, tmp_path: Path) -> None:
        path = tmp_path / "server.toml"
        path.write_text('lora-rank = 8\nprm_m = 5\nloss-fn = "cispo"\nprm-temperature = 0\neval-mode = false')
        config = load({}, {}, path).config
        assert (config.model.lora_rank, config.judge.prm_m, config.training.loss_fn, config.judge.prm_temperature) == (
            8,
            5,
            "cispo",
            0.0,
        )

    def test_an_empty_variable_is_not_set(self) -> None:
        loaded = load({}, {"BATCH_SIZE": ""})
        assert (loaded.config.training.batch_size, loaded.origins["batch_size"]) == (4, "default")

    def test_votes_have_two_variables(self) -> None:
        assert configured({"MAJORITY_VOTE_N": "5"}).judge.prm_m == 5
        loaded = load({}, {"MAJORITY_VOTE_N": "5", "PRM_M": "7"})
        assert (loaded.config.judge.prm_m, loaded.origins["prm_m"]) == (7, "environment PRM_M")

    @pytest.mark.parametrize(("text", "value"), [("true", True), ("1", True), ("false", False), ("0", False)])
    def test_switches_in_the_environment(self, text: str, value: bool) -> None:
        assert configured({"EVAL_MODE": text}, method="opd").method.eval_mode is value

    def test_every_option_has_an_origin_and_a_row(self) -> None:
        loaded = load({}, {})
        assert set(loaded.origins) == set(FIELDS)
        assert len(loaded.describe()) == len(FIELDS)


class TestPreset:
    """A preset has defaults of its own; what is given comes first."""

    def test_its_values_are_used_and_shown(self, tmp_path: Path) -> None:
        path = tmp_path / "server.toml"
        path.write_text('preset = "personal"\nw-rl = 0.25')
        loaded = load({"batch_size": "5"}, {"LORA_RANK": "8"}, path)
        config = loaded.config
        assert config.method.method == PRESETS["personal"]["method"]
        assert (config.training.batch_size, config.model.lora_rank, config.method.w_rl) == (5, 8, 0.25)
        assert shown(loaded, "--baseline") == ("batch", "preset personal")
        assert shown(loaded, "--max-steps") == ("1000", "default")

    def test_without_it_the_defaults_stay(self) -> None:
        changed = {name: configured().value(name) for name in PRESETS["personal"]}
        assert all(changed[name] != value for name, value in PRESETS["personal"].items())

    def test_there_is_no_other(self) -> None:
        assert "--preset 'mine'" in mistake(preset="mine")


class TestOptions:
    """The table of options itself."""

    @pytest.mark.parametrize(("flag", "variable", "default"), SEED_OPTIONS)
    def test_the_documented_options(self, flag: str, variable: str, default: Any) -> None:
        name = flag.removeprefix("--").replace("-", "_")
        assert option_of(FIELDS[name]).env[0] == variable
        config = configured()
        assert (config.training_settings.learning_rate if name == "learning_rate" else config.value(name)) == default

    def test_each_has_a_doc_and_variables_of_its_own(self) -> None:
        assert len(set(VARIABLES)) == len(VARIABLES)
        for name, field in FIELDS.items():
            assert option_of(field).env, name
            assert re.fullmatch(r"[A-Z].*\.", field.description or ""), name

    def test_each_has_a_flag(self) -> None:
        parser = argparse.ArgumentParser()
        add_flags(parser, FIELDS)
        flags = set(re.findall(r"--[a-z0-9-]+", parser.format_help()))
        assert {f"--{name.replace('_', '-')}" for name in FIELDS} <= flags
        assert {flag for flag, _, _ in SEED_OPTIONS} | {"--majority-vote-n", "--no-eval-mode"} <= flags

    def test_the_docs_list_every_option_once(self) -> None:
        listed = options_list(FIELDS)
        for name in FIELDS:
            assert listed.count(f"\n- `--{name.replace('_', '-')}`") == 1


class TestMistakes:
    """Each is one sentence that names the option."""

    @pytest.mark.parametrize(
        ("flag", "value", "must_be"),
        [
            ("--batch-size", "0", "at least 1"),
            ("--batch-size", "four", "a whole number"),
            ("--batch-size", "1.5", "a whole number"),
            ("--learning-rate", "0", "above 0"),
            ("--learning-rate", "fast", "a number"),
            ("--learning-rate", "nan", "a finite number"),
            ("--kl-loss-coef", "-1", "at least 0"),
            ("--eval-mode", "maybe", "true or false"),
            ("--lora-dropout", "1", "below 1"),
            ("--majority-vote-threshold", "1.1", "at most 1"),
            ("--proxy-port", "65536", "at most 65535"),
            ("--max-sequences", "0", "at least 1"),
            ("--policy-slots", "1", "at least 2"),
            ("--log-level", "loud", "'debug', 'info', 'warning' or 'error'"),
        ],
    )
    def test_bad_values(self, flag: str, value: str, must_be: str) -> None:
        name = flag.removeprefix("--").replace("-", "_")
        variable = option_of(FIELDS[name]).env[0]
        problem = f"is not valid: it must be {must_be}."
        assert mistake({variable: value}) == f"{flag} '{value}' (from environment {variable}) {problem}"
        assert mistake(**{name: value}) == f"{flag} '{value}' (from flag) {problem}"

    @pytest.mark.parametrize("name", [name for name, field in FIELDS.items() if "float" in str(field.annotation)])
    def test_numbers_are_finite(self, name: str) -> None:
        for value in ("nan", "inf"):
            assert f"--{name.replace('_', '-')}" in mistake(**{name: value})

    @pytest.mark.parametrize(
        ("content", "names"),
        [
            ("batch-sise = 4", "'batch_sise'"),
            ("[training]\nbatch-size = 4", "'training'"),
            ("batch-size = ", "server.toml is not valid TOML"),
            ('batch-size = "many"', "--batch-size 'many' (from file"),
            ("batch-size = [4, 5]", "--batch-size"),
            ("model-name = 5", "--model-name 5"),
            ('model-name = ["a", "b"]', "--model-name"),
            ("api-key = [1]", "--api-key"),
            pytest.param(f"seed = {'[' * 3000}{']' * 3000}", "nested too deeply", id="deep list"),
            pytest.param(f"seed = {'{a=' * 3000}1{'}' * 3000}", "nested too deeply", id="deep table"),
            pytest.param(f"seed = {'9' * 5000}", "server.toml is not valid TOML", id="5,000 digits"),
            pytest.param(f"seed = 0x{'f' * 5000}", "--seed a huge number", id="5,000 hexadecimal digits"),
            pytest.param(f"lora-rank = {'9' * 400}", "at most 9223372036854775807", id="400 digits"),
            pytest.param(f"proxy-port = '{'x' * 5000}'", "x…", id="long text"),
        ],
    )
    def test_in_a_file(self, tmp_path: Path, content: str, names: str) -> None:
        path = tmp_path / "server.toml"
        path.write_text(content)
        assert names in mistake(file=path)

    def test_files_that_cannot_be_read(self, tmp_path: Path) -> None:
        assert "No such file" in mistake(file=tmp_path / "missing.toml")
        assert "Is a directory" in mistake(file=tmp_path)
        (tmp_path / "latin1.toml").write_bytes('model-name = "é"'.encode("latin-1"))
        assert "latin1.toml" in mistake(file=tmp_path / "latin1.toml")

    @pytest.mark.parametrize(
        ("flags", "names"),
        [
            ({"proxy_host": "0.0.0.0"}, ["--proxy-host 0.0.0.0", "--api-key"]),
            ({"proxy_host": "::"}, ["--proxy-host ::", "--api-key"]),
            ({"proxy_host": "192.168.1.2", "api_key": " , "}, ["--proxy-host", "--api-key"]),
            ({"eval_mode": True, "method": "rl"}, ["--eval-mode", "--method opd"]),
            ({"eval_mode": True}, ["--eval-mode", "--method opd"]),
            ({"w_opd": 0, "w_rl": 0}, ["--w-opd", "--w-rl"]),
            ({"baseline": "batch", "batch_size": 1}, ["--baseline", "--batch-size"]),
            ({"step_reward_coef": 1.0}, ["--step-reward-coef", "--baseline group"]),
            ({"step_judge": True, "baseline": "group"}, ["--step-judge", "--step-reward-coef"]),
            ({"judge_base_url": "http://judge/v1"}, ["--judge-base-url", "--judge-model"]),
            ({"judge_model": "judge-1"}, ["--judge-base-url", "--judge-model"]),
            ({"judge_base_url": "judge:8000/v1", "judge_model": "judge-1"}, ["--judge-base-url", "http://"]),
            ({"judge_api_key": "ключ"}, ["--judge-api-key", "ASCII"]),
            ({"judge_api_key": "S3CRET\nX: y"}, ["--judge-api-key", "ASCII"]),
            ({"judge": "custom"}, ["--judge custom", "--custom-rm-path"]),
            ({"judge": "llm", "custom_rm_path": "a.py"}, ["--custom-rm-path", "--judge custom"]),
            ({"judge": "none", "custom_rm_path": "a.py"}, ["--custom-rm-path", "--judge custom"]),
            ({"api_key": "alice=one,alice=two"}, ["--api-key"]),
            ({"api_key": "key-2=one,two"}, ["--api-key"]),
        ],
    )
    def test_contradictions(self, flags: dict[str, Any], names: list[str]) -> None:
        message = mistake(**flags)
        assert all(name in message for name in names)

    def test_what_is_no_contradiction(self) -> None:
        assert configured(eval_mode=True, method="opd").method.eval_mode
        assert configured(w_opd=0).method.w_rl == 1
        assert configured(w_opd=0, w_rl=0, method="rl").method.w_rl == 0
        assert (
            configured(custom_rm_path="a.py").judge.kind == configured(custom_rm_path="a.py", judge="custom").judge.kind
        )
        assert configured(judge_api_key="key\n", judge_base_url="https://judge", judge_model="judge-1").asks_llm

    def test_the_embedded_model_does_not_judge_by_itself(self) -> None:
        assert not configured().asks_llm
        assert configured(judge="llm").asks_llm
        assert not configured(judge="llm").has_capable_llm, "it judges, and is not asked for wishes"
        assert configured(model_name="owner/model").asks_llm
        assert configured(teacher_model_name="owner/model").asks_llm
        assert not configured(model_name="owner/model", judge="feedback").asks_llm
        assert not configured(model_name="owner/model", judge="none").asks_llm
        assert not configured(model_name="owner/model", custom_rm_path="a.py").asks_llm


# No text of ours contains S3, so that to find a secret means that it got out.
secrets = st.builds(
    lambda text, padding: f"S3{text}{padding}",
    st.text(st.characters(min_codepoint=33, max_codepoint=126, exclude_characters=",="), min_size=4),
    st.sampled_from(["", "=", "=="]),
)


class TestKeys:
    """Who may connect, from where, and what is shown of it."""

    @pytest.mark.parametrize(
        ("given_keys", "expected"),
        [
            ("S3CRET", [("key-1", "S3CRET")]),
            ("alice=S3CRET", [("alice", "S3CRET")]),
            ("alice=S3=CRET", [("alice", "S3=CRET")]),
            (" one , bob=two,,three", [("key-1", "one"), ("bob", "two"), ("key-3", "three")]),
            (["alice=one", "two"], [("alice", "one"), ("key-2", "two")]),
            ("c2VjcmV0=", [("key-1", "c2VjcmV0=")]),
            ("c2VjcmV0cw==", [("key-1", "c2VjcmV0cw==")]),
            ("alice=c2VjcmV0cw==", [("alice", "c2VjcmV0cw==")]),
            ("sk-ab=cd", [("key-1", "sk-ab=cd")]),
            ("alice=sk-ab=cd", [("alice", "sk-ab=cd")]),
            ("=ab=cd", [("key-1", "ab=cd")]),
            ("=", [("key-1", "=")]),
            ("", []),
        ],
    )
    def test_forms(self, given_keys: str | list[str], expected: list[tuple[str, str]]) -> None:
        """Also keys in base64, which end with the sign that parts a name from its key."""
        assert [(key.name, key.secret) for key in configured(api_key=given_keys).server.api_keys] == expected

    def test_the_admin_key_is_the_first_key(self) -> None:
        server = configured(api_key="alice=one,two", admin_key="three\n").server
        assert [(key.name, key.secret) for key in server.api_keys] == [
            ("admin", "three"),
            ("alice", "one"),
            ("key-2", "two"),
        ]
        assert configured(admin_key="three").server.host == "0.0.0.0", "the admin key is a key"
        assert "three" not in str(load({"admin_key": "three"}, {}).describe())

    @pytest.mark.parametrize("keys", ["same", "admin=other", "é"])
    def test_an_admin_key_that_cannot_be_told_apart_is_refused(self, keys: str) -> None:
        with pytest.raises(ConfigError, match="key"):
            configured(api_key=keys, admin_key="é" if keys == "é" else "same")

    def test_a_key_without_its_name_has_a_number(self) -> None:
        assert all(key.name for key in configured(api_key="=S3CRET").server.api_keys)

    def test_a_list_in_a_file(self, tmp_path: Path) -> None:
        path = tmp_path / "server.toml"
        path.write_text('api-key = ["alice=one", "two"]')
        assert [key.name for key in load({}, {}, path).config.server.api_keys] == ["alice", "key-2"]

    @pytest.mark.parametrize(
        ("flags", "host"),
        [
            ({}, "127.0.0.1"),
            ({"api_key": "S3CRET"}, "0.0.0.0"),
            ({"api_key": "S3CRET", "proxy_host": "127.0.0.1"}, "127.0.0.1"),
            ({"api_key": "S3CRET", "proxy_host": "192.168.1.2"}, "192.168.1.2"),
            ({"proxy_host": "localhost"}, "localhost"),
            ({"proxy_host": "::1"}, "::1"),
        ],
    )
    def test_only_a_key_opens_the_server(self, flags: dict[str, Any], host: str) -> None:
        assert configured(**flags).server.host == host
        assert shown(load(flags, {}), "--proxy-host")[0] == host

    @given(secrets, st.sampled_from(["", "alice="]))
    def test_a_key_is_not_shown(self, secret: str, owner: str) -> None:
        loaded = load({}, {"SGLANG_API_KEY": owner + secret})
        assert shown(loaded, "--api-key") == ("alice=***" if owner else "key-1=***", "environment SGLANG_API_KEY")
        assert "S3" not in str(loaded.describe()) + repr(loaded.config.server.api_keys)

    @given(secrets)
    def test_a_configuration_that_is_logged_does_not_show_a_key(self, secret: str) -> None:
        loaded = load({"api_key": f"alice={secret}"}, {})
        assert "S3" not in f"{loaded!r} {loaded.config!r} {loaded.config}"

    @given(secrets)
    def test_a_key_is_not_in_an_error(self, secret: str) -> None:
        for flags in (
            {"api_key": f"alice={secret},alice={secret}x"},
            {"api_key": {"alice": secret}},
            {"api_key": secret, "batch_size": 0},
            {"api_key": secret, "eval_mode": True},
        ):
            assert "S3" not in mistake(**flags)

    def test_a_key_does_not_show_itself(self) -> None:
        assert repr(ApiKey("alice", "S3CRET")) == str(ApiKey("alice", "S3CRET")) == "alice=***"


class TestDerived:
    """What follows from other options or from the surroundings."""

    def test_every_training_option_reaches_the_engine(self) -> None:
        numbers = {"learning_rate": 3e-3, "weight_decay": 0.3, "max_grad_norm": 0.7, "max_kl": 0.2, "seed": 5}
        loss = {"loss_fn": "cispo", "eps_clip": 0.1, "eps_clip_high": 0.4, "kl_loss_coef": 0.6}
        given = {"adam_beta1": 0.8, "adam_beta2": 0.9, "train_epochs": 2, **numbers, **loss}
        expected = TrainingSettings(loss=LossSettings("cispo", 0.1, 0.4, 0.6), epochs=2, betas=(0.8, 0.9), **numbers)
        assert configured(**given).training_settings == expected

    @pytest.mark.parametrize(
        ("flags", "rate"),
        [
            ({}, 1e-4),
            ({"lora_rank": 0}, 1e-6),
            ({"lora_rank": 0, "learning_rate": 3e-5}, 3e-5),
            ({"learning_rate": "3e-5"}, 3e-5),
        ],
    )
    def test_the_learning_rate_goes_by_what_is_trained(self, flags: dict[str, Any], rate: float) -> None:
        assert configured(**flags).training_settings.learning_rate == rate
        value, origin = shown(load(flags, {}), "--learning-rate")
        assert (value, origin) == (str(rate), "flag" if "learning_rate" in flags else "default, resolved")

    @pytest.mark.parametrize(
        ("flags", "name"),
        [
            ({}, "smollm2-135m"),
            ({"backend": "tinker"}, "qwen3-4b"),
            ({"model_name": "Qwen/Qwen3-4B-Instruct-2507"}, "qwen3-4b"),
            ({"model_name": "Qwen/Qwen3-8B"}, "qwen3-8b"),
            ({"model_name": "Qwen/Qwen2.5-0.5B-Instruct"}, "qwen2.5-0.5b-instruct"),
            ({"model_name": "/models/My-Model/"}, "my-model"),
            ({"model_name": "/models/llama-3.2-1b"}, "llama-3.2-1b"),
            ({"model_name": "./smollm-q4.gguf"}, "smollm-q4"),
            ({"model_name": "Qwen/Qwen3-8B", "served_model_name": "Mine"}, "Mine"),
        ],
    )
    def test_the_served_name(self, flags: dict[str, Any], name: str) -> None:
        assert configured(**flags).served_name == name
        assert shown(load(flags, {}), "--served-model-name")[0] == name

    def test_the_served_name_of_the_folder_one_is_in(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "my-model").mkdir()
        monkeypatch.chdir(tmp_path / "my-model")
        assert configured(model_name=".").served_name == "my-model"

    def test_auto_is_tinker_when_there_is_an_account(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert configured().backend == "local"
        monkeypatch.setenv("TINKER_API_KEY", "x")
        assert configured().backend == "tinker"
        assert configured(backend="local").backend == "local"
        assert shown(load({}, {}), "--backend") == ("tinker", "default, resolved")

    @pytest.mark.parametrize("variable", ["TINKER_BASE_URL", "TINKER_HOST", "TINKER_ENDPOINT"])
    def test_auto_is_tinker_when_there_is_a_server_of_ones_own(self, variable: str) -> None:
        assert configured({variable: "http://localhost:1"}).backend == "tinker"

    @pytest.mark.parametrize("engine", ["vllm", "sglang"])
    def test_a_backend_that_only_samples_is_the_sampler(self, engine: str) -> None:
        loaded = load({"backend": engine}, {})
        assert shown(loaded, "--sampler") == (engine, "flag")
        assert shown(loaded, "--backend") == ("local", "default, resolved")
        with pytest.raises(ConfigError, match="--backend"):
            load({"backend": engine, "sampler": "local"}, {})

    def test_flags_as_other_servers_have_them(self) -> None:
        options = build_parser().parse_args(["serve", "--model-path", "m", "--port", "8000", "--host", "127.0.0.1"])
        assert (options.model_name, options.proxy_port, options.proxy_host) == ("m", "8000", "127.0.0.1")
        assert build_parser().parse_args(["eval", "--model-path", "m"]).model_path == "m"
        published = "--model-path m --port 8000 --backend sglang --enable-rl-intercept --rl-buffer-dir ./rl_buffer"
        assert build_parser().parse_args(["serve", *published.split()]).capture is True

    def test_choices_may_be_written_in_capitals(self) -> None:
        assert configured({"LOG_LEVEL": "INFO", "METHOD": "RL"}).method.method == "rl"

    def test_a_key_that_no_header_can_carry_is_refused(self) -> None:
        assert "ASCII" in mistake(api_key="schlüssel")


class TestCommandLine:
    """What `openclaw-rl` prints and returns."""

    @staticmethod
    def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
        """What a user is told when a command is refused: one line on stderr, nothing else, status 2."""
        assert main(arguments) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert re.fullmatch(r"openclaw-rl: \S.*\n", err), err
        return err

    def test_dry_run_shows_every_value_and_its_origin(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tiny_model: Path
    ) -> None:
        monkeypatch.setenv("BATCH_SIZE", "6")
        arguments = [
            "serve",
            "--dry-run",
            "--model-name",
            str(tiny_model),
            "--api-key",
            "alice=S3CRET",
            "--api-key",
        ]
        assert main([*arguments, "S3COND", "--majority-vote-n", "5"]) == 0
        out, err = capsys.readouterr()
        rows = {cells[1]: cells[2:4] for line in out.splitlines() if len(cells := re.split(r"\s*│\s*", line)) > 4}
        assert set(rows) >= {f"--{name.replace('_', '-')}" for name in FIELDS}
        assert rows["--batch-size"] == ["6", "environment BATCH_SIZE"]
        assert rows["--model-name"][1] == rows["--prm-m"][1] == "flag"
        assert rows["--api-key"] == ["alice=***, key-2=***", "flag"]
        assert rows["--prm-m"][0] == "5"
        assert "S3C" not in out + err

    def test_dry_run_says_what_happens_without_a_value(
        self, capsys: pytest.CaptureFixture[str], tiny_model: Path
    ) -> None:
        assert main(["serve", "--dry-run", "--no-environment", "--model-name", str(tiny_model), "--no-notes"]) == 0
        lines = capsys.readouterr().out.splitlines()
        rows = {cells[1]: cells[2] for line in lines if len(cells := re.split(r"\s*│\s*", line)) == 5}
        assert not {name for name, value in rows.items() if value in ("", "none", "None", "True", "False")}
        assert (rows["--gate"], rows["--wandb-project"], rows["--notes"]) == ("no gate", "off", "off")
        assert rows["--max-context-tokens"] == "what the model allows, at most 32768"

    @pytest.mark.parametrize("fields", [FIELDS, DRIVER_FIELDS])
    def test_the_docs_say_what_happens_without_a_value(self, fields: dict) -> None:
        assert not {name for name, field in fields.items() if shown_default(field) in ("", "none", "None")}

    def test_dry_run_reads_a_file(self, capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny_model: Path) -> None:
        path = tmp_path / "server.toml"
        path.write_text(f'model-name = "{tiny_model}"\nmax-steps = 12')
        assert main(["serve", "--dry-run", "--config", str(path)]) == 0
        out = capsys.readouterr().out
        assert re.search(r"--max-steps +│ 12 +│ file ", out)
        assert out.endswith("Nothing was started.\n")

    @pytest.mark.parametrize(
        ("arguments", "hint"),
        [
            (["--lora-rnak", "8"], "--lora-rnak; did you mean --lora-rank?"),
            (["--lora_rank=8"], "--lora_rank; did you mean --lora-rank?"),
            (["--lora", "8"], "There is no option --lora"),
            (["--xyzzy"], "There is no option --xyzzy. See openclaw-rl serve --help."),
        ],
    )
    def test_unknown_options(self, capsys: pytest.CaptureFixture[str], arguments: list[str], hint: str) -> None:
        assert hint in self.refused(capsys, "serve", *arguments)

    def test_a_mistyped_key_option_does_not_show_the_key(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert "S3CRET" not in self.refused(capsys, "serve", "--api-kye", "S3CRET")
        assert "S3CRET" not in self.refused(capsys, "serve", "--api-kye=S3CRET")

    def test_no_command_shows_the_commands(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main([]) == 0
        out, err = capsys.readouterr()
        assert "serve a model" in out
        assert not err

    @pytest.mark.parametrize(
        ("arguments", "names"),
        [
            (["sreve"], "sreve"),
            (["serve", "--batch-size", "0"], "--batch-size '0'"),
            (["serve", "--batch-size"], "--batch-size"),
            (["serve", "--proxy-host", "0.0.0.0"], "--api-key"),
            (["serve", "--config", "/no/such.toml"], "/no/such.toml"),
            (["serve", "--dry-run", "--model-name", "/no/such/model"], "/no/such/model"),
            (["serve", "--dry-run", "--model-name", "/no/such.gguf"], "/no/such.gguf"),
            (["serve", "--dry-run", "--backend", "tinker"], "--backend local"),
            *(
                ([command, *more, option, "x" * 5000], "too long")
                for command, *more, option in (
                    ("serve", "--dry-run", "--model-name"),
                    ("serve", "--dry-run", "--teacher-model-name"),
                    ("serve", "--run-dir"),
                    ("serve", "--config"),
                    ("demo", "--out"),
                )
            ),
        ],
    )
    def test_refusals(self, capsys: pytest.CaptureFixture[str], arguments: list[str], names: str) -> None:
        assert names in self.refused(capsys, *arguments)

    def test_a_folder_that_holds_no_model(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        refusal = self.refused(capsys, "serve", "--dry-run", "--model-name", str(tmp_path))
        assert f"{tmp_path} is not a model folder" in refusal

    @pytest.mark.parametrize(
        ("config", "reason"),
        [
            ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
            ({"architectures": ["LlamaForCausalLM"], "quantization_config": {"quant_method": "hqq"}}, "quantised"),
        ],
    )
    def test_a_model_that_cannot_be_run(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path, config: dict, reason: str
    ) -> None:
        for name in ("tokenizer.json", "model.safetensors"):
            (tmp_path / name).touch()
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert reason in self.refused(capsys, "serve", "--dry-run", "--model-name", str(tmp_path))

    def test_a_model_of_which_a_part_is_missing(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        for name in ("tokenizer.json", "config.json", "model-00001-of-00002.safetensors"):
            (tmp_path / name).touch()
        shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
        refusal = self.refused(capsys, "serve", "--dry-run", "--model-name", str(tmp_path))
        assert "model-00002-of-00002.safetensors" in refusal

    def test_a_cuda_device_that_is_not_there(
        self, capsys: pytest.CaptureFixture[str], tiny_model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
        refusal = self.refused(capsys, "serve", "--dry-run", "--model-name", str(tiny_model), "--device", "cuda")
        assert "CUDA" in refusal

    def test_a_context_that_the_model_is_not_made_for(
        self, capsys: pytest.CaptureFixture[str], tiny_model: Path
    ) -> None:
        serve = ("serve", "--dry-run", "--model-name", str(tiny_model), "--max-context-tokens")
        assert main([*serve, "512"]) == 0
        capsys.readouterr()
        refusal = self.refused(capsys, *serve, "513")
        assert "--max-context-tokens 513 is more than the model's 512." in refusal

    @pytest.mark.parametrize(
        ("package", "given"), [("wandb", ("--wandb-project", "x")), ("tensorboard", ("--tensorboard",))]
    )
    def test_a_package_that_is_missing(
        self,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
        tiny_model: Path,
        package: str,
        given: tuple[str, ...],
    ) -> None:
        """Also where a folder has its name, as Weights & Biases leaves one."""
        serve = ("serve", "--dry-run", "--model-name", str(tiny_model), *given)
        monkeypatch.setitem(sys.modules, package, None)
        expected = f"{given[0]} needs the package: pip install {package}."
        assert expected in self.refused(capsys, *serve)
        monkeypatch.setitem(sys.modules, package, ModuleType(package))
        sys.modules[package].__file__ = None
        assert expected in self.refused(capsys, *serve)
        assert main([*serve, "--max-steps", "0"]) == 0

    def test_brackets_in_values_are_shown_as_they_are(
        self, capsys: pytest.CaptureFixture[str], tiny_model: Path
    ) -> None:
        assert main(["serve", "--dry-run", "--model-name", str(tiny_model), "--run-dir", "runs/[/a]"]) == 0
        assert "runs/[/a]" in capsys.readouterr().out

    @pytest.mark.parametrize("arguments", [["--help"], ["serve", "--help"], ["--version"]])
    def test_help_is_no_mistake(self, capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
        with pytest.raises(SystemExit) as left:
            main(arguments)
        assert left.value.code == 0
        assert "openclaw-rl" in capsys.readouterr().out
