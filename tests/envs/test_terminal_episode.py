"""Attempts in a terminal: what a policy sees, how it is scored, and that nothing it does reaches beyond."""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from openclaw_rl.envs.base import EnvFailed, Outcome, Step
from openclaw_rl.envs.registry import make_environment
from openclaw_rl.envs.terminal.commands import BASH_TOOL, block_of, call_of, first_block
from openclaw_rl.envs.terminal.episode import TerminalEpisode, TerminalLimits
from openclaw_rl.sandbox.kinds import choose_sandbox, problem_with
from support.process_stats import children

pytestmark = pytest.mark.skipif(
    bool(problem_with("bubblewrap")) and bool(problem_with("fences")),
    reason=f"commands cannot be confined: {problem_with('bubblewrap')}, {problem_with('fences')}",
)
FILES = {"a.txt": "one\n", "b.txt": "two\n", "sub/c.txt": "three\n", "run.sh": {"text": "#!/bin/sh\n", "mode": 0o755}}
Open = Callable[..., Awaitable[TerminalEpisode]]


@pytest.fixture
async def start() -> AsyncIterator[Open]:
    """Starts episodes, and closes them at the end."""
    opened: list[TerminalEpisode] = []

    async def open_one(seconds: float = 10.0, **data: Any) -> TerminalEpisode:
        task = {"files": FILES, "changes": {"new": "text"}, "turns": 9, "messages": [], "solution": "?", **data}
        episode = TerminalEpisode(choose_sandbox(), task, TerminalLimits(seconds))
        opened.append(episode)
        await episode.start()
        return episode

    yield open_one
    for episode in opened:
        await episode.close()
        assert not episode.folder.exists()


async def run(episode: TerminalEpisode, command: str) -> Step:
    return await episode.step(block_of(command))


def shown(step: Step) -> str:
    (message,) = step.messages
    return str(message["content"])


async def finish(episode: TerminalEpisode, *commands: str) -> Outcome:
    for command in commands:
        await run(episode, command)
    return await episode.outcome()


async def test_the_shell_keeps_its_state_between_answers(start: Open) -> None:
    episode = await start()
    assert shown(await run(episode, "cd sub; x=5")) == "[no output]"
    step = await run(episode, "pwd; echo $x; ls -1 ..; false")
    assert shown(step) == f"{episode.folder}/sub\n5\na.txt\nb.txt\nrun.sh\nsub\n[exit status 1]"
    assert step.hint.startswith("The command failed: ")
    assert not step.done


async def test_a_command_may_come_from_a_tool_call(start: Open) -> None:
    episode = await start()
    step = await episode.step(call_of("echo called", "id7"))
    assert step.messages == [{"role": "tool", "tool_call_id": "id7", "content": "called"}]
    broken = {**call_of("", "id8"), "content": None}
    broken["tool_calls"][0]["function"]["arguments"] = "{"
    step = await episode.step(broken)
    assert step.messages[0]["content"] == "The arguments of bash are not valid JSON."
    assert not step.done
    two = call_of("echo first", "id9")
    two["tool_calls"] += call_of("echo second > b.txt", "id10")["tool_calls"]
    step = await episode.step(two)
    assert [(message["tool_call_id"], message["content"]) for message in step.messages] == [
        ("id9", "first"),
        ("id10", "This call was not run: only the first call of an answer is run."),
    ]
    environment = make_environment("terminal", {"style": "tool"})
    task = next(environment.tasks("train", 0))
    assert task.data["messages"][2]["tool_calls"][0]["function"]["name"] == "bash"
    opened = environment.open(task)
    assert opened.tools == [BASH_TOOL]
    await opened.close()


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("```bash\nls\n```", "ls"),
        ("Sure:\n```sh\ncd a\nls -l\n```\nThis lists.", "cd a\nls -l"),
        ("```\nls\n```\n```bash\nrm x\n```", "ls"),
        ("```python\nprint(1)\n```\n```bash\nls\n```", "ls"),
        ("```bash\n$ ls\n```", "ls"),
        ("```bash\nls", "ls"),
        ("```bash ls ```", "ls"),
        ("1. Do:\n   ```bash\n   ls\n   ```", "   ls"),
        ("```python\nprint(1)\n```", ""),
        ("I would run ls.", ""),
        ("```bash\n\n```", ""),
        ("", ""),
    ],
)
def test_the_first_block_of_a_shell_counts(text: str, command: str) -> None:
    assert first_block(text) == command


