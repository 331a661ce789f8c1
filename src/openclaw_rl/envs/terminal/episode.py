"""One attempt at a task in a shell."""

import asyncio
import fcntl
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openclaw_rl.envs.base import EnvFailed, Message, Outcome, Step, Tool
from openclaw_rl.envs.terminal.commands import GivenCommand, read_command, results_for
from openclaw_rl.envs.terminal.workspace import (
    CheckResult,
    WorkspaceItem,
    WorkspaceScore,
    WorkspaceTooLarge,
    fill,
    look,
    read_bytes,
    same_text,
    score,
)
from openclaw_rl.sandbox.base import Sandbox, give_folder, remove_folder
from openclaw_rl.sandbox.programs import EndReason, even_if_cancelled
from openclaw_rl.sandbox.shell import Shell, ShellResult

#: Seconds for the preparation of a workspace and for one check.
SETUP_SECONDS = 30.0
CHECK_SECONDS = 20.0
#: How long a process may take to start or to end before the check for it fails, and how often it is looked at.
PROCESS_SECONDS = 2.0
LOOK_SECONDS = 0.05
#: Bytes of a file with a process id.
MAX_PID_BYTES = 64
#: How much of an error is repeated in a hint.
MAX_ERROR = 200
SEVERAL_COMMANDS = (
    "You are in a Linux shell. Do what the user asks with bash {style}s, one in each answer. When it is done, "
    "answer: DONE"
)
NO_COMMAND = "Answer with one bash block that has the command."


@dataclass(frozen=True, slots=True)
class TerminalLimits:
    """What one attempt may take."""

    seconds: float = 10.0
    """For one command."""
    max_output: int = 2000
    """Bytes of an output that the model sees."""
    memory_mib: int = 512


