"""Runs a Tinker server on this machine's CPU: SkyRL tx with a model from a folder. `make tinker-server` starts it.

    python examples/tinker_server.py [--model FOLDER] [--port 8000] [--data runs/tinker-server]

The server needs an environment of its own (`--python`), because it requires other versions than openclaw-rl.
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

from openclaw_rl.models import fetch_model

CACHE = Path(os.environ.get("OPENCLAW_RL_CACHE", "~/.cache/openclaw-rl")).expanduser()
#: Adapters: one for the base model, and for each client one in training and three to sample from. There is room for a
#: client, for one that was just killed, and for two that have just ended: theirs are freed later too.
BACKEND = {"max_lora_adapters": 17, "max_lora_rank": 8, "train_micro_batch_size": 4, "sample_max_num_sequences": 4}
#: The adapters of a client that is gone are freed after this time.
SESSION_SECONDS = 60
#: Replaces `uv`, with which the server would start its engine in a new environment.
UV = """#!/bin/sh
while [ "$1" != "-m" ]; do shift; done
exec {python} "$@"
"""


def prepare(model: Path, folder: Path) -> Path:
    """A folder that the server's Transformers 4 can read: links to the model, and two files in the old format."""
    target = folder / model.name
    target.mkdir(parents=True, exist_ok=True)
    for path in model.iterdir():
        link = target / path.name
        link.unlink(missing_ok=True)
        link.symlink_to(path.resolve())
    config = read(model / "config.json")
    theta = config.get("rope_theta") or config.get("rope_parameters", {}).get("rope_theta", 10000.0)
    replace(target / "config.json", {**config, "rope_theta": theta})
    tokenizer = read(model / "tokenizer_config.json")
    if tokenizer.get("tokenizer_class") == "TokenizersBackend":
        replace(target / "tokenizer_config.json", {**tokenizer, "tokenizer_class": "PreTrainedTokenizerFast"})
    return target


def read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def replace(path: Path, content: dict[str, Any]) -> None:
    path.unlink()
    path.write_text(json.dumps(content, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a model's folder (default: the embedded model)")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--data", type=Path, default=Path("runs/tinker-server"), help="where it stores checkpoints")
    python_help = "the Python in which the server is installed"
    parser.add_argument("--python", type=Path, default=Path(".venv-tinker/bin/python"), help=python_help)
    given = parser.parse_args()
    data, python = given.data.absolute(), given.python.absolute()
    model = prepare(given.model.absolute() if given.model else fetch_model(None, CACHE), data / "model")
    uv = data / "bin" / "uv"
    uv.parent.mkdir(exist_ok=True)
    uv.write_text(UV.format(python=python))
    uv.chmod(0o755)
    line = [str(python), "-m", "tx.tinker.api", "--base-model", str(model), "--backend", "jax"]
    line += ["--backend-config", json.dumps(BACKEND), "--host", "127.0.0.1", "--port", str(given.port)]
    line += ["--checkpoints-base", str(data / "checkpoints"), "--database-url", f"sqlite:///{data}/tinker.db"]
    line += ["--session-timeout-sec", str(SESSION_SECONDS), "--session-cleanup-interval-sec", str(SESSION_SECONDS // 4)]
    environment = {**os.environ, "PATH": f"{uv.parent}:{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONPATH", None)
    os.execve(python, line, environment)


if __name__ == "__main__":
    main()
