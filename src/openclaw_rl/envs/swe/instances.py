"""Tasks in the format of SWE-bench: `instances.jsonl`, and the repositories that it names.

    FOLDER/instances.jsonl              one instance a line
    FOLDER/repos/INSTANCE_ID/           its files at the base commit, or
    FOLDER/repos/OWNER__NAME/           a clone (also a bare one) that has the base commit

With docker or podman the files are those of the instance's image.
"""

import io
import json
import subprocess
import tarfile
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from openclaw_rl.config.options import ConfigError, read_text
from openclaw_rl.envs.base import EnvFailed
from openclaw_rl.envs.choices import SPLITS, digest
from openclaw_rl.envs.swe.packages import Files

INSTANCES, REPOS = "instances.jsonl", "repos"
#: Where the official images have the repository, and the Python that has what it needs.
IMAGE_FOLDER, IMAGE_PYTHON = "/testbed", "/opt/miniconda3/envs/testbed/bin/python"
#: The name of an official image; __ in an instance's id is written as _1776_.
IMAGE = "swebench/sweb.eval.x86_64.{}:latest"
#: Without `split`, one instance of so many is held out.
HELD_OUT_ONE_IN = 5
#: How long git and container runtimes may take.
EXPORT_SECONDS = 600


class Instance(BaseModel):
    """One line of the file. Members that are not needed here are ignored."""

    model_config = ConfigDict(frozen=True)

    instance_id: str = Field(pattern=r"^\w[\w.-]*$", max_length=200)
    repo: str = Field(pattern=r"^[\w.-]+/[\w.-]+$")
    base_commit: str = Field("HEAD", pattern=r"^\w+$")
    problem_statement: str
    test_patch: str = ""
    patch: str = ""
    must_pass: list[str] = Field(alias="FAIL_TO_PASS", min_length=1)
    must_keep: list[str] = Field([], alias="PASS_TO_PASS")
    image_name: str = ""
    split: str = ""

    @field_validator("must_pass", "must_keep", mode="before")
    @classmethod
    def _list(cls, value: Any) -> Any:
        # In the published files the lists are JSON in a string.
        return json.loads(value) if isinstance(value, str) else value

    @field_validator("split")
    @classmethod
    def _known_split(cls, value: str) -> str:
        if value not in ("", *SPLITS):
            raise ValueError(f"there is no split {value}; the splits are {' and '.join(SPLITS)}")
        return value

    @property
    def in_split(self) -> str:
        return self.split or ("held-out" if digest(self.instance_id) % HELD_OUT_ONE_IN == 0 else "train")

    @property
    def image(self) -> str:
        return self.image_name or IMAGE.format(self.instance_id.lower().replace("__", "_1776_"))


def read_instances(folder: Path) -> list[Instance]:
    """The instances of a folder. Raises ConfigError, which names the line."""
    file = folder if folder.suffix == ".jsonl" else folder / INSTANCES
    instances = []
    for number, line in enumerate(read_text(file, "path").splitlines(), 1):
        if not line.strip():
            continue
        place = f"{file}, line {number}"
        try:
            instance = Instance.model_validate(json.loads(line))
        except ValidationError as error:
            problem = error.errors()[0]
            raise ConfigError(f"{place}: {'.'.join(map(str, problem['loc']))}: {problem['msg']}.") from None
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{place}: {error}.") from None
        if wrong := [id_ for id_ in [*instance.must_pass, *instance.must_keep] if "::" not in id_]:
            raise ConfigError(f"{place}: {wrong[0]} is not a test of pytest, such as tests/test_a.py::test_b.")
        instances.append(instance)
    if not instances:
        raise ConfigError(f"{file} has no instances.")
    return instances


def find_checkout(folder: Path, instance: Instance) -> Path:
    """The folder or the clone of an instance. Raises ConfigError."""
    repos = (folder.parent if folder.suffix == ".jsonl" else folder) / REPOS
    places = [repos / instance.instance_id, repos / instance.repo.replace("/", "__")]
    for place in places:
        if place.is_dir():
            return place
    raise ConfigError(f"{instance.instance_id} has no repository: neither {places[0]} nor {places[1]} is there.")


def is_clone(checkout: Path, instance: Instance) -> bool:
    """Whether a checkout is a clone, which has other commits too, and not the instance's own folder."""
    return checkout.name != instance.instance_id


def needs_git(instance: Instance, checkout: Path | None) -> bool:
    """Whether git has to export the repository or apply the test patch. In a container there is no checkout."""
    return bool(instance.test_patch) or (checkout is not None and is_clone(checkout, instance))


def export_clone(clone: Path, commit: str, target: Path) -> None:
    """Write the files of a commit into a folder. Blocks. Raises EnvFailed."""
    packed = _run(["git", "-C", str(clone), "archive", "--format=tar", commit])
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(target, filter="tar")


def export_image(runtime: str, image: str, target: Path) -> None:
    """Write the repository of an image into a folder. Blocks. Raises EnvFailed."""
    container = _run([runtime, "create", image]).decode().strip()
    try:
        _run([runtime, "cp", f"{container}:{IMAGE_FOLDER}/.", str(target)])
    finally:
        _run([runtime, "rm", "--force", container])


def patched_tests(checkout: Path, instance: Instance, work: Path) -> Files:
    """The tests that decide, as texts, after the instance's test patch. `work` is an empty folder. Blocks."""
    paths = {id_.partition("::")[0] for id_ in [*instance.must_pass, *instance.must_keep]}
    paths |= {line[6:].strip() for line in instance.test_patch.splitlines() if line.startswith("+++ b/")}
    for path in paths:
        if (checkout / path).is_file():
            (work / path).parent.mkdir(parents=True, exist_ok=True)
            (work / path).write_bytes((checkout / path).read_bytes())
    if instance.test_patch:
        # Not as a part of a repository that the folder may be in.
        _run(["git", "-C", str(work), "--git-dir=/dev/null", "apply", "-"], instance.test_patch.encode())
    try:
        return {path: (work / path).read_text("utf-8") for path in sorted(paths) if (work / path).is_file()}
    except UnicodeDecodeError as error:
        raise EnvFailed(f"a test of {instance.instance_id} is not text: {error}") from None


def _run(argv: list[str], stdin: bytes = b"") -> bytes:
    try:
        done = subprocess.run(argv, input=stdin, capture_output=True, timeout=EXPORT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EnvFailed(f"{argv[0]} could not be run: {error}") from None
    if done.returncode:
        raise EnvFailed(f"{' '.join(argv[:6])} failed: {done.stderr.decode(errors='replace').strip()[-300:]}")
    return done.stdout
