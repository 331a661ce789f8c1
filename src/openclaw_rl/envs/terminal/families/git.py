"""Tasks with a git repository, which is the workspace."""

from collections.abc import Sequence
from random import Random
from typing import Any

from openclaw_rl.envs.terminal.families.draft import Generator, TerminalDraft, names, others, text

#: A repository with one commit of everything that is there.
INIT = (
    "git init -q -b main . && git config user.name Agent && git config user.email agent@localhost && "
    "git add -A && git commit -q -m start"
)
#: What the checks look at. No setting of the person, and no hook.
GIT = "git -c core.hooksPath=/dev/null -c core.fsmonitor=false"
SUBJECTS = ("add", "fix", "update", "improve", "extend")


def check(about: str, expected: Sequence[object], *commands: str, kept: bool = False) -> dict[str, Any]:
    """A check of what git's commands print, one line each; `kept` if it is so from the start."""
    script = "; ".join(["export HOME=/nonexistent", *(f"{GIT} {command}" for command in commands)])
    return {"run": script, "expect": "\n".join(map(str, expected)), "about": about, "kept": kept}


def commits(number: int, *, kept: bool = False) -> dict[str, Any]:
    return check(
        f"main must be the current branch and have {number} commits",
        ["main", number],
        "symbolic-ref --short HEAD",
        "rev-list --count HEAD",
        kept=kept,
    )


def subject(random: Random) -> str:
    return f"{random.choice(SUBJECTS)} {random.choice(names(random, 1))}"


def new_branch(random: Random) -> TerminalDraft:
    (name,) = names(random, 1)
    right = check(
        f"there must be a branch {name} at the last commit, besides main",
        [*sorted([name, "main"]), 1],
        "for-each-ref --format='%(refname:short)'",
        "rev-list --count --all",
    )
    return TerminalDraft(
        f"Create a git branch named {name}.", f"git branch {name}", others(random, name), {}, INIT, [right]
    )


def new_tag(random: Random) -> TerminalDraft:
    name = f"v{random.randint(1, 40)}.{random.randint(0, 9)}"
    right = check(f"there must be a tag {name}, and nothing else", [name, 1], "tag", "rev-list --count --all")
    question = f"Tag the last git commit as {name}."
    return TerminalDraft(question, f"git tag {name}", others(random), {}, INIT, [right, commits(1, kept=True)])


def commit_all(random: Random) -> TerminalDraft:
    (name,) = names(random, 1, "txt")
    message, files = subject(random), others(random, name)
    right = check(
        f"the last commit must have the message {message} and the change of {name}",
        [message, name],
        "log -1 --format=%s",
        "diff-tree --no-commit-id --name-only -r HEAD",
    )
    setup = f"{INIT} && echo {random.choice(names(random, 1))} >> {name}"
    question = f'Commit the change of {name} with the message "{message}".'
    solution = f'git commit -q -a -m "{message}"'
    return TerminalDraft(question, solution, {name: text(random), **files}, {}, setup, [right, commits(2)])


def commit_one(random: Random) -> TerminalDraft:
    name, other = names(random, 2, "txt")
    message = subject(random)
    right = check(
        f"the last commit must have the message {message} and the change of {name} only",
        [message, name],
        "log -1 --format=%s",
        "diff-tree --no-commit-id --name-only -r HEAD",
    )
    setup = f"{INIT} && echo changed >> {name} && echo changed >> {other}"
    question = f'Two files were changed. Commit only {name}, with the message "{message}".'
    files = {name: text(random), other: text(random), **others(random, name, other)}
    return TerminalDraft(question, f'git commit -q -m "{message}" {name}', files, {}, setup, [right, commits(2)])


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
        f"main must contain the commits of {branch}, and nothing else may be committed",
        [2, 4, 0],
        "for-each-ref refs/heads | wc -l",
        "rev-list --count main",
        f"rev-list --count main..{branch}",
    )
    question = f"Merge the git branch {branch} into main."
    solution = f"git merge -q --no-edit {branch}"
    files = others(random, branch, stem, mine)
    return TerminalDraft(question, solution, files, {f"{stem}.txt": added}, setup, [right])


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
