"""`openclaw-rl merge`: a learned policy as a model for other programs: Transformers, vLLM, llama.cpp, Ollama."""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from openclaw_rl.app.config import Config
from openclaw_rl.cli.checkpoints import newest_of_line
from openclaw_rl.cli.parser import KEY_OPTIONS, RUN_OPTIONS, KeepExamples, add_command, run_config
from openclaw_rl.client import Client
from openclaw_rl.errors import UserError
from openclaw_rl.ledger.run_dir import server_url
from openclaw_rl.terminal import agrees, console, progress, say

if TYPE_CHECKING:
    from openclaw_rl.engines.local.gguf_export import GgufExport

DOC = "write a model with an adapter merged into its weights, also for llama.cpp and Ollama"
#: As in `gguf_export`, which is slow to import.
TYPES = ("f32", "f16", "bf16", "q8_0")
EXAMPLE = """To run what you have learned in Ollama:
  openclaw-rl merge runs/default/checkpoints/FOLDER my-model --gguf f16
  ollama create my-model -f my-model/Modelfile
  ollama run my-model
'ollama create … --quantize q4_K_M' makes it a quarter of the size.
In llama.cpp: llama-server -m my-model/model.gguf
'openclaw-rl checkpoints' lists the folders."""
MODEL, ADAPTER, MODELFILE = "model.gguf", "adapter.gguf", "Modelfile"


def add(commands: Any) -> None:
    parser = add_command(commands, "merge", DOC, run, (*RUN_OPTIONS, "model_name", "cache_dir", *KEY_OPTIONS))
    parser.epilog = EXAMPLE
    parser.formatter_class = KeepExamples
    parser.add_argument(
        "checkpoint",
        nargs="?",
        type=Path,
        metavar="CKPT",
        help="a checkpoint, or any PEFT folder of this model; leave it out with --line and --lines",
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="a new folder")
    parser.add_argument(
        "--gguf",
        choices=TYPES,
        metavar="TYPE",
        help=f"write {MODEL}, with weights of this type ({', '.join(TYPES)}), and a {MODELFILE} for Ollama; CKPT may "
        "then be a whole model too",
    )
    parser.add_argument(
        "--adapter-only",
        action="store_true",
        help=f"with --gguf: write {ADAPTER}, a LoRA for a GGUF file of the model itself",
    )
    notes = parser.add_mutually_exclusive_group()
    notes.add_argument(
        "--with-notes",
        action="store_true",
        default=None,
        help=f"with --gguf: put your notes that are active into the {MODELFILE}, as the system text. Whoever gets the "
        "file can read them (default: ask; none without a terminal)",
    )
    notes.add_argument("--without-notes", action="store_false", dest="with_notes", help="do not ask about notes")
    parser.add_argument("--user", metavar="KEY-NAME", help="the API key whose notes are meant; never those of several")
    lines = parser.add_mutually_exclusive_group()
    lines.add_argument("--line", metavar="KEY-NAME", help="merge the newest checkpoint of this person's line")
    lines.add_argument(
        "--lines",
        action="store_true",
        help="write a checkpoint with the average of all people's lines, for eval and --into-shared",
    )
    parser.add_argument(
        "--into-shared",
        action="store_true",
        help="with --lines: the running server examines the average with its gate and guard, and the shared line "
        "continues from it if it is no worse",
    )


def run(options: argparse.Namespace) -> int:
    config = run_config(options)
    if options.checkpoint is None and not options.lines:
        options.checkpoint = newest_of_line(config, options.line)
    if options.into_shared and not options.lines:
        raise UserError("--into-shared needs --lines.")
    if options.gguf is None:
        for flag in ("adapter_only", "with_notes", "user"):
            if getattr(options, flag):
                raise UserError(f"--{flag.replace('_', '-')} needs --gguf.")
    try:
        if options.lines:
            return write_average(options, config)
        return write_gguf(options, config) if options.gguf else write_folder(options, config)
    except OSError as error:
        raise UserError(f"The model cannot be written to {options.out}: {error.strerror or error}.") from None


def write_average(options: argparse.Namespace, config: Config) -> int:
    from openclaw_rl.engines.local.merge import average_adapters, finished_folder
    from openclaw_rl.learn.checkpoints import lines_on_disk, write_new_record
    from openclaw_rl.ledger.schema import open_ledger
    from openclaw_rl.ledger.training import last_step_at

    if options.checkpoint or options.gguf:
        raise UserError("--lines takes a new folder alone: openclaw-rl merge --lines OUT.")
    server = server_url(config.run.folder) if options.into_shared else None
    if options.into_shared and server is None:
        raise UserError("--into-shared needs the server, which examines the average: start it first.")
    newest = {line: config.checkpoints_of(line).latest() for line in lines_on_disk(config.run.folder)}
    saved = {line: one for line, one in newest.items() if one is not None and not one.is_base_model}
    if len(saved) < 2:
        raise UserError(f"An average needs two lines with checkpoints, and {config.run.folder} has {len(saved)}.")
    versions = [one.version for one in saved.values()]
    with open_ledger(config.ledger_dir, readonly=True) as db:
        made = last_step_at(db, versions)
    with finished_folder(options.out) as folder:
        average_adapters([one.folder for one in saved.values()], folder)
        write_new_record(folder, versions, made)
    what = f"The average of {len(saved)} lines ({', '.join(saved)}) is in {options.out}."
    say(f"{what} What is forgotten later stays there.")
    if server is not None:
        with Client(server, config.server.operator_key) as client:
            version = client.merge(options.out)
        told = f"The shared line serves it now, as policy {version}. To go back: openclaw-rl rollback"
    else:
        told = f"Compare it: openclaw-rl eval --model-path {options.out} --compare base. --into-shared lets it serve"
    say(f"{told}.")
    return 0


