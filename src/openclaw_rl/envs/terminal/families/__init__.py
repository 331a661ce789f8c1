"""The families of generated tasks: name → level → generators. To add one, write its module and add a line here."""

from openclaw_rl.envs.terminal.families import archives, data, files, git, processes, text
from openclaw_rl.envs.terminal.families.draft import Generator

FAMILIES: dict[str, dict[int, tuple[Generator, ...]]] = {
    "files": files.FILES,
    "text": text.TEXT,
    "search": text.SEARCH,
    "permissions": files.PERMISSIONS,
    "archives": archives.LEVELS,
    "git": git.LEVELS,
    "data": data.LEVELS,
    "processes": processes.LEVELS,
}
