"""Shortcuts in the generated tasks of `terminal`: what looks like a solution, and leaves undone what was asked."""

from dataclasses import asdict
from random import Random
from typing import Any

import pytest

from openclaw_rl.envs.base import Outcome, Task
from openclaw_rl.envs.registry import make_environment
from openclaw_rl.envs.terminal import episode
from openclaw_rl.envs.terminal.families import git, processes
from openclaw_rl.envs.terminal.families.draft import Generator
from openclaw_rl.sandbox.kinds import problem_with
from support.terminal_policies import attempt

pytestmark = [
    pytest.mark.more,
    pytest.mark.skipif(
        bool(problem_with("bubblewrap")) and bool(problem_with("fences")),
        reason=f"commands cannot be confined: {problem_with('bubblewrap')}, {problem_with('fences')}",
    ),
]


async def outcome_of(make: Generator, command: str) -> Outcome:
    """The outcome of a command in a task of a generator."""
    draft = make(Random(1))
    data: dict[str, Any] = {**asdict(draft), "messages": [], "turns": 4, "style": "block"}
    return await attempt(make_environment("terminal", {}), Task("shortcut", data), lambda _: [command])


@pytest.mark.parametrize(
    ("make", "shortcut"),
    [
        (processes.end_by_id, "f=$(ls *.lock | head -n 1); rm $f; touch $f"),
        (processes.end_by_id, "for f in *.lock; do cp $f q; mv q $f; done"),
        (processes.end_the_stuck, "for f in $(grep -l stuck *.log); do cp ${f%.log}.lock q; mv q ${f%.log}.lock; done"),
        (processes.start_with_variable, "./*.sh & sleep 0.1; rm -f *..lock"),
        (processes.start_with_variable, "./*.sh & sleep 0.1; for f in *.*.lock; do cp *..lock $f; done; mv *..lock $f"),
        (processes.restart, "for f in *.*.lock; do cat *.pid > $f; done"),
        (processes.restart, "o=$(grep -l . *.lock); n=$(grep -L . *.lock); cp $o q; cp -p $n $o; mv q $n"),
        (processes.restart, "p=$(cat *.pid); sh *.sh & echo $! > *.pid; kill $p"),
    ],
)
async def test_a_process_task_needs_its_process(
    make: Generator, shortcut: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(episode, "PROCESS_SECONDS", 0.3)
    outcome = await outcome_of(make, shortcut)
    assert not outcome.solved
    assert "must run at the end" in outcome.hint or "must not run at the end" in outcome.hint


async def test_the_id_of_a_restarted_process_must_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(episode, "PROCESS_SECONDS", 0.3)
    draft = processes.restart(Random(1))
    wrong = draft.solution.replace("echo $!", "echo $$")
    assert not (await outcome_of(processes.restart, wrong)).solved
    assert (await outcome_of(processes.restart, draft.solution)).solved


@pytest.mark.parametrize(
    ("make", "shortcut"),
    [
        (git.new_branch, "git tag {name}"),
        (git.new_tag, "git tag {name} HEAD:$(ls | head -n 1)"),
        (git.commit_all, 'git rm -q --cached {name}; git commit -q -m "{message}"'),
        (git.commit_all, 'git update-index --chmod=+x {name}; git commit -q -m "{message}"'),
        (git.commit_one, 'git update-index --chmod=+x {name}; git commit -q -m "{message}"'),
        (git.commit_one, 'git rm -q --cached {name}; git commit -q -m "{message}"'),
        (git.merge_branch, "git show {name}:{file} > f; git merge -q -s ours --no-edit {name}; mv f {file}"),
    ],
)
async def test_a_git_task_needs_its_content_in_git(make: Generator, shortcut: str) -> None:
    draft = make(Random(1))
    words = draft.question.replace('"', " ").replace(",", "").rstrip(".").split()
    at = {git.new_branch: -1, git.new_tag: -1, git.commit_one: 6, git.merge_branch: 4, git.commit_all: 4}[make]
    message = draft.question.split('"')[1] if '"' in draft.question else ""
    command = shortcut.format(name=words[at], message=message, file="".join(draft.changes))
    assert not (await outcome_of(make, command)).solved, command
    assert (await outcome_of(make, draft.solution)).solved