def write_folder(options: argparse.Namespace, config: Config) -> int:
    from openclaw_rl.engines.local.merge import merge_adapter

    with progress() as shown:
        merge_adapter(
            base_model(config),
            options.checkpoint,
            options.out,
            lambda parts: shown.track(parts, description="Merging"),
        )
    say(f"The merged model is in {options.out}")
    return 0


def base_model(config: Config) -> Path:
    from openclaw_rl.engines.local.families import quantisation_of, runnable
    from openclaw_rl.models import fetch_model, read_json_object

    # Only tensors are read: code in the folder never runs.
    folder = runnable(fetch_model(config.model.model_name, config.run.cache), trusts_code=True)
    if quantisation_of(read_json_object(folder / "config.json")):
        raise UserError(f"{folder} holds quantised weights: give the original model with --model-name.")
    return folder


def write_gguf(options: argparse.Namespace, config: Config) -> int:
    from openclaw_rl.engines.local.families import runnable
    from openclaw_rl.engines.local.gguf_export import GgufExport
    from openclaw_rl.engines.local.merge import finished_folder, fitting_adapter

    is_whole = (options.checkpoint / "config.json").exists()
    if is_whole and options.adapter_only:
        raise UserError(f"{options.checkpoint} is a whole model: it has no adapter.")
    # Only tensors are read here too.
    base = runnable(options.checkpoint, trusts_code=True) if is_whole else base_model(config)
    adapter = None if is_whole else fitting_adapter(base, options.checkpoint)
    export = GgufExport(base, adapter, options.gguf)
    with finished_folder(options.out) as folder:
        notes = chosen_notes(options, config)
        file = write_file(export, folder, options.out.absolute().name, options.adapter_only)
        (folder / MODELFILE).write_text(modelfile_text(config, base, options.adapter_only, notes))
    path = options.out / file
    say(f"{path}: {path.stat().st_size / 1e9:.2f} GB")
    if options.adapter_only:
        say(
            f"It is for a GGUF file of the base model: openclaw-rl merge {base} BASE --gguf f16. "
            f"Then: llama-server -m BASE/{MODEL} --lora {path}"
        )
    else:
        say(f"In Ollama: ollama create my-model -f {options.out / MODELFILE}")
    return 0


def write_file(export: "GgufExport", folder: Path, name: str, adapter_only: bool) -> str:
    """Write the file, with a bar; returns its name."""
    with progress() as shown:

        def track(parts: list[Any]) -> Iterable[Any]:
            return shown.track(parts, description="Writing")

        if adapter_only:
            export.write_adapter(folder / ADAPTER, name, track)
            return ADAPTER
        export.write_model(folder / MODEL, name, track)
        return MODEL


def modelfile_text(config: Config, base: Path, adapter_only: bool, notes: list[str]) -> str:
    from openclaw_rl.app.answering import sampling_defaults
    from openclaw_rl.rendering.chat import ChatRenderer
    from openclaw_rl.rendering.modelfile import modelfile

    lines = [f"FROM ./{MODEL}"]
    if adapter_only:
        lines = [f"# Put a GGUF file of the base model beside this file, as {MODEL}.", *lines, f"ADAPTER ./{ADAPTER}"]
    defaults = sampling_defaults(config, base)
    parameters: dict[str, float] = {
        "temperature": defaults.temperature,
        "top_p": defaults.top_p,
        "top_k": defaults.top_k,
        "repeat_penalty": 1,
    }
    if defaults.max_tokens is not None:
        parameters["num_predict"] = defaults.max_tokens
    return modelfile(ChatRenderer(base), lines, notes, parameters)


def chosen_notes(options: argparse.Namespace, config: Config) -> list[str]:
    """The notes that are put into the file: those of one owner, and only if they are asked for."""
    from openclaw_rl.cli.notes import only_owner
    from openclaw_rl.ledger.notes import of_owner
    from openclaw_rl.ledger.run_dir import was_served
    from openclaw_rl.ledger.schema import open_ledger
    from openclaw_rl.types import NoteState

    asks = options.with_notes is None and sys.stdin.isatty() and sys.stdout.isatty()
    if not (options.with_notes or asks) or (asks and not was_served(config.run.folder)):
        return []
    with open_ledger(config.ledger_dir, readonly=True) as db:
        try:
            owner = options.user or only_owner(db)
        except UserError as error:
            if options.with_notes:
                raise
            console().print(Text(f"No notes are put into the {MODELFILE}: give --with-notes for those of one. {error}"))
            return []
        notes = [note.text for note in of_owner(db, owner) if note.state is NoteState.ACTIVE]
    if not notes:
        if options.with_notes:
            raise UserError(f"{owner} has no active note: leave --with-notes out. 'openclaw-rl notes' lists them.")
        return []
    return notes if options.with_notes or agreed(owner, notes) else []


def agreed(owner: str, notes: list[str]) -> bool:
    """Show the notes, and ask whether to put them into the file."""
    say(f"The notes of {owner} that are active:")
    for note in notes:
        say(f"  {note}")
    return agrees(f"Put them into the {MODELFILE}? Whoever gets the file can read them.")
