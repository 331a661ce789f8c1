"""Tasks with text: write, cut, sort, replace, count; and searching: lines in files, and files in folders."""

from collections import Counter
from random import Random

from openclaw_rl.envs.terminal.families.draft import Generator, TerminalDraft, joined, lines, names, others, text


def write_word(random: Random) -> TerminalDraft:
    word, stem = names(random, 2)
    file = f"{stem}.txt"
    question = f"Write the word {word} to the file {file}."
    return TerminalDraft(question, f"echo {word} > {file}", others(random, stem), {file: word})


def first_lines(random: Random) -> TerminalDraft:
    source, target = names(random, 2, "txt")
    content = lines(random, 8)
    number = random.randint(2, 6)
    files = {source: joined(content), **others(random, source, target)}
    question = f"Write the first {number} lines of {source} to {target}."
    return TerminalDraft(question, f"head -n {number} {source} > {target}", files, {target: joined(content[:number])})


def sort_lines(random: Random) -> TerminalDraft:
    source, target = names(random, 2, "txt")
    content = lines(random, 6)
    files = {source: joined(content), **others(random, source, target)}
    changes = {target: joined(sorted(content))}
    return TerminalDraft(f"Sort the lines of {source} into {target}.", f"sort {source} > {target}", files, changes)


def replace_word(random: Random) -> TerminalDraft:
    old, new, *more = names(random, 6)
    (file,) = names(random, 1, "txt")
    words = [old if random.random() < 0.4 else random.choice(more) for _ in range(18)]
    words[random.randrange(18)] = old
    content = [" ".join(words[at : at + 3]) for at in range(0, 18, 3)]
    files = {file: joined(content), **others(random, file)}
    changes = {file: joined(content).replace(old, new)}
    question = f"In {file}, replace the word {old} by {new} everywhere."
    return TerminalDraft(question, f"sed -i 's/{old}/{new}/g' {file}", files, changes)


def remove_lines(random: Random) -> TerminalDraft:
    word, *more = names(random, 9)
    (file,) = names(random, 1, "txt")
    content = [f"{other} {word if number % 3 == 0 else random.choice(more)}" for number, other in enumerate(more)]
    random.shuffle(content)
    files = {file: joined(content), **others(random, file)}
    changes = {file: joined([line for line in content if word not in line])}
    question = f"Remove all lines with the word {word} from {file}."
    return TerminalDraft(question, f"sed -i '/{word}/d' {file}", files, changes)


def most_frequent(random: Random) -> TerminalDraft:
    source, target = names(random, 2, "txt")
    choice = names(random, 5)
    content = [random.choice(choice) for _ in range(14)] + [choice[0]] * 12
    random.shuffle(content)
    (top, _), *_ = Counter(content).most_common()
    files = {source: joined(content), **others(random, source, target)}
    question = f"Each line of {source} is a word. Write the most frequent one to {target}."
    solution = f"sort {source} | uniq -c | sort -rn | head -n 1 | awk '{{print $2}}' > {target}"
    return TerminalDraft(question, solution, files, {target: top})


def join_files(random: Random) -> TerminalDraft:
    target, folder, *stems = names(random, 5)
    parts = {f"{folder}/{stem}.txt": lines(random, 3) for stem in stems}
    whole = [f"{path.rpartition('/')[2]}: {line}" for path in sorted(parts) for line in parts[path]]
    files = {**{path: joined(content) for path, content in parts.items()}, **others(random, target, folder)}
    question = (
        f"Write all lines of the .txt files in {folder}, in the order of the files' names, to {target}.md. "
        "Begin each line with the name of its file, a colon and a space, as in a.txt: text."
    )
    solution = f"(cd {folder} && awk '{{print FILENAME \": \" $0}}' *.txt) > {target}.md"
    return TerminalDraft(question, solution, files, {f"{target}.md": joined(whole)})


def log_lines(random: Random, mark: str, number: int = 10) -> list[str]:
    """Lines of a log, some of them with a mark."""
    marked = set(random.sample(range(number), random.randint(2, 5)))
    return [f"{mark if at in marked else 'info'} {line}" for at, line in enumerate(lines(random, number))]


def matching_lines(random: Random) -> TerminalDraft:
    source, target, mark = *names(random, 2, "log"), random.choice(("ERROR", "WARN", "FATAL"))
    content = log_lines(random, mark)
    files = {source: joined(content), **others(random, source, target)}
    changes = {target: joined([line for line in content if mark in line])}
    question = f"Write the lines of {source} that contain {mark} to {target}."
    return TerminalDraft(question, f"grep {mark} {source} > {target}", files, changes)


