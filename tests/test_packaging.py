"""What is shipped: the wheel's files, the version, and an image that can be built from the repository."""

import fnmatch
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from openclaw_rl import __version__
from openclaw_rl.app.config import load
from openclaw_rl.cli import COMMANDS, build_parser, main
from openclaw_rl.cli.parser import given_flags
from openclaw_rl.config.options import ConfigError

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_file_that_the_package_reads_is_in_the_wheel() -> None:
    source = ROOT / "src" / "openclaw_rl"
    patterns = PROJECT["tool"]["setuptools"]["package-data"]
    for path in source.rglob("*"):
        if path.is_dir() or path.suffix in (".py", ".pyc"):
            continue
        packages = [folder for folder in path.parents if (folder / "__init__.py").is_file()]
        package = packages[0]
        name = ".".join(("openclaw_rl", *package.relative_to(source).parts))
        inside = str(path.relative_to(package))
        assert any(fnmatch.fnmatch(inside, pattern) for pattern in patterns.get(name, ())), f"{path} is not shipped"


def test_the_version_is_written_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert PROJECT["project"]["dynamic"] == ["version"]
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"openclaw-rl {__version__}\n"
    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text()


def instructions() -> list[str]:
    text = re.sub(r"\\\n\s*", "", (ROOT / "Dockerfile").read_text())
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def test_the_image_is_built_from_files_that_are_there() -> None:
    """There is no builder here, so this holds what can be held without one."""
    lines = instructions()
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copied = [
        word for line in lines if line.startswith("COPY ") and "--from" not in line for word in line.split()[1:-1]
    ]
    assert set(copied) == set(allowed)
    assert all((ROOT / name).exists() for name in copied)
    known = {"FROM", "ARG", "RUN", "COPY", "WORKDIR", "USER", "ENV", "VOLUME", "EXPOSE", "HEALTHCHECK", "STOPSIGNAL"}
    assert {line.split()[0] for line in lines} == known | {"ENTRYPOINT", "CMD"}
    assert lines.index("USER owner") < lines.index('ENTRYPOINT ["openclaw-rl"]')
    variables = {name for line in lines if line.startswith("ENV") for name in re.findall(r"(\w+)=", line)}
    assert variables == {"RUN_DIR", "OPENCLAW_RL_CACHE", "HF_HOME"}


def test_the_container_listens_where_it_can_be_reached_and_only_with_a_key() -> None:
    (command,) = [json.loads(line.removeprefix("CMD ")) for line in instructions() if line.startswith("CMD ")]
    flags = given_flags(build_parser().parse_args(command))
    assert load(flags, {"SGLANG_API_KEY": "me=S3CRET"}).config.server.host == "0.0.0.0"
    with pytest.raises(ConfigError, match="--api-key"):
        load(flags, {})


def test_bash_completes_commands_flags_and_values() -> None:
    offered = "\n".join(
        f"""
COMP_WORDS=({line} "")
COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
_openclaw_rl
echo "${{COMPREPLY[@]}}"
"""
        for line in ("openclaw-rl", "openclaw-rl serve", "openclaw-rl serve --loss-fn", "openclaw-rl connect")
    )
    script = f"source <({sys.executable} -m openclaw_rl completion bash)\n{offered}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    commands, flags, losses, clients = (line.split() for line in done.stdout.splitlines())
    assert {"serve", "connect", "doctor"} <= set(commands)
    assert {"--model-name", "--api-key"} <= set(flags)
    assert losses == ["ppo", "importance_sampling", "cispo"]
    assert {"codex", "claude-code"} <= set(clients)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_command_is_completed(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for command in COMMANDS:
        assert command.__name__.rpartition(".")[2].strip("_") in script


def test_without_a_command_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "COMMAND" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["servee"], "There is no command 'servee'; did you mean serve?"),
        (["connect", "claude"], "There is no client 'claude'; did you mean claude-code?"),
        (["quux"], "There is no command 'quux'. See openclaw-rl --help."),
    ],
)
def test_the_nearest_word_is_named(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert capsys.readouterr().err == f"openclaw-rl: {said}\n"
