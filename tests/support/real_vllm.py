"""A real vLLM server on a CPU, for the tests of `make test-vllm`.

OPENCLAW_RL_VLLM names a Python that has vLLM: it needs an environment of its own.
"""

import os
from pathlib import Path
from typing import Any

from openclaw_rl.engines.options import LINEAR_MODULES
from openclaw_rl.engines.remote.vllm import VllmDialect
from support.engine_harness import MAX_SEQUENCES, POLICIES, RemoteHarness

VLLM = os.environ.get("OPENCLAW_RL_VLLM", "")
#: The longest time for a start. It takes one to four minutes on two cores.
START_SECONDS = 600
#: vLLM's tokens of a cached block on a CPU: a multiple of this.
BLOCK_TOKENS = 32
#: The smallest head of vLLM's attention on a CPU.
HEAD_SIZE = 32
ENVIRONMENT = {
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


def vllm_command(model: Path, port: int, *, sequences: int, rank: int, policies: int) -> list[str]:
    """The command of a server as docs/engines.md says, small and without compilation."""
    values = {
        "model": model,
        "served-model-name": "base",
        "host": "127.0.0.1",
        "port": port,
        "dtype": "float32",
        "block-size": BLOCK_TOKENS,
        "max-num-seqs": sequences,
        "max-lora-rank": rank,
        # One more, because an adapter stands for the base model on a CPU.
        "max-loras": policies + 1,
        "max-cpu-loras": policies + 3,
        "max-logprobs": 65,
        "scheduling-policy": "priority",
    }
    pairs = [part for name, value in values.items() for part in (f"--{name}", str(value))]
    flags = ["--enable-scale-out", "--enable-lora", "--lora-target-modules", *LINEAR_MODULES]
    flags += ["--enable-prompt-tokens-details", "--enforce-eager"]
    return [VLLM, "-m", "vllm.entrypoints.openai.api_server", *pairs, *flags]


class RealVllmHarness(RemoteHarness):
    """vLLM over the tiny model."""

    program = "vllm"
    page_tokens = BLOCK_TOKENS

    def dialect(self) -> Any:
        return VllmDialect()

    def environment(self) -> dict[str, str]:
        return {**ENVIRONMENT, "OMP_NUM_THREADS": "1"}

    def command(self, port: int) -> list[str]:
        return vllm_command(self.model, port, sequences=MAX_SEQUENCES, rank=8, policies=POLICIES)
