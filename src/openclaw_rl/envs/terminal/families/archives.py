"""Tasks with tar archives."""

from collections.abc import Mapping
from random import Random
from typing import Any

from openclaw_rl.envs.terminal.families.draft import Generator, TerminalDraft, names, others, text


def folder_of_files(random: Random, folder: str, number: int = 3) -> dict[str, str]:
    return {f"{folder}/{name}": text(random) for name in names(random, number, "txt")}


def content_check(archive: str, files: Mapping[str, str]) -> dict[str, Any]:
    """A check that an archive has these files, and no others."""
    script = (
        f'mkdir "$TMPDIR/unpacked" && tar -xf {archive} -C "$TMPDIR/unpacked" && cd "$TMPDIR/unpacked" && '
        'find . -type f | sort | while IFS= read -r file; do echo "$file"; cat "$file"; done'
    )
    expected = "".join(f"./{path}\n{files[path]}" for path in sorted(files))
    return {
        "run": script,
        "expect": expected,
        "about": f"{archive} must contain {', '.join(sorted(files))}",
        "kept": False,
    }


def pack(random: Random) -> TerminalDraft:
    (folder,) = names(random, 1)
    files = folder_of_files(random, folder)
    archive = f"{folder}.tar.gz"
    return TerminalDraft(
        f"Pack the folder {folder} into {archive}.",
        f"tar -czf {archive} {folder}",
        {**files, **others(random, folder)},
        {archive: {"any": True}},
        checks=[content_check(archive, files)],
    )


def unpack(random: Random) -> TerminalDraft:
    (folder,) = names(random, 1)
    files = folder_of_files(random, folder)
    archive = f"{folder}.tar.gz"
    setup = f"tar -czf {archive} {folder} && rm -r {folder}"
    return TerminalDraft(
        f"Unpack {archive}.", f"tar -xzf {archive}", {**files, **others(random, folder)}, files, setup=setup
    )


def unpack_into(random: Random) -> TerminalDraft:
    folder, target = names(random, 2)
    files = folder_of_files(random, folder)
    archive = f"{folder}.tar.gz"
    changes = {f"{target}/{path}": content for path, content in files.items()}
    return TerminalDraft(
        f"Make a folder {target} and unpack {archive} in it.",
        f"mkdir {target} && tar -xzf {archive} -C {target}",
        {**files, **others(random, folder, target)},
        changes,
        setup=f"tar -czf {archive} {folder} && rm -r {folder}",
    )


def pack_by_ending(random: Random) -> TerminalDraft:
    archive, *stems = names(random, 7)
    packed = {f"{stem}.txt": text(random) for stem in stems[:3]}
    files = {
        **packed,
        **{f"{stem}.{ending}": text(random) for stem, ending in zip(stems[3:], ("md", "log", "cfg"), strict=True)},
    }
    return TerminalDraft(
        f"Pack all .txt files here, and no others, into {archive}.tar.gz.",
        f"tar -czf {archive}.tar.gz *.txt",
        files,
        {f"{archive}.tar.gz": {"any": True}},
        checks=[content_check(f"{archive}.tar.gz", packed)],
    )


def take_one_out(random: Random) -> TerminalDraft:
    (folder,) = names(random, 1)
    files = folder_of_files(random, folder, 5)
    archive = f"{folder}.tar.gz"
    path = random.choice(list(files))
    name = path.rpartition("/")[2]
    return TerminalDraft(
        f"Somewhere in {archive} is a file {name}. Put it here as {name}, and unpack nothing else.",
        f"tar -xzOf {archive} {path} > {name}",
        {**files, **others(random, folder, name)},
        {name: files[path]},
        setup=f"tar -czf {archive} {folder} && rm -r {folder}",
    )


def archive_in_archive(random: Random) -> TerminalDraft:
    outer, inner = names(random, 2)
    files = folder_of_files(random, inner)
    setup = f"tar -czf {inner}.tar.gz {inner} && tar -czf {outer}.tar.gz {inner}.tar.gz && rm -r {inner} {inner}.tar.gz"
    return TerminalDraft(
        f"{outer}.tar.gz contains {inner}.tar.gz. Unpack the folder {inner} of the inner one here; leave nothing else.",
        f"tar -xzOf {outer}.tar.gz {inner}.tar.gz | tar -xz",
        {**files, **others(random, outer, inner)},
        files,
        setup=setup,
    )


LEVELS: dict[int, tuple[Generator, ...]] = {
    1: (pack, unpack),
    2: (unpack_into, pack_by_ending),
    3: (take_one_out, archive_in_archive),
}
