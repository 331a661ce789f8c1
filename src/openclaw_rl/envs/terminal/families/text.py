"""Tasks with text: write, cut, sort, replace, count."""

from collections import Counter
from random import Random

from openclaw_rl.envs.terminal.families.draft import Generator, TerminalDraft, joined, lines, names, others


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


LEVELS: dict[int, tuple[Generator, ...]] = {
    1: (write_word, first_lines, sort_lines),
    2: (replace_word, remove_lines),
    3: (most_frequent, join_files),
}
