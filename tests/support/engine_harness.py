"""The engines that the conformance suite runs over: how to start each one, and how to make a policy that it loads."""

import asyncio
import os
import random
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from openclaw_rl.engines.base import PolicyRef, Sampler, WeightForm, policy_in
from openclaw_rl.engines.local.merge import merge_adapter
from openclaw_rl.engines.local.process.sampler import LocalSampler
from openclaw_rl.engines.local.process.worker_messages import WorkerOptions
from openclaw_rl.engines.remote.factory import free_port
from openclaw_rl.engines.remote.full_weights import FullWeightSampler
from openclaw_rl.engines.remote.http import InferenceServer
from openclaw_rl.engines.remote.process import ServerProcess
from openclaw_rl.engines.remote.sampler import RemoteOptions, RemoteSampler
from openclaw_rl.engines.remote.sglang import SglangDialect
from openclaw_rl.engines.remote.vllm import VllmDialect
from openclaw_rl.types import SampleRequest
from support.fakes import ScriptedSampler
from support.process_stats import children
from support.rank_processes import FastLauncher
from support.tiny_models import save_adapters, save_tiny_gemma

#: Every sampler samples this many sequences at the same time, queues the same number, and holds this many policy
#: versions besides the base model.
MAX_SEQUENCES, MAX_QUEUE, POLICIES = 4, 4, 2


class SamplerHarness:
    """One sampler under test, over the tiny model, and the policies for it."""

    has_model = True
    """Whether its tokens come from the tiny model, so that log-probs can be compared with a reference."""
    has_process = False
    """Whether it runs in a process that can die."""
    counts_cached = False
    """Whether it reports cached prompt tokens."""
    page_tokens = 16
    """Tokens that are cached together."""

    def __init__(self, model: Path, adapters: Sequence[Path], folder: Path) -> None:
        self.model, self.adapters, self.folder = model, adapters, folder
        self.numbers = count(1)
        self.sampler: Any = None

    async def start(self) -> None:
        self.sampler = self.make()
        await self.sampler.start()

    async def close(self) -> None:
        await self.sampler.close()

    def make(self) -> Sampler:
        """Another sampler, not started."""
        raise NotImplementedError

    async def policy(self, number: int) -> PolicyRef:
        """The policy that is adapter `number`, in a form that the sampler loads."""
        return policy_in(self.adapters[number])

    def kill(self) -> None:
        """End the process at once, as a crash does."""
        raise NotImplementedError

    @asynccontextmanager
    async def published(self, adapter: int, *, candidate: bool = False) -> AsyncIterator[int]:
        """A version that the sampler holds for the length of a block."""
        version = next(self.numbers)
        await self.sampler.publish(version, await self.policy(adapter), candidate=candidate)
        try:
            yield version
        finally:
            self.sampler.retract(version)

    def reference(self, ids: Sequence[int], adapter: int | None = None) -> torch.Tensor:
        """Raw log-probs of all tokens after each of `ids`, by Transformers and PEFT."""
        model: Any = AutoModelForCausalLM.from_pretrained(self.model, attn_implementation="eager")
        if adapter is not None:
            model = PeftModel.from_pretrained(model, self.adapters[adapter])
        with torch.inference_mode():
            logprobs: torch.Tensor = model.eval()(torch.tensor([list(ids)])).logits[0].log_softmax(-1)
        return logprobs


class LocalHarness(SamplerHarness):
    """The local engine: a worker process."""

    has_process = True
    counts_cached = True

    def make(self) -> Sampler:
        options = WorkerOptions(self.model, "cpu", "float32", MAX_SEQUENCES, None, 0.05, POLICIES, 4, pack_weights="on")
        return LocalSampler(options, MAX_QUEUE, FastLauncher())

    def kill(self) -> None:
        assert isinstance(self.sampler, LocalSampler)
        assert self.sampler.worker_pid is not None
        os.kill(self.sampler.worker_pid, signal.SIGKILL)


class TransformersHarness(LocalHarness):
    """The local engine with a model that Transformers' code computes."""

    def __init__(self, model: Path, adapters: Sequence[Path], folder: Path) -> None:
        gemma = save_tiny_gemma(model, folder / "gemma")
        super().__init__(gemma, save_adapters(gemma, folder / "adapters"), folder)


