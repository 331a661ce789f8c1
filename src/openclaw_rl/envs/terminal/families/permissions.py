"""Tasks with the modes of files and folders."""

from random import Random

from openclaw_rl.envs.terminal.families.draft import Generator, TerminalDraft, names, others, text

MODES = (0o400, 0o444, 0o600, 0o640, 0o660, 0o664, 0o700, 0o744, 0o750, 0o755)


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


LEVELS: dict[int, tuple[Generator, ...]] = {
    1: (set_mode,),
    2: (scripts_executable, files_not_folders),
    3: (files_and_folders, same_as),
}
