"""The options of the local engine."""

import re
from typing import Literal

from pydantic import field_validator

from openclaw_rl.config.options import Section, option

DEVICE = re.compile(r"cpu|cuda:\d+")


class LocalOptions(Section):
    """Where and how the model runs on this machine."""

    heading = "Engine"
    device: Literal["auto", "cpu", "cuda", "mps"] = option(
        "auto", "Device that the local engine runs on; mps is an Apple GPU, which auto never chooses."
    )
    dtype: Literal["auto", "float32", "bfloat16"] = option(
        "auto",
        "Precision of the weights. auto is bfloat16 on CUDA and float32 on mps; on a CPU it is bfloat16 where a short "
        "measurement at the first start shows that it is faster, else float32.",
    )
    quantize: Literal["none", "4bit", "8bit"] = option(
        "none",
        "Bits of the base weights, for policy, judge and teacher; the adapter on top of them is trained as ever. "
        "4bit takes about a quarter of the memory of bfloat16. Slower than bfloat16 on a CPU.",
        shown="none: as they are stored",
    )
    pack_weights: Literal["auto", "on", "half", "off"] = option(
        "auto",
        "Whether a sampler on a CPU keeps a second copy of the weights, in blocks, which makes it faster: in their own "
        "precision (on) or float16 (half). auto measures both at the first start, and makes no copy above an eighth of "
        "the free memory.",
    )
    kv_cache_gib: float | None = option(
        None,
        "Memory for the key-value cache, in GiB.",
        shown="on CPU a quarter of the free memory, at most 4; on CUDA 60% of it",
        gt=0,
    )
    micro_batch_tokens: int | None = option(
        None,
        "Most tokens per micro-batch of the learner. One sequence may be longer, and sequences with a common beginning "
        "may have half of this in addition to it. If memory runs out, micro-batches get smaller, down to one sequence "
        "each.",
        shown="4096 on a CPU; on a GPU 2048 to 6144, the more the smaller the model",
        group="Training",
        ge=1,
    )
    learner_ranks: str = option(
        "auto",
        "Processes that train together: a count, or their devices, such as cuda:0,cuda:1.",
        group="Training",
        shown="one for each of --train-gpus, else 1",
    )
    shard_weights: bool = option(
        False, "Shard the weights, gradients and optimiser state over the learner's ranks (FSDP2).", group="Training"
    )
    launcher: Literal["processes", "ray"] = option(
        "processes",
        "What starts samplers, learner ranks and inference servers: processes on this machine, or actors on a Ray "
        "cluster.",
    )
    ray_address: str = option(
        "",
        "Address of the Ray cluster, such as 10.0.0.1:6379.",
        env="RAY_CLUSTER_ADDRESS",
        shown="that of RAY_ADDRESS, or the cluster of this machine",
    )
    ray_cpus: int = option(
        1, "CPUs that each worker asks Ray for, which is also its number of threads unless it has a GPU.", ge=1
    )
    offload_optimizer_state: bool = option(
        False, "Move the optimiser's state off the GPU between steps.", group="Training"
    )

    @field_validator("learner_ranks")
    @classmethod
    def _count_or_devices(cls, given: str) -> str:
        ranks = given.replace(" ", "")
        if ranks == "auto" or (ranks.isdigit() and int(ranks) > 0):
            return ranks
        devices = ranks.split(",")
        if not all(DEVICE.fullmatch(device) for device in devices):
            raise ValueError("give a count, or devices such as cuda:0,cuda:1 or cpu,cpu")
        if len({device.partition(":")[0] for device in devices}) > 1:
            raise ValueError("the ranks must all run on the CPU or all on CUDA devices")
        on_cuda = [device for device in devices if device != "cpu"]
        if len(set(on_cuda)) < len(on_cuda):
            raise ValueError("each rank needs a CUDA device of its own")
        return ranks

    @field_validator("ray_address")
    @classmethod
    def _is_no_client(cls, address: str) -> str:
        if "://" in address:
            raise ValueError(
                "give HOST:PORT of the cluster itself; the server runs on one of its nodes, where 'ray job submit' "
                "starts it"
            )
        return address.strip()

    @property
    def on_ray(self) -> bool:
        return self.launcher == "ray"

    @property
    def names_gpus(self) -> bool:
        """Whether --learner-ranks names CUDA devices."""
        return self.learner_ranks.startswith("cuda:")

    def rank_devices(self, train_gpus: int = 0) -> tuple[str, ...]:
        """The device of each of the learner's ranks, if --train-gpus are so many (0: not given)."""
        if self.learner_ranks == "auto":
            return (self.device,) * max(1, train_gpus)
        if self.learner_ranks.isdigit():
            return (self.device,) * int(self.learner_ranks)
        return tuple(self.learner_ranks.split(","))