async def test_an_answer_without_a_command_ends_the_attempt(start: Open) -> None:
    step = await (await start()).step({"role": "assistant", "content": "I do not know."})
    assert (step.done, step.hint) == (True, "Answer with one bash block that has the command.")
    step = await (await start()).step({"role": "assistant", "content": None})
    assert step.done
    episode = await start()
    await run(episode, "true")
    assert await episode.step({"role": "assistant", "content": "DONE"}) == Step(done=True)


async def test_turns_are_limited(start: Open) -> None:
    episode = await start(turns=2)
    assert [(await run(episode, "true")).done for _ in range(2)] == [False, True]


async def test_time_outs_floods_and_ends_are_observations(start: Open) -> None:
    episode = await start(seconds=0.7)
    await run(episode, "cd sub")
    assert shown(await run(episode, "echo begun; sleep 60")) == (
        "begun\n[ended after 0.7 seconds; a new shell starts with the next command]"
    )
    assert shown(await run(episode, "basename $PWD; exit 4")).startswith("sub\n[the shell ended with status 4;")
    long = shown(await run(episode, "seq 100000"))
    assert len(long) < 2100
    assert "bytes cut" in long
    assert shown(await run(episode, "echo on")) == "on"


@pytest.mark.parametrize(
    ("command", "progress", "hint"),
    [
        ("echo text > new", 1.0, ""),
        ("printf '  text  \\n\\n' > new", 1.0, ""),
        ("true", 0.1, "new is missing."),
        ("echo wrong > new", 0.1, 'new must contain "text".'),
        ("mkdir new", 0.1, "new must be a file."),
        ("ln -s a.txt new", 0.1, "new must be a file."),
        ("mkfifo new", 0.1, "new must be a file."),
        ("echo text > new; echo more >> a.txt", 0.1 + 0.7 * 4 / 5, "a.txt must not be changed."),
        ("echo text > new; chmod 600 b.txt", 0.1 + 0.7 * 4 / 5, "b.txt must not be changed."),
        ("echo text > new; chmod 700 sub", 0.1 + 0.7 * 4 / 5, "sub must not be changed."),
        ("echo text > new; rm -r sub", 0.1 + 0.7 * 3 / 5, "sub must not be deleted. sub/c.txt"),
        ("echo text > new; rm a.txt; ln -s b.txt a.txt", 0.1 + 0.7 * 4 / 5, "a.txt must not be changed."),
        ("echo text > new; mkdir -p x/y; touch x/y/z", 0.1 + 0.7 * 5 / 6, "x does not belong there."),
        ("echo text > new; git init -q .", 0.1 + 0.7 * 5 / 6, ".git does not belong there."),
        ("echo text > new; mkdir .cache; touch .bash_history", 1.0, ""),
        ("rm -rf *; echo text > new", 0.1, "must not be deleted."),
    ],
)
async def test_the_whole_workspace_counts(start: Open, command: str, progress: float, hint: str) -> None:
    outcome = await finish(await start(), command)
    assert outcome.reward == pytest.approx(progress)
    assert outcome.solved == (progress == 1.0)
    assert hint in outcome.hint


async def test_goals_can_be_json_modes_folders_and_absence(start: Open) -> None:
    changes = {"a.txt": None, "sub": None, "n.json": {"json": {"x": [1, 2]}}, "b.txt": {"text": "two", "mode": 0o600}}
    right = ["rm -r a.txt sub", """echo '{"x":[1,\n2.0]}' > n.json""", "chmod 600 b.txt"]
    assert (await finish(await start(changes=changes), *right)).solved
    half = await finish(await start(changes=changes), *right[:1], "echo '{' > n.json")
    assert half.reward == pytest.approx(0.1 + 0.7 / 2)
    assert "n.json must contain the JSON" in half.hint
    assert "b.txt must have the mode 600, not 644." in half.hint


