"""The families of generated tasks: name → level → generators. To add one, write its module and add a line here."""

from openclaw_rl.envs.terminal.families import archives, data, files, git, permissions, processes, search, text
from openclaw_rl.envs.terminal.families.draft import Generator

FAMILIES: dict[str, dict[int, tuple[Generator, ...]]] = {
    "files": files.LEVELS,
    "text": text.LEVELS,
    "search": search.LEVELS,
    "permissions": permissions.LEVELS,
    "archives": archives.LEVELS,
    "git": git.LEVELS,
    "data": data.LEVELS,
    "processes": processes.LEVELS,
}
