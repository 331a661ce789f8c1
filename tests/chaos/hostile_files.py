"""Damaged and hostile files in the run directory and the model: a sentence or a working server; no code is run."""

import contextlib
import json
import os
import pickle
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import httpx

from chaos.learning import ENDLESS, FAST, LEARN, learning_server, states, teach
from chaos.report import Report, Setting
from openclaw_rl.ledger.run_dir import read_server
from support.server_program import SERVE, until

#: Damaged files of one run, drawn from all.
FILES = 150
#: The longest that a program may take to start or to refuse.
SECONDS = 90
#: Commands that read a run directory.
COMMANDS = (
    ("status",),
    ("sessions",),
    ("checkpoints",),
    ("rollback",),
    ("export", "out.jsonl"),
    ("report", "--no-answers"),
)
EXPLOIT = "import pathlib; pathlib.Path({marker!r}).write_text('run')"
DAMAGES: dict[str, Callable[[Path, random.Random], None]] = {
    "truncated": lambda path, draw: path.write_bytes(
        path.read_bytes()[: draw.randint(1, max(1, path.stat().st_size - 1))]
    ),
    "emptied": lambda path, draw: path.write_bytes(b""),
    "zeroed": lambda path, draw: path.write_bytes(bytes(path.stat().st_size)),
    "random": lambda path, draw: path.write_bytes(draw.randbytes(min(path.stat().st_size, 100_000))),
    "flipped": lambda path, draw: flip(path, draw),
    "nested": lambda path, draw: path.write_bytes(b"[" * 200_000),
    "nested objects": lambda path, draw: path.write_bytes(b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
    "another type": lambda path, draw: path.write_bytes(b'[1, "two", null]'),
    "long header": lambda path, draw: path.write_bytes((2**60).to_bytes(8, "little") + b"{}"),
    "a folder": lambda path, draw: replace_by(path, lambda: path.mkdir()),
    "a link to itself": lambda path, draw: replace_by(path, lambda: path.symlink_to(path)),
    "a link to elsewhere": lambda path, draw: replace_by(path, lambda: path.symlink_to("/etc/passwd")),
}


def flip(path: Path, draw: random.Random) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(20 if content else 0):
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def replace_by(path: Path, make: Callable[[], None]) -> None:
    path.unlink()
    make()


class Case(NamedTuple):
    """A damaged file of a run or a model, and the command that meets it."""

    name: str
    spoil: Callable[[Path], None]
    """Changes a copy of everything: the run in `run`, the model in `tiny`."""
    command: tuple[str, ...] = ()
    """A command on the run; empty: a server is started."""
    flags: tuple[str, ...] = ()


def run(report: Report, setting: Setting) -> None:
    good = setting.folder / "good"
    make_run(setting.model, good)
    draw = random.Random(setting.seed)
    cases = [*damaged(good, draw), *hostile(setting.folder)]
    for case in draw.sample(cases, min(len(cases), setting.times(FILES, least=5))):
        report.count("files")
        with tempfile.TemporaryDirectory(dir=setting.folder) as folder:
            copy = Path(shutil.copytree(good, folder, symlinks=True, dirs_exist_ok=True))
            case.spoil(copy)
            judge(report, case, *(command(case, copy) if case.command else start(case, copy)))
        report.check(not (setting.folder / "marker").exists(), "code of a hostile file was run", case.name)
        (setting.folder / "marker").unlink(missing_ok=True)


def make_run(model: Path, folder: Path) -> None:
    """A run with several checkpoints, and its model."""
    shutil.copytree(model, folder / "tiny")
    with learning_server(folder / "tiny", folder / "run", "--save-interval", "1") as program:
        teach(program, 4)
        until(lambda: states(folder / "run")["applied"] == 4, program)
        program.process.terminate()
        program.process.wait(60)


def damaged(good: Path, draw: random.Random) -> Iterator[Case]:
    """Every damage to every file that a server or a command reads."""
    newest = sorted((good / "run" / "checkpoints").iterdir())[-1]
    served = [*(good / "tiny").iterdir(), *newest.iterdir(), *(p for p in (good / "run").iterdir() if p.is_file())]
    for path in sorted(served):
        place = path.relative_to(good)
        for name, damage in DAMAGES.items():
            seed = draw.random()

            def spoil(
                copy: Path, place: Path = place, damage: Callable[..., None] = damage, seed: float = seed
            ) -> None:
                damage(copy / place, random.Random(seed))

            yield Case(f"{place} {name}", spoil)
            if place.parts[0] == "run":
                yield Case(f"{place} {name}", spoil, draw.choice(COMMANDS))


def hostile(folder: Path) -> Iterator[Case]:
    """Files that try to run code or to reach other files."""
    marker = str(folder / "marker")
    exploit = EXPLOIT.format(marker=marker)

    class Payload:
        def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
            return exec, (exploit,)

    pickled = pickle.dumps(Payload())

    def pickles(copy: Path) -> None:
        for place in (copy / "tiny", *(copy / "run" / "checkpoints").iterdir()):
            for weights in [*place.glob("*.safetensors"), *place.glob("*.pt")]:
                weights.unlink()
            for name in ("pytorch_model.bin", "adapter_model.bin", "training_args.bin", "learner.pt", "optimizer.pt"):
                (place / name).write_bytes(pickled)

    def own_code(copy: Path) -> None:
        (copy / "tiny" / "modeling_x.py").write_text(exploit)
        for name in ("config.json", "tokenizer_config.json"):
            path = copy / "tiny" / name
            mapped = {
                "AutoConfig": "modeling_x.X",
                "AutoModelForCausalLM": "modeling_x.X",
                "AutoTokenizer": "modeling_x.X",
            }
            path.write_text(json.dumps({**json.loads(path.read_text()), "auto_map": mapped, "model_type": "x"}))

    def template(text: str) -> Callable[[Path], None]:
        def spoil(copy: Path) -> None:
            (copy / "tiny" / "chat_template.jinja").write_text(text)

        return spoil

    def outside(copy: Path) -> None:
        """Unfinished folders that are links to a folder with a file of somebody else."""
        kept = folder / "kept"
        kept.mkdir(exist_ok=True)
        (kept / "mine").write_text("mine")
        for name in ("policies", "checkpoints"):
            (copy / "run" / name).mkdir(exist_ok=True)
            for link in (".unfinished-v9", "step-000009-v9"):
                (copy / "run" / name / link).symlink_to(kept)

    def gguf(content: bytes) -> Callable[[Path], None]:
        return lambda copy: (copy / "model.gguf").write_bytes(content) and None

    yield Case("pickles instead of weights", pickles)
    yield Case("a model that names code of its own", own_code)
    yield Case("a template that reaches for Python", template("{{ ''.__class__.__mro__[1].__subclasses__() }}"))
    yield Case("a template that raises", template("{{ raise_exception('x' * 100000) }}"))
    yield Case("a template that is no template", template("{% for %}" * 1000))
    yield Case("a template without end", template("{% for i in range(10**12) %}{% endfor %}"))
    yield Case("links to another folder", outside)
    header = b"GGUF" + (3).to_bytes(4, "little")
    counts = [
        b"",
        (2**63).to_bytes(8, "little") * 2,
        bytes(16),
        b"\xff" * 16,
        (1).to_bytes(8, "little") * 2 + b"\xff" * 64,
    ]
    for number, content in enumerate([b"", b"GG", b"FUGG" + bytes(100), pickled, *(header + more for more in counts)]):
        yield Case(f"GGUF {number}", gguf(content), flags=("--model-name", "model.gguf"))
    for number, text in enumerate(("", "=", "a = " + "[" * 100_000, "lora_rank = 'x'", "\x00", "seed = " + "9" * 5000)):
        yield Case(
            f"options {number}",
            lambda copy, text=text: (copy / "own.toml").write_text(text) and None,
            flags=("--config", "own.toml"),
        )


Outcome = tuple[int | None, str]


def command(case: Case, copy: Path) -> Outcome:
    """Run a command on the run; returns its exit status and what it printed."""
    line = [sys.executable, "-m", "openclaw_rl", *case.command, "--run-dir", "run"]
    try:
        done = subprocess.run(line, capture_output=True, cwd=copy, check=False, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return -1, f"no end within {SECONDS} s"
    return done.returncode, done.stderr.decode(errors="replace")


def start(case: Case, copy: Path) -> Outcome:
    """Start a server, and stop it when it has answered a request; the status is None if it served."""
    model = [] if "--model-name" in case.flags else ["--model-name", "tiny"]
    line = [*SERVE, *model, "--run-dir", "run", "--cache-dir", "cache", "--proxy-port", "0", *LEARN, *FAST, *ENDLESS]
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        process = subprocess.Popen([*line, *case.flags], stderr=log, stdout=log, cwd=copy, env=offline())
        try:
            served = serves(process, copy / "run")
        finally:
            process.kill()
            process.wait()
        log.seek(0)
        return (None if served else process.returncode), log.read()


def offline() -> dict[str, str]:
    """An environment in which nothing is downloaded."""
    return {**os.environ, "HF_HUB_OFFLINE": "1"}


def serves(process: subprocess.Popen[bytes], run_dir: Path) -> bool:
    """Whether a server answers a request before it ends or the time is up."""
    end = time.monotonic() + SECONDS
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
    while process.poll() is None and time.monotonic() < end:
        with contextlib.suppress(httpx.HTTPError, OSError):
            server = read_server(run_dir)
            if server.get("pid") == process.pid and server.get("url"):
                answer = httpx.post(f"{server['url']}/v1/chat/completions", json=body, timeout=SECONDS)
                return answer.status_code < 500
        time.sleep(0.1)
    return False


def judge(report: Report, case: Case, status: int | None, log: str) -> None:
    """A server either serves or ends with status 2 and a sentence; a command may also succeed."""
    where = f"{case.name}, {' '.join(case.command) or 'serve'}: status {status}, …{log[-400:]}"
    report.count("served or succeeded" if status in (None, 0) else "refused")
    # An export that had to leave out damaged turns ends with status 1.
    expected = (0, 1, 2) if case.command else (None, 2)
    report.check(status in expected, "a damaged file was not handled", where)
    report.check("Traceback" not in log, "a damaged file gives a traceback", where)
