"""`openclaw-rl merge`: write a model with an adapter merged into its weights."""

import argparse
from pathlib import Path
from typing import Any

from rich.text import Text

from openclaw_rl.cli.parser import RUN_OPTIONS, add_command, run_config
from openclaw_rl.errors import UserError
from openclaw_rl.terminal import console, progress

DOC = "write a model with an adapter merged into its weights"


def add(commands: Any) -> None:
    parser = add_command(commands, "merge", DOC, run, (*RUN_OPTIONS, "model_name", "cache_dir"))
    parser.add_argument("checkpoint", type=Path, metavar="CKPT", help="a checkpoint, or any PEFT folder of this model")
    parser.add_argument("out", type=Path, metavar="OUT", help="a new folder")


def run(options: argparse.Namespace) -> int:
    from openclaw_rl.engines.local.families import runnable
    from openclaw_rl.engines.local.merge import merge_adapter
    from openclaw_rl.models import fetch_model

    config = run_config(options)
    base = runnable(fetch_model(config.model.model_name, config.run.cache))
    try:
        with progress() as shown:
            merge_adapter(
                base, options.checkpoint, options.out, lambda parts: shown.track(parts, description="Merging")
            )
    except OSError as error:
        raise UserError(f"The model cannot be written to {options.out}: {error.strerror or error}.") from None
    console().print(Text(f"The merged model is in {options.out}"), soft_wrap=True)
    return 0