def count_lines(random: Random) -> TerminalDraft:
    stem, other = names(random, 2)
    mark = random.choice(("ERROR", "WARN", "FATAL"))
    content = log_lines(random, mark, random.randint(6, 16))
    files = {f"{stem}.log": joined(content), **others(random, stem, other)}
    changes = {f"{other}.txt": str(sum(mark in line for line in content))}
    question = f"Count the lines of {stem}.log that contain {mark} and write the number to {other}.txt."
    return TerminalDraft(question, f"grep -c {mark} {stem}.log > {other}.txt", files, changes)


def files_with_word(random: Random) -> TerminalDraft:
    folder, target, word, *stems = names(random, 9)
    chosen = set(random.sample(stems, 3))
    files: dict[str, str] = {}
    for stem in stems:
        content = [f"{random.choice(stems)} {number}" for number in range(4)]
        content += [f"{word} here"] if stem in chosen else []
        files[f"{folder}/{stem}.txt"] = joined(content)
    found = sorted(f"{folder}/{stem}.txt" for stem in chosen)
    question = (
        f"Which files in {folder} contain the word {word}? Write their paths, such as {folder}/{stems[0]}.txt, sorted, "
        f"one on a line, to {target}.txt."
    )
    solution = f"grep -l {word} {folder}/* | sort > {target}.txt"
    return TerminalDraft(
        question, solution, {**files, **others(random, folder, target)}, {f"{target}.txt": joined(found)}
    )


def largest_file(random: Random) -> TerminalDraft:
    folder, inner, target, *stems = names(random, 8)
    sizes = random.sample(range(2, 30), len(stems))
    paths = [f"{folder}/{inner}/{stem}.dat" if at % 2 else f"{folder}/{stem}.dat" for at, stem in enumerate(stems)]
    files = {path: "x" * 10 * size + "\n" for path, size in zip(paths, sizes, strict=True)}
    largest = max(files, key=lambda path: len(files[path]))
    question = f"Write the path of the largest file in {folder} and its folders, such as {paths[0]}, to {target}.txt."
    solution = f"find {folder} -type f -printf '%s %p\\n' | sort -rn | head -n 1 | cut -d' ' -f2 > {target}.txt"
    return TerminalDraft(question, solution, {**files, **others(random, folder, target)}, {f"{target}.txt": largest})


def setting_somewhere(random: Random) -> TerminalDraft:
    folder, key, target, *stems = names(random, 8)
    port = random.randint(2000, 9999)
    place = random.choice(stems)
    files = {}
    for stem in stems:
        content = [f"{other}.port={random.randint(2000, 9999)}" for other in stems if other != stem]
        content += [f"# {key}.port=1", f"old.{key}.port=2"]
        content += [f"{key}.port={port}"] if stem == place else []
        random.shuffle(content)
        files[f"{folder}/{stem}/{stem}.cfg"] = joined(content)
    question = (
        f"One file below {folder} has a line that begins with {key}.port= . Write the number after it to {target}.txt."
    )
    solution = f"grep -rh '^{key}.port=' {folder} | cut -d= -f2 > {target}.txt"
    return TerminalDraft(question, solution, {**files, **others(random, folder, target)}, {f"{target}.txt": str(port)})


def count_in_tree(random: Random) -> TerminalDraft:
    folder, target, *stems = names(random, 7)
    files = {}
    total = 0
    for stem in stems:
        ending = "log" if stem in stems[:3] else "txt"
        content = log_lines(random, "ERROR")
        total += sum("ERROR" in line for line in content) if ending == "log" else 0
        files[f"{folder}/{stem}/{stem}.{ending}"] = joined(content)
    question = (
        f"How many lines with ERROR do all .log files below {folder} have together? Write the number to {target}.txt."
    )
    solution = f"grep -rh --include='*.log' ERROR {folder} | wc -l > {target}.txt"
    files[f"{folder}/README.md"] = text(random)
    return TerminalDraft(question, solution, {**files, **others(random, folder, target)}, {f"{target}.txt": str(total)})


TEXT: dict[int, tuple[Generator, ...]] = {
    1: (write_word, first_lines, sort_lines),
    2: (replace_word, remove_lines),
    3: (most_frequent, join_files),
}
SEARCH: dict[int, tuple[Generator, ...]] = {
    1: (matching_lines, count_lines),
    2: (files_with_word, largest_file),
    3: (setting_somewhere, count_in_tree),
}
