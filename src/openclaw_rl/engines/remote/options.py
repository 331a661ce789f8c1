"""What the options of all servers of other projects have in common."""

import shlex
from typing import NamedTuple

from openclaw_rl.config.options import ConfigError
from openclaw_rl.http_client import split_url, url_without_account


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
    urls = read_urls(option, url)
    if not key.strip().isprintable():
        raise ConfigError(f"{option}-key holds a character that cannot be sent, such as a line break: check it.")
    try:
        return RemoteServers(urls, key.strip(), python or default, shlex.split(arguments))
    except ValueError as error:
        raise ConfigError(f"{option}-args {arguments!r} cannot be read: {error}.") from None


def read_urls(option: str, url: str) -> list[str]:
    """The URLs in a list with commas; `option` begins the name of the option. Raises ConfigError."""
    urls = [part.strip().rstrip("/") for part in url.split(",") if part.strip()]
    for part in urls:
        try:
            split_url(part)
        except ValueError as error:
            raise ConfigError(f"{option}-url {url_without_account(part)} is not a server's URL: {error}.") from None
    return urls
