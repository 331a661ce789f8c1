"""What the options of all servers of other projects have in common."""

import shlex
from typing import NamedTuple

from openclaw_rl.config.options import ConfigError


class RemoteServers(NamedTuple):
    """Which servers a sampler uses: those at `urls`, or one of its own."""

    urls: list[str]
    key: str
    python: str
    """The interpreter that has the server's package."""
    arguments: list[str]
    """More arguments for a server of its own."""


def remote_servers(option: str, url: str, key: str, python: str | None, arguments: str, default: str) -> RemoteServers:
    """Read the values of one engine's options; `option` begins their names. Raises ConfigError."""
    urls = [part.strip().rstrip("/") for part in url.split(",") if part.strip()]
    for part in urls:
        if not part.startswith(("http://", "https://")):
            raise ConfigError(f"{option}-url {part} is not a URL: it must start with http:// or https://.")
    try:
        return RemoteServers(urls, key, python or default, shlex.split(arguments))
    except ValueError as error:
        raise ConfigError(f"{option}-args {arguments!r} cannot be read: {error}.") from None
