"""How much memory the keys and values take, and how long a context they allow."""

import torch

from openclaw_rl.engines.host import usable_memory
from openclaw_rl.engines.local.model.decoder import Shape
from openclaw_rl.engines.local.model.model_config import UnsupportedModel
from openclaw_rl.engines.local.process.sampler_messages import WorkerOptions
from openclaw_rl.engines.local.sampling.pages import PAGE_SIZE

#: Share of the memory that is free once the weights are loaded, which the cache takes if no size is given; the rest is
#: for activations and training.
CACHE_SHARE = {"cpu": 0.25, "cuda": 0.6}
#: More would be wasted on a laptop: 4 GiB hold 93,000 tokens of the embedded model.
MAX_CPU_CACHE_BYTES = 4 << 30
#: Contexts longer than this need --max-context-tokens, so that one request cannot take the whole cache.
DEFAULT_MAX_CONTEXT = 32768


def context_limit(options: WorkerOptions, shape: Shape, cache_tokens: int) -> int:
    """The longest prompt and answer together. Raises UnsupportedModel if the options ask for more than is possible."""
    asked = options.max_context
    if asked is not None and asked > shape.max_context:
        raise UnsupportedModel(f"--max-context-tokens {asked} is more than the model's {shape.max_context}")
    if cache_tokens < (asked or PAGE_SIZE):
        raise UnsupportedModel(
            f"the memory for keys and values holds {cache_tokens} tokens, fewer than one request may need; "
            "raise --kv-cache-gib or lower --max-context-tokens"
        )
    return asked or min(shape.max_context, DEFAULT_MAX_CONTEXT, cache_tokens)


def cache_bytes(options: WorkerOptions, device: torch.device) -> int:
    """How much memory the keys and values may take."""
    if options.cache_gib is not None:
        return int(options.cache_gib * (1 << 30))
    if device.type == "cuda":
        free, _total = torch.cuda.mem_get_info(device)
        return int(free * CACHE_SHARE["cuda"])
    return min(int(usable_memory() * CACHE_SHARE["cpu"]), MAX_CPU_CACHE_BYTES)
