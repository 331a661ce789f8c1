"""The options of servers of other projects: which ones are used, or how one is started."""

import shlex
import sys
from typing import NamedTuple

from openclaw_rl.config.options import ConfigError, Section, option
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


class VllmOptions(Section):
    """Which vLLM server samples: one of our own, or those that run already."""

    heading = "Engine"
    vllm_url: str = option(
        "", "URLs of running vLLM servers, separated by commas.", shown="a server of our own is started"
    )
    vllm_key: str = option("", "API key of those servers.", env="VLLM_API_KEY", shown="no key", secret=True)
    vllm_python: str | None = option(None, "Python interpreter that has vLLM.", shown="the one that runs openclaw-rl")
    vllm_args: str = option("", "More arguments for a vLLM server of our own.", shown="no more arguments")

    @property
    def server(self) -> RemoteServers:
        """The same, read. Raises ConfigError."""
        return remote_servers("--vllm", self.vllm_url, self.vllm_key, self.vllm_python, self.vllm_args, sys.executable)


class SglangOptions(Section):
    """Which SGLang server samples: one of our own, or those that run already."""

    heading = "Engine"
    sglang_url: str = option(
        "", "URLs of running SGLang servers, separated by commas.", shown="a server of our own is started"
    )
    sglang_key: str = option("", "API key of those servers.", env="SGLANG_SERVER_API_KEY", shown="no key", secret=True)
    sglang_python: str | None = option(
        None, "Python interpreter that has SGLang.", shown="the one that runs openclaw-rl"
    )
    sglang_args: str = option("", "More arguments for an SGLang server of our own.", shown="no more arguments")

    @property
    def server(self) -> RemoteServers:
        """The same, read. Raises ConfigError."""
        return remote_servers(
            "--sglang", self.sglang_url, self.sglang_key, self.sglang_python, self.sglang_args, sys.executable
        )
