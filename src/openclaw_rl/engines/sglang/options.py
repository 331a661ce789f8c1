"""The options of SGLang as a sampler."""

import sys

from openclaw_rl.config.options import Section, option
from openclaw_rl.engines.remote.options import RemoteServers, remote_servers


class SglangOptions(Section):
    """Which SGLang server samples: one of our own, or those that run already."""

    sglang_url: str = option(
        "",
        "URLs of running SGLang servers, separated by commas.",
        group="Engine",
        env="SGLANG_URL",
        shown="a server of our own is started",
    )
    sglang_key: str = option(
        "", "API key of those servers.", group="Engine", env="SGLANG_SERVER_API_KEY", shown="no key", secret=True
    )
    sglang_python: str | None = option(
        None,
        "Python interpreter that has SGLang.",
        group="Engine",
        env="SGLANG_PYTHON",
        shown="the one that runs openclaw-rl",
    )
    sglang_args: str = option(
        "",
        "More arguments for an SGLang server of our own.",
        group="Engine",
        env="SGLANG_ARGS",
        shown="no more arguments",
    )

    @property
    def server(self) -> RemoteServers:
        """The same, read. Raises ConfigError."""
        return remote_servers(
            "--sglang", self.sglang_url, self.sglang_key, self.sglang_python, self.sglang_args, sys.executable
        )
