"""How a process becomes one of the learner's ranks.

It imports PyTorch's distributed package, but what shards weights only where they are: that takes another second.
"""

from dataclasses import replace
from typing import Any

import torch

from openclaw_rl.engines.local.model.decoder import Decoder, load_decoder
from openclaw_rl.engines.local.model.model_config import UnsupportedModel
from openclaw_rl.engines.local.model.placement import placement
from openclaw_rl.engines.local.model.shared_weights import take_up
from openclaw_rl.engines.local.model.transformers_decoder import load_language_model
from openclaw_rl.engines.local.process.worker_messages import LearnerOptions, RankPlace
from openclaw_rl.engines.local.training.policy_trainer import PolicyTrainer
from openclaw_rl.engines.local.training.rank_group import RankGroup, join

CPU = torch.device("cpu")


def open_rank(options: LearnerOptions, place: RankPlace, connection: Any) -> PolicyTrainer:
    """Meet the other ranks and load the model. Raises UnsupportedModel."""
    if place.shards:
        from torch.distributed.fsdp import FSDPModule

        if not hasattr(FSDPModule, "reset_iter_state"):
            raise UnsupportedModel(f"--shard-weights needs PyTorch 2.13 or newer, and this is {torch.__version__}")
    device, dtype = placement(device_of_rank(options.device, place), options.dtype, options.cpu_dtype)
    if device.type == "cpu" and place.host:
        # The ranks share the cores of this machine.
        torch.set_num_threads(max(1, torch.get_num_threads() // place.count))
    ranks = join(place, device, connection)
    with_sampler = device == CPU or (device == torch.device("cuda", 0) and not place.shards)
    return load_rank(options, ranks, dtype, options.shared if with_sampler else None)


def load_rank(options: LearnerOptions, ranks: RankGroup, dtype: torch.dtype, shared: bytes | None) -> PolicyTrainer:
    """Load the model, or this rank's part of it; `shared` are the weights that a sampler shares with this device."""
    whole = take_up(shared) if shared else None
    if not ranks.place.shards:
        if whole is None:
            given: Any = {"quantize": options.quantize, "trusts_code": options.trusts_code}
            whole = load_language_model(options.model, dtype, ranks.device, compare=True, **given)
        return PolicyTrainer(whole, options, ranks)
    from openclaw_rl.engines.local.training.sharded import Sharding

    sharding = Sharding(ranks)
    layers: Any = sharding.layer
    if isinstance(whole, Decoder):
        decoder = replace(whole, layers=[layers(layer) for layer in whole.layers])
    else:
        # From the CPU's memory each layer goes to the device when it is sharded, so that it never holds them all.
        decoder = load_decoder(options.model, dtype, CPU, keep=layers)
    return PolicyTrainer(sharding.model(decoder), options, ranks, sharding)


def device_of_rank(name: str, place: RankPlace) -> str:
    """The device of a rank: each has a CUDA device of its own, unless they run on the CPU. Raises UnsupportedModel."""
    if name not in ("auto", "cuda") or (name == "auto" and not torch.cuda.is_available()):
        return name
    if not place.host:
        # It was placed by itself, and sees no devices but its own.
        return "cuda:0"
    if torch.cuda.device_count() < place.count:
        raise UnsupportedModel(
            f"--learner-ranks {place.count} needs as many CUDA devices, and PyTorch finds {torch.cuda.device_count()}"
        )
    return f"cuda:{place.number}"
