"""The tinker backend, from the options; what it cannot do is said before anything starts."""

import os
from pathlib import Path

from openclaw_rl.app.config import CLOUD_MODEL, Config
from openclaw_rl.config.options import ConfigError
from openclaw_rl.engines.base import EngineUnavailable
from openclaw_rl.engines.tinker import sdk
from openclaw_rl.engines.tinker.connection import Account, Connection
from openclaw_rl.engines.tinker.learner import TinkerLearner
from openclaw_rl.engines.tinker.run import TrainingOptions
from openclaw_rl.engines.tinker.sampler import SamplerOptions, TinkerSampler
from openclaw_rl.errors import UserError

ATTENTION, MLP = {"q_proj", "k_proj", "v_proj", "o_proj"}, {"gate_proj", "up_proj", "down_proj"}


def check_tinker(config: Config) -> None:
    """What can be known without the service. Raises UserError."""
    if not sdk.installed():
        raise UserError(sdk.MISSING)
    if not os.environ.get("TINKER_API_KEY") and not config.tinker_base_url:
        raise ConfigError(
            "The tinker backend needs a key in TINKER_API_KEY or a server in --tinker-base-url; or use --backend local."
        )
    if config.learns:
        for unfit, says in cannot(config):
            if unfit:
                raise ConfigError(f"{says} on Tinker; leave it out, or use --backend local.")


def cannot(config: Config) -> list[tuple[bool, str]]:
    """What a service that computes gradients itself leaves nobody else to do."""
    modules = set(config.adapted_modules)
    halves = bool(modules & ATTENTION) is (modules >= ATTENTION) and bool(modules & MLP) is (modules >= MLP)
    return [
        (config.lora_rank == 0, "--lora-rank 0: all weights cannot be trained"),
        (config.kl_loss_coef > 0, "--kl-loss-coef: a penalty for drifting from the base model cannot be had"),
        (config.custom_loss_function_path is not None, "--custom-loss-function-path: losses of your own cannot be had"),
        (config.lora_dropout > 0, "--lora-dropout: the adapter's input cannot be dropped"),
        (config.lora_alpha is not None, "--lora-alpha: the adapter's scale cannot be chosen"),
        (not halves, "--lora-target-modules: only all of the attention's and all of the MLP's can be chosen"),
    ]


def connect(config: Config) -> Connection:
    key = os.environ.get("TINKER_API_KEY", "").strip()
    return Connection(Account(config.tinker_base_url, key, config.tinker_timeout))


def build_sampler(config: Config, connection: Connection, folder: Path, name: str | None) -> TinkerSampler:
    return TinkerSampler(
        connection,
        SamplerOptions(
            model=name or CLOUD_MODEL,
            folder=folder,
            max_context=config.max_context_tokens,
            max_sequences=config.max_sequences,
            max_queue=config.max_queue,
            stream_chunk=config.tinker_stream_chunk,
            policies=config.policies_held,
        ),
    )


def build_learner(config: Config, connection: Connection, sampler: TinkerSampler) -> TinkerLearner:
    """Raises EngineUnavailable if the server has said that it does not know the loss."""
    if config.distils_alternatives and not sdk.takes(sdk.load().SamplingClient.sample_async, "topk_sample_logprobs"):
        raise EngineUnavailable(
            "--method topk-select needs the likeliest tokens of what is sampled, which this version of Tinker's SDK "
            "does not give: pip install -U tinker, or --method combine."
        )
    known = connection.traits.losses
    if known is not None and config.loss_fn not in known:
        names = ", ".join(sorted(known & {"ppo", "importance_sampling", "cispo"}))
        raise EngineUnavailable(f"{connection.traits.name} does not know --loss-fn {config.loss_fn}; it knows {names}.")
    modules = set(config.adapted_modules)
    return TinkerLearner(
        connection,
        sampler,
        TrainingOptions(
            rank=config.lora_rank,
            train_attn=bool(modules & ATTENTION),
            train_mlp=bool(modules & MLP),
            training=config.training,
        ),
    )
