"""The tools of an episode: list, read, search and edit files, and run the tests."""

import asyncio
from collections.abc import Mapping
from itertools import islice
from typing import Any

from openclaw_rl.envs.calls import ToolFailed, function_tool
from openclaw_rl.envs.swe.repository import Repository
from openclaw_rl.envs.swe.suites import TestResult, TestSuite

#: What one result shows at most.
MAX_FILES = 200
MAX_LINES = 200
MAX_LINE_CHARACTERS = 500
MAX_HITS = 50
MAX_FAILURES = 8


_TEXT = {"type": "string"}
EDIT = ("path", "old", "new")
_NUMBER = {"type": "integer", "minimum": 1}
TOOLS = [
    function_tool("list_files", "The files of the repository.", [], {"folder": _TEXT}),
    function_tool("read_file", "The lines of a file.", ["path"], {"path": _TEXT, "first_line": _NUMBER}),
    function_tool("search", "The lines that contain a text.", ["text"], {"text": _TEXT}),
    function_tool("edit", "Replace a text that occurs once in a file.", EDIT, dict.fromkeys(EDIT, _TEXT)),
    function_tool("run_tests", "Run the tests.", [], {}),
]


class RepositoryTools:
    """Runs the tools on a repository, in a thread: a repository may have thousands of files."""

    tools = TOOLS

    def __init__(self, repository: Repository, suite: TestSuite) -> None:
        self._repository = repository
        self._suite = suite

    async def run(self, name: str, arguments: Mapping[str, Any]) -> str:
        """The text of the result. Raises ToolFailed if the tool refuses its arguments, EnvFailed if it is broken."""
        if name == "run_tests":
            return summary(await self._suite.run(self._repository))
        return await asyncio.to_thread(self._run, name, arguments)

    def _run(self, name: str, arguments: Mapping[str, Any]) -> str:
        match name:
            case "list_files":
                return self._list(arguments.get("folder", ""))
            case "read_file":
                return self._read(arguments["path"], int(arguments.get("first_line", 1)))
            case "search":
                return self._search(arguments["text"])
            case "edit":
                return self._repository.edit(arguments["path"], arguments["old"], arguments["new"])
        raise ToolFailed(f"There is no tool {name}.")

    def _list(self, folder: str) -> str:
        folder = "/".join(part for part in folder.split("/") if part not in ("", "."))
        paths = [path for path in self._repository.paths() if not folder or path.startswith(f"{folder}/")]
        if not paths:
            raise ToolFailed(f"There is no folder {folder}.")
        more = [f"… and {len(paths) - MAX_FILES} more; name a folder."] if len(paths) > MAX_FILES else []
        return "\n".join([*paths[:MAX_FILES], *more])

    def _read(self, path: str, first: int) -> str:
        lines = self._repository.read(path).splitlines()
        shown = lines[first - 1 : first - 1 + MAX_LINES]
        if not shown:
            raise ToolFailed(f"{path} has {len(lines)} lines.")
        last = first + len(shown) - 1
        more = [f"… {len(lines) - last} more lines; go on with first_line {last + 1}."] if last < len(lines) else []
        return "\n".join([*shown, *more])

    def _search(self, text: str) -> str:
        if not text.strip():
            raise ToolFailed("Give a text to search for.")
        hits = list(islice(self._repository.search(text), MAX_HITS + 1))
        lines = [f"{path}:{number}: {line[:MAX_LINE_CHARACTERS]}" for path, number, line in hits[:MAX_HITS]]
        if len(hits) > MAX_HITS:
            lines.append("… and more; search for a longer text.")
        return "\n".join(lines) or "No line contains it."


def summary(results: Mapping[str, TestResult]) -> str:
    """What the policy is told about a run of the tests."""
    failed = {id_: result for id_, result in results.items() if not result.passed}
    if not failed:
        return f"All {len(results)} tests pass." if results else "There are no tests."
    lines = [f"{len(failed)} of {len(results)} tests fail."]
    lines += [f"{id_}: {result.problem}" for id_, result in islice(failed.items(), MAX_FAILURES)]
    return "\n".join(lines)