async def test_a_workspace_that_cannot_be_prepared_is_the_environments_fault(start: Open) -> None:
    with pytest.raises(EnvFailed, match="the workspace cannot be prepared: no luck"):
        await start(setup="echo no luck; false")


@pytest.mark.parametrize(
    "command",
    [
        "for i in $(seq 6000); do echo > f$i; done",
        "for i in 1 2 3 4 5; do head -c 9000000 /dev/zero > big$i; done",
        "d=$(printf 'x%.0s' {1..200}); for i in $(seq 30); do mkdir $d; cd $d; done",
        "chmod 0 . sub",
        "mkdir locked; touch locked/x; chmod 0 locked",
        "ln -s / root; ln -s loop loop; mkfifo pipe; touch $'odd\\nname' $'\\xff' -- -rf",
        "rm -rf ~; mkdir ~",
        "mv ~ /tmp/elsewhere",
        "(while :; do echo x >> a.txt; sleep 0.01; done) > /dev/null 2>&1 & disown",
    ],
)
async def test_a_hostile_workspace_is_scored_and_deleted(start: Open, command: str) -> None:
    outcome = await finish(await start(), command)
    assert not outcome.solved
    assert outcome.reward <= 0.1


async def test_nothing_changes_after_the_processes_were_ended(start: Open) -> None:
    before = children(os.getpid())
    episode = await start()
    await run(
        episode, "echo text > new; (setsid bash -c 'trap \"\" TERM HUP; sleep 1.5; rm -f new' &) > /dev/null 2>&1"
    )
    assert (await episode.outcome()).solved
    await asyncio.sleep(0)
    assert (episode.folder / "new").exists()
    assert children(os.getpid()) == before


async def test_attempts_do_not_reach_each_other_or_the_checker(start: Open) -> None:
    check = {"run": "cat new", "expect": "text", "about": "new must be readable", "kept": False}
    one, other = await start(checks=[check]), await start(checks=[check])
    # A program of its own in place of those that the check uses.
    hostile = "mkdir -p bin; printf '#!/bin/sh\\necho text' > bin/cat; chmod +x bin/cat; export PATH=$PWD/bin:$PATH"
    await run(one, f"{hostile}; echo 'cat() {{ echo text; }}' > .bashrc; cp .bashrc .profile; cat() {{ echo text; }}")
    step = await run(one, f"command ls {other.folder}; echo text > {other.folder}/new; rm -rf {other.folder}/*")
    assert "a.txt" not in shown(step)
    result = await one.score()
    assert "new must be readable." in result.problems
    assert (await finish(other, "echo text > new")).solved


async def test_many_attempts_at_once(start: Open) -> None:
    episodes = await asyncio.gather(*(start() for _ in range(8)))
    results = await asyncio.gather(*(finish(one, "echo text > new", "sleep 0.05") for one in episodes))
    assert all(outcome.solved for outcome in results)


async def test_a_cancelled_close_deletes_the_workspace(start: Open) -> None:
    before = children(os.getpid())
    episode = await start()
    await run(episode, "sleep 60 &")
    closing = asyncio.create_task(episode.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert not episode.folder.exists()
    assert children(os.getpid()) == before


async def test_a_killed_sandbox_is_only_the_end_of_a_shell(start: Open) -> None:
    before = children(os.getpid())
    episode = await start()
    await run(episode, "true")
    running = asyncio.create_task(run(episode, "sleep 30"))
    await asyncio.sleep(0.1)
    sandboxes = set(children(os.getpid())) - set(before)
    assert sandboxes
    for process in sandboxes:
        os.kill(process, 9)
    assert "[the shell ended with status 137" in shown(await running)
    assert (await finish(episode, "echo text > new")).solved
