"""Tasks with files and folders: create, delete, rename, copy, move, and set modes."""

from random import Random

from openclaw_rl.envs.terminal.families.draft import ENDINGS, Generator, TerminalDraft, names, others, text

MODES = (0o400, 0o444, 0o600, 0o640, 0o660, 0o664, 0o700, 0o744, 0o750, 0o755)


def make_folder(random: Random) -> TerminalDraft:
    (name,) = names(random, 1)
    return TerminalDraft(f"Create a folder named {name}.", f"mkdir {name}", others(random, name), {name: {"dir": True}})


def delete_file(random: Random) -> TerminalDraft:
    (name,) = names(random, 1, random.choice(ENDINGS))
    files = {name: text(random), **others(random, name)}
    return TerminalDraft(f"Delete the file {name}.", f"rm {name}", files, {name: None})


def rename_file(random: Random) -> TerminalDraft:
    old, new = names(random, 2, random.choice(ENDINGS))
    content = text(random)
    changes = {old: None, new: content}
    return TerminalDraft(
        f"Rename {old} to {new}.", f"mv {old} {new}", {old: content, **others(random, old, new)}, changes
    )


def copy_file(random: Random) -> TerminalDraft:
    old, new = names(random, 2, random.choice(ENDINGS))
    content = text(random)
    files = {old: content, **others(random, old, new)}
    return TerminalDraft(f"Copy {old} to {new}.", f"cp {old} {new}", files, {new: content})


def move_by_ending(random: Random) -> TerminalDraft:
    folder, *stems = names(random, 6)
    ending, other = random.sample(ENDINGS, 2)
    moved = {f"{stem}.{ending}": text(random) for stem in stems[:3]}
    files = {**moved, **{f"{stem}.{other}": text(random) for stem in stems[3:]}}
    changes = {**dict.fromkeys(moved), **{f"{folder}/{name}": content for name, content in moved.items()}}
    question = f"Make a folder {folder} and move all .{ending} files into it."
    return TerminalDraft(question, f"mkdir {folder} && mv *.{ending} {folder}/", files, changes)


def delete_by_ending(random: Random) -> TerminalDraft:
    folders = names(random, 2)
    stems = names(random, 6)
    ending, other = random.sample(ENDINGS, 2)
    paths = [
        *stems[:2],
        *(f"{folders[0]}/{stem}" for stem in stems[2:4]),
        *(f"{folders[1]}/{stem}" for stem in stems[4:]),
    ]
    gone = {f"{path}.{ending}": text(random) for path in paths[::2]}
    files = {**gone, **{f"{path}.{other}": text(random) for path in paths[1::2]}}
    question = f"Delete all .{ending} files here and in all folders below."
    return TerminalDraft(question, f"find . -name '*.{ending}' -delete", files, dict.fromkeys(gone))


def sort_into_folders(random: Random) -> TerminalDraft:
    folder, *stems = names(random, 6)
    endings = random.sample(ENDINGS, 3)
    files = {f"{folder}/{stem}.{endings[number % 3]}": text(random) for number, stem in enumerate(stems)}
    changes = dict.fromkeys(files) | {
        f"{folder}/{path.rpartition('.')[2]}/{path.rpartition('/')[2]}": content for path, content in files.items()
    }
    question = f"In {folder}, move each file into a folder named after its ending, for example a.txt to txt/a.txt."
    solution = f'cd {folder} && for f in *.*; do mkdir -p "${{f##*.}}" && mv "$f" "${{f##*.}}/"; done'
    return TerminalDraft(question, solution, {**files, **others(random, folder, *stems)}, changes)


def add_prefix(random: Random) -> TerminalDraft:
    folder, prefix, *stems = names(random, 6)
    ending = random.choice(ENDINGS)
    files = {f"{folder}/{stem}.{ending}": text(random) for stem in stems}
    changes = dict.fromkeys(files) | {
        f"{folder}/{prefix}-{stem}.{ending}": files[f"{folder}/{stem}.{ending}"] for stem in stems
    }
    question = f"Rename every file in {folder} so that its name begins with {prefix}-"
    solution = f'cd {folder} && for f in *; do mv "$f" "{prefix}-$f"; done'
    return TerminalDraft(question, solution, {**files, **others(random, folder, prefix)}, changes)


