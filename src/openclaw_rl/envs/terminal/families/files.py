"""Tasks with files and folders: create, delete, rename, copy, move."""

from random import Random

from openclaw_rl.envs.terminal.families.draft import ENDINGS, Generator, TerminalDraft, names, others, text


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


LEVELS: dict[int, tuple[Generator, ...]] = {
    1: (make_folder, delete_file, rename_file, copy_file),
    2: (move_by_ending, delete_by_ending),
    3: (sort_into_folders, add_prefix),
}