class TerminalEpisode:
    """A workspace and a shell, until the task's turns are used up or an answer has no command.

    - The shell keeps its state from answer to answer, also after a command that failed or took too long.
    - All processes have ended before the workspace is looked at, so nothing changes while it is checked.
    - Files and processes are checked, and never what the shell says about them.
    - A process is checked by the lock that it holds, on a file that was opened before the first command.
    - `close` ends all processes and deletes the workspace, whatever is in it, also if it is cancelled.
    """

    def __init__(
        self, sandbox: Sandbox, task: Mapping[str, Any], limits: TerminalLimits, tools: Sequence[Tool] = ()
    ) -> None:
        self.tools = tools
        self._sandbox = sandbox
        self._task = task
        self._limits = limits
        self.folder = Path(tempfile.mkdtemp(prefix="openclaw-terminal-"))
        self._shell = Shell(
            sandbox, self.folder, memory_mib=limits.memory_mib, network=bool(task.get("network", False))
        )
        self._before: Mapping[str, WorkspaceItem] = {}
        self._locks: dict[str, int] = {}
        self._turns = 0
        self._ran = False

    async def start(self) -> Sequence[Message]:
        await asyncio.to_thread(self._fill)
        if setup := self._task.get("setup"):
            result = await self._shell.run(setup, SETUP_SECONDS)
            if result.exit_code != 0:
                raise EnvFailed(f"the workspace cannot be prepared: {result.output.strip()[-MAX_ERROR:]}")
        self._before = await asyncio.to_thread(look, self.folder)
        for check in self._process_checks():
            self._locks[check["lock"]] = os.open(self.folder / check["lock"], os.O_RDONLY | os.O_NOFOLLOW)
        messages: Sequence[Message] = self._task["messages"]
        return messages

    async def step(self, answer: Message) -> Step:
        self._turns += 1
        given = read_command(answer)
        if not given.text.strip():
            return self._without_command(given)
        result = await self._shell.run(given.text, self._limits.seconds, self._limits.max_output)
        self._ran = self._ran or result.exit_code == 0
        error = "" if result.exit_code == 0 else f"The command failed: {self._shown(result)[-MAX_ERROR:]}"
        return Step(results_for(given, self._shown(result)), hint=error, done=self._is_last())

    async def outcome(self) -> Outcome:
        result = await self.score()
        if result.solved:
            return Outcome(1.0, solved=True)
        return Outcome(result.reward(ran=self._ran), False, f"{result.hint} Run: {self._task['solution']}")

    async def close(self) -> None:
        await even_if_cancelled(self._close())

    async def score(self) -> WorkspaceScore:
        """Look at processes, end them, and look at the workspace."""
        goals = [check for check in self._process_checks() if not check["kept"]]
        kept = [check for check in self._process_checks() if check["kept"]]
        results = await asyncio.gather(*map(self._check_process, goals))
        if kept:
            # A process that was killed by mistake needs a moment to be gone.
            await asyncio.sleep(LOOK_SECONDS)
            results += await asyncio.gather(*map(self._check_process, kept))
        await self._shell.close()
        try:
            after = await asyncio.to_thread(look, self.folder)
        except WorkspaceTooLarge as error:
            return WorkspaceScore(0.0, 0.0, (f"The workspace is too large: {error}.",))
        results += [await self._check_output(check) for check in self._checks() if "run" in check]
        return score(self._before, after, self._task["changes"], results)

    async def _close(self) -> None:
        try:
            await self._shell.close()
        finally:
            while self._locks:
                os.close(self._locks.popitem()[1])
            await asyncio.to_thread(remove_folder, self.folder)

    def _checks(self) -> Sequence[Mapping[str, Any]]:
        checks: Sequence[Mapping[str, Any]] = self._task.get("checks", ())
        return checks

    def _process_checks(self) -> list[Mapping[str, Any]]:
        return [check for check in self._checks() if "lock" in check]

    def _fill(self) -> None:
        self._write_files()
        give_folder(self.folder, whole=True)

    def _write_files(self) -> None:
        fill(self.folder, self._task["files"])

    def _is_last(self) -> bool:
        return self._turns >= int(self._task["turns"])

    def _without_command(self, given: GivenCommand) -> Step:
        """An answer without a command ends the attempt; one with a call that cannot be read does not."""
        if not given.problem:
            return Step(hint="" if self._ran else NO_COMMAND, done=True)
        return Step(results_for(given, given.problem), hint=given.problem, done=self._is_last())

    def _shown(self, result: ShellResult) -> str:
        """What the model sees of a result."""
        if result.timed_out:
            note = f"[ended after {self._limits.seconds:g} seconds; a new shell starts with the next command]"
        elif result.flooded:
            note = "[ended, because it printed too much; a new shell starts with the next command]"
        elif result.shell_ended:
            note = f"[the shell ended with status {result.exit_code}; a new one starts with the next command]"
        elif result.exit_code:
            note = f"[exit status {result.exit_code}]"
        else:
            note = "" if result.output.strip() else "[no output]"
        return "\n".join(filter(None, [result.output.rstrip("\n"), note]))

    async def _check_process(self, check: Mapping[str, Any]) -> CheckResult:
        """Look for a process, which holds the lock of a file for as long as it lives."""
        tries = int(PROCESS_SECONDS / LOOK_SECONDS)
        for number in range(tries):
            if self._is_as_wanted(check):
                return CheckResult("", check["kept"])
            if number + 1 < tries:
                await asyncio.sleep(LOOK_SECONDS)
        return CheckResult(f"{check['about']}.", check["kept"])

    def _is_as_wanted(self, check: Mapping[str, Any]) -> bool:
        lock = self._locks[check["lock"]]
        if _is_locked(lock) != check["held"]:
            return False
        if check["held"] and not _is_at(lock, self.folder / check["lock"]):
            return False
        if not check.get("pid"):
            return True
        # The process wrote its id into the file that it locked.
        try:
            written = read_bytes(self.folder / check["pid"], MAX_PID_BYTES)
        except OSError:
            return False
        return written.strip() == os.pread(lock, MAX_PID_BYTES, 0).strip() != b""

    async def _check_output(self, check: Mapping[str, Any]) -> CheckResult:
        """Compare what a command of the task prints with what it should. It runs in the sandbox too."""
        outcome = await self._sandbox.run(["bash", "-c", check["run"]], self.folder, seconds=CHECK_SECONDS)
        right = outcome.ended is EndReason.EXITED and same_text(outcome.stdout.encode(), check["expect"])
        return CheckResult("" if right else f"{check['about']}.", check["kept"])


def _is_at(opened: int, path: Path) -> bool:
    """Whether an opened file is still in its place."""
    try:
        return os.path.samestat(os.fstat(opened), path.lstat())
    except OSError:
        return False


def _is_locked(opened: int) -> bool:
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(opened, fcntl.LOCK_UN)
    return False