class TinkerHarness(SamplerHarness):
    """Tinker's sampler, against the double of the service."""

    async def start(self) -> None:
        double = pytest.importorskip("support.tinker_double")
        self.patch = pytest.MonkeyPatch()
        self.cloud = double.Cloud(self.model, self.folder)
        self.patch.setattr(double.tinker, "ServiceClient", self.cloud.service)
        await super().start()

    async def close(self) -> None:
        await super().close()
        await self.sampler.connection.close()
        self.patch.undo()

    def make(self) -> Sampler:
        from openclaw_rl.engines.tinker.connection import Account, Connection
        from openclaw_rl.engines.tinker.sampler import SamplerOptions, TinkerSampler

        options = SamplerOptions("tiny/model", self.model, None, MAX_SEQUENCES, MAX_QUEUE, 8, POLICIES)
        return TinkerSampler(Connection(Account(None, "tml-key", timeout=60.0)), options)

    async def policy(self, number: int) -> PolicyRef:
        from openclaw_rl.engines.tinker.training_run import PolicyRecord

        folder = self.folder / f"adapter-{number}"
        folder.mkdir(exist_ok=True)
        PolicyRecord("tiny/model", 4, self.cloud.keep(self.adapters[number]), None).write(folder)
        return policy_in(folder)


class RemoteHarness(SamplerHarness):
    """A server of another project, started by the sampler: a double, or the real one."""

    has_process = True
    counts_cached = True
    sampler_class: type[RemoteSampler] = RemoteSampler
    program: str

    def command(self, port: int) -> list[str]:
        raise NotImplementedError

    def dialect(self) -> Any:
        raise NotImplementedError

    def environment(self) -> dict[str, str]:
        return {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}

    def make(self) -> Sampler:
        port = free_port()
        process = ServerProcess(self.program, self.command(port), self.environment())
        options = RemoteOptions(self.model, None, MAX_SEQUENCES, MAX_QUEUE, POLICIES, 4, self.folder)
        return self.sampler_class(self.dialect(), [(InferenceServer(f"http://127.0.0.1:{port}"), process)], options)

    def kill(self) -> None:
        """Kill the server, not its guard."""
        guard = self.sampler.replicas[0].process.guard_pid
        (server,) = children(guard)
        os.kill(server, signal.SIGKILL)


class VllmHarness(RemoteHarness):
    """vLLM's double as it is on a GPU, where it scores chosen tokens."""

    program = "vllm_double"

    def dialect(self) -> Any:
        return VllmDialect()

    def command(self, port: int) -> list[str]:
        values = f"--model {self.model} --port {port} --max-num-seqs {MAX_SEQUENCES} --scheduling-policy priority"
        flags = ["--enable-scale-out", "--scores-targets"]
        return [sys.executable, "-m", f"support.{self.program}", *values.split(), *flags]


class SglangHarness(RemoteHarness):
    """SGLang's double."""

    program = "sglang_double"

    def dialect(self) -> Any:
        return SglangDialect()

    def command(self, port: int) -> list[str]:
        values = f"--model-path {self.model} --port {port} --max-running-requests {MAX_SEQUENCES}"
        flags = ["--enable-lora", "--enable-priority-scheduling"]
        return [sys.executable, "-m", f"support.{self.program}", *values.split(), *flags]


class FullWeightsHarness(RemoteHarness):
    """Servers whose weights are all replaced: each adapter is merged into the model."""

    sampler_class = FullWeightSampler

    async def policy(self, number: int) -> PolicyRef:
        folder = self.folder / f"merged-{number}"
        if not folder.exists():
            await asyncio.to_thread(merge_adapter, self.model, self.adapters[number], folder)
        return policy_in(folder)


class FullWeightsVllmHarness(FullWeightsHarness, VllmHarness):
    """vLLM's double in its development mode."""

    def environment(self) -> dict[str, str]:
        return {**super().environment(), "VLLM_SERVER_DEV_MODE": "1"}


class FullWeightsSglangHarness(FullWeightsHarness, SglangHarness):
    """SGLang's double."""


class ScriptedHarness(SamplerHarness):
    """The fake that other tests use in place of an engine."""

    has_model = False

    def make(self) -> Sampler:
        def script(request: SampleRequest, index: int) -> list[int]:
            params = request.params
            choose = random.Random(f"{list(request.prompt_ids)} {params.seed} {index} {request.version}")
            ids = choose.choices(range(300), k=params.max_tokens + 1)
            stop = next((place for place, id in enumerate(ids) if id in params.stop_token_ids), len(ids))
            return ids[: stop + 1]

        return ScriptedSampler(
            script,
            seconds_per_token=0.001,
            max_sequences=MAX_SEQUENCES,
            max_queue=MAX_QUEUE,
            policies=POLICIES,
        )

    async def policy(self, number: int) -> PolicyRef:
        await asyncio.sleep(0)
        return PolicyRef(WeightForm.PEFT, self.adapters[number])
