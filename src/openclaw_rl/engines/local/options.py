"""The options of the local engine."""

from typing import Literal

from openclaw_rl.config.options import Section, option


class LocalOptions(Section):
    """Where and how the model runs on this machine."""

    device: Literal["auto", "cpu", "cuda"] = option(
        "auto", "Device that the local engine runs on.", group="Engine", env="DEVICE"
    )
    dtype: Literal["auto", "float32", "bfloat16"] = option(
        "auto",
        "Precision of the weights; auto is float32 on CPU, bfloat16 on CUDA.",
        group="Engine",
        env="DTYPE",
    )
    kv_cache_gib: float | None = option(
        None,
        "Memory for the key-value cache, in GiB.",
        group="Engine",
        env="KV_CACHE_GIB",
        shown="on CPU a quarter of the memory, at most 4; on CUDA 60% of the free memory",
        gt=0,
    )
    micro_batch_tokens: int = option(
        4096,
        "Most tokens per micro-batch of the learner. One sequence may be longer, and sequences that begin alike may "
        "have half of this beside their common beginning. If memory runs out, they are computed one by one at last.",
        group="Training",
        env="MICRO_BATCH_TOKENS",
        ge=1,
    )
    gradient_checkpointing: bool = option(
        False,
        "Recompute activations in the backward pass instead of storing them: less memory, a third slower.",
        group="Training",
        env="GRADIENT_CHECKPOINTING",
    )
    offload_optimizer_state: bool = option(
        False, "Move the optimiser's state off the GPU between steps.", group="Training", env="OFFLOAD_OPTIMIZER_STATE"
    )
