"""The options of vLLM as a sampler."""

import sys

from openclaw_rl.config.options import Section, option
from openclaw_rl.engines.remote.options import RemoteServers, remote_servers


class VllmOptions(Section):
    """Which vLLM server samples: one of our own, or those that run already."""

    vllm_url: str = option(
        "",
        "URLs of running vLLM servers, separated by commas.",
        group="Engine",
        env="VLLM_URL",
        shown="a server of our own is started",
    )
    vllm_key: str = option(
        "", "API key of those servers.", group="Engine", env="VLLM_API_KEY", shown="no key", secret=True
    )
    vllm_python: str | None = option(
        None,
        "Python interpreter that has vLLM.",
        group="Engine",
        env="VLLM_PYTHON",
        shown="the one that runs openclaw-rl",
    )
    vllm_args: str = option(
        "",
        "More arguments for a vLLM server of our own.",
        group="Engine",
        env="VLLM_ARGS",
        shown="no more arguments",
    )

    @property
    def server(self) -> RemoteServers:
        """The same, read. Raises ConfigError."""
        return remote_servers("--vllm", self.vllm_url, self.vllm_key, self.vllm_python, self.vllm_args, sys.executable)
