"""Tasks with a git repository, which is the workspace."""

import hashlib
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from openclaw_rl.envs.terminal.families.draft import Generator, TerminalDraft, names, others, text

#: A repository with one commit of everything that is there. `tree` needs SHA-1.
INIT = (
    "GIT_DEFAULT_HASH=sha1 git init -q -b main . && git config user.name Agent && "
    "git config user.email agent@localhost && git add -A && git commit -q -m start"
)
#: The git of the checks: no hooks, no programs from the repository's settings, no objects in place of others.
GIT = "git --no-replace-objects -c core.hooksPath=/dev/null -c core.fsmonitor=false -c log.showSignature=false"
SUBJECTS = ("add", "fix", "update", "improve", "extend")


def check(about: str, expected: Sequence[object], *commands: str, kept: bool = False) -> dict[str, Any]:
    """A check of what git's commands print, one line each; `kept` if it is so from the start."""
    script = "; ".join(["export HOME=/nonexistent", *(f"{GIT} {command}" for command in commands)])
    return {"run": script, "expect": "\n".join(map(str, expected)), "about": about, "kept": kept}


def tree(files: Mapping[str, str], revision: str, *, kept: bool = False) -> dict[str, Any]:
    """A check that a revision has exactly these files, with these texts and the mode 644."""
    listed = []
    for path in sorted(files):
        content = files[path].encode()
        # The id that git gives to a content.
        id_ = hashlib.sha1(b"blob %d\0%b" % (len(content), content), usedforsecurity=False).hexdigest()
        listed.append(f"100644 blob {id_}\t{path}")
    about = f"The files in the last commit of {revision} must be {', '.join(sorted(files))}, with the right contents"
    return check(about, listed, f"ls-tree -r {revision}", kept=kept)


def commits(number: int, *, kept: bool = False) -> dict[str, Any]:
    return check(
        f"The branch main must be the current one and have {number} commits",
        ["main", number],
        "symbolic-ref --short HEAD",
        "rev-list --count HEAD",
        kept=kept,
    )


def subject(random: Random) -> str:
    return f"{random.choice(SUBJECTS)} {names(random, 1)[0]}"


def new_branch(random: Random) -> TerminalDraft:
    (name,) = names(random, 1)
    right = check(
        f"There must be a branch {name} at the last commit, besides main",
        [*sorted([f"refs/heads/{name}", "refs/heads/main"]), 1],
        "for-each-ref --format='%(refname)'",
        "rev-list --count --all",
    )
    return TerminalDraft(
        f"Create a git branch named {name}.", f"git branch {name}", others(random, name), {}, INIT, [right]
    )


def new_tag(random: Random) -> TerminalDraft:
    name = f"v{random.randint(1, 40)}.{random.randint(0, 9)}"
    right = check(
        f"There must be a tag {name} at the last commit, and nothing else",
        [name, 1, 1],
        "tag",
        "rev-list --count --all",
        f"rev-list --count {name}",
    )
    question = f"Tag the last git commit as {name}."
    return TerminalDraft(question, f"git tag {name}", others(random), {}, INIT, [right, commits(1, kept=True)])


def last_message(message: str) -> dict[str, Any]:
    return check(f"The last commit of main must have the message {message}", [message], "log -1 --format=%s main")


def commit_all(random: Random) -> TerminalDraft:
    (name,) = names(random, 1, "txt")
    message = subject(random)
    files = others(random, name)
    word = names(random, 1)[0]
    files[name] = text(random)
    checks = [last_message(message), commits(2), tree({**files, name: f"{files[name]}{word}\n"}, "main")]
    setup = f"{INIT} && echo {word} >> {name}"
    question = f'Commit the change of {name} with the message "{message}".'
    return TerminalDraft(question, f'git commit -q -a -m "{message}"', files, {}, setup, checks)


def commit_one(random: Random) -> TerminalDraft:
    name, other = names(random, 2, "txt")
    message = subject(random)
    setup = f"{INIT} && echo changed >> {name} && echo changed >> {other}"
    question = f'Two files were changed. Commit only {name}, with the message "{message}".'
    files = {name: text(random), other: text(random), **others(random, name, other)}
    checks = [last_message(message), commits(2), tree({**files, name: f"{files[name]}changed\n"}, "main")]
    return TerminalDraft(question, f'git commit -q -m "{message}" {name}', files, {}, setup, checks)


def undo_changes(random: Random) -> TerminalDraft:
    name, other = names(random, 2, "txt")
    files = {name: text(random), other: text(random), **others(random, name, other)}
    setup = f"{INIT} && echo changed > {name} && echo changed >> {other}"
    question = f"Bring back {name} as it was in the last git commit. Keep the other changes."
    return TerminalDraft(
        question, f"git checkout -q -- {name}", files, {name: files[name]}, setup, [commits(1, kept=True)]
    )


def merge_branch(random: Random) -> TerminalDraft:
    branch, stem, mine = names(random, 3)
    added = text(random)
    setup = (
        f"{INIT} && git checkout -q -b {branch} && printf '{added}' > {stem}.txt && git add -A && "
        f"git commit -q -m 'add {stem}' && git checkout -q main && echo more > {mine}.txt && git add -A && "
        f"git commit -q -m 'add {mine}'"
    ).replace("\n", "\\n")
    right = check(
        f"The branch main must contain the commits of {branch}, and nothing else may be committed",
        [2, 4, 2, 0],
        "for-each-ref refs/heads | wc -l",
        "rev-list --count main",
        f"rev-list --count {branch}",
        f"rev-list --count main..{branch}",
    )
    question = f"Merge the git branch {branch} into main."
    files = others(random, branch, stem, mine)
    checks = [
        right,
        tree({**files, f"{stem}.txt": added, f"{mine}.txt": "more\n"}, "main"),
        tree({**files, f"{stem}.txt": added}, branch, kept=True),
    ]
    return TerminalDraft(question, f"git merge -q --no-edit {branch}", files, {f"{stem}.txt": added}, setup, checks)


def who_added(random: Random) -> TerminalDraft:
    name, target = names(random, 2, "txt")
    words = names(random, 4)
    setup = " && ".join(
        [
            INIT,
            *(f"echo {word} >> {name} && git commit -q -a -m 'change {number}'" for number, word in enumerate(words)),
        ]
    )
    number = random.randrange(4)
    question = (
        f"One git commit added the line {words[number]} to {name}. Write the first line of its message to {target}."
    )
    solution = f"git log -S{words[number]} --format=%s -- {name} > {target}"
    files = {name: "begin\n", **others(random, name, target)}
    return TerminalDraft(question, solution, files, {target: f"change {number}"}, setup, [commits(5, kept=True)])


LEVELS: dict[int, tuple[Generator, ...]] = {
    1: (new_branch, new_tag, commit_all),
    2: (commit_one, undo_changes),
    3: (merge_branch, who_added),
}