def set_mode(random: Random) -> TerminalDraft:
    (name,) = names(random, 1, random.choice(("sh", "txt", "cfg")))
    mode = random.choice(MODES)
    content = text(random)
    files = {name: content, **others(random, name)}
    changes = {name: {"text": content, "mode": mode}}
    return TerminalDraft(f"Set the mode of {name} to {mode:o}.", f"chmod {mode:o} {name}", files, changes)


def scripts_executable(random: Random) -> TerminalDraft:
    folder, *stems = names(random, 6)
    files = {f"{folder}/{stem}.{'sh' if at % 2 else 'txt'}": text(random) for at, stem in enumerate(stems)}
    changes = {path: {"text": content, "mode": 0o755} for path, content in files.items() if path.endswith(".sh")}
    question = f"Set the mode of all .sh files in {folder} to 755."
    return TerminalDraft(question, f"chmod 755 {folder}/*.sh", {**files, **others(random, folder)}, changes)


def files_not_folders(random: Random) -> TerminalDraft:
    folder, inner, *stems = names(random, 6)
    paths = [f"{folder}/{inner}/{stem}.md" if at % 2 else f"{folder}/{stem}.md" for at, stem in enumerate(stems)]
    files = {path: text(random) for path in paths}
    mode = random.choice((0o400, 0o444, 0o600, 0o640))
    changes = {path: {"text": content, "mode": mode} for path, content in files.items()}
    question = f"Set the mode of all files below {folder} to {mode:o}, but change no folder."
    solution = f"find {folder} -type f -exec chmod {mode:o} {{}} +"
    return TerminalDraft(question, solution, {**files, **others(random, folder)}, changes)


def files_and_folders(random: Random) -> TerminalDraft:
    folder, inner, deeper, *stems = names(random, 7)
    places = (folder, f"{folder}/{inner}", f"{folder}/{inner}/{deeper}")
    files = {f"{places[at % 3]}/{stem}.md": text(random) for at, stem in enumerate(stems)}
    of_folders = random.choice((0o700, 0o750))
    of_files = random.choice((0o600, 0o640, 0o660))
    changes = {
        **{path: {"text": content, "mode": of_files} for path, content in files.items()},
        **{place: {"dir": True, "mode": of_folders} for place in places},
    }
    question = f"Set the mode of {folder} and all folders in it to {of_folders:o}, of all files in it to {of_files:o}."
    solution = " && ".join(
        f"find {folder} -type {kind} -exec chmod {mode:o} {{}} +" for kind, mode in (("f", of_files), ("d", of_folders))
    )
    return TerminalDraft(question, solution, {**files, **others(random, folder)}, changes)


def same_as(random: Random) -> TerminalDraft:
    folder, model, *stems = names(random, 6)
    mode = random.choice(MODES)
    files = {f"{folder}/{stem}.txt": text(random) for stem in stems}
    changes = {path: {"text": content, "mode": mode} for path, content in files.items()}
    question = f"Give every file in {folder} the mode that {model}.txt has."
    given = {f"{model}.txt": {"text": text(random), "mode": mode}}
    solution = f"chmod --reference={model}.txt {folder}/*"
    return TerminalDraft(question, solution, {**files, **given, **others(random, folder, model)}, changes)


FILES: dict[int, tuple[Generator, ...]] = {
    1: (make_folder, delete_file, rename_file, copy_file),
    2: (move_by_ending, delete_by_ending),
    3: (sort_into_folders, add_prefix),
}
PERMISSIONS: dict[int, tuple[Generator, ...]] = {
    1: (set_mode,),
    2: (scripts_executable, files_not_folders),
    3: (files_and_folders, same_as),
}
