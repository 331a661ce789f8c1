"""Makes the Tinker engine's sampler and learner from the options, and refuses what Tinker cannot do."""

import os
from pathlib import Path

from openclaw_rl.config.options import ConfigError
from openclaw_rl.engines.base import EngineUnavailable, Learner, LearnerCapabilities, Sampler, SamplerCapabilities
from openclaw_rl.engines.factory import EngineSettings, LearnerFactory, ModelFiles, Resources, SamplerFactory
from openclaw_rl.engines.local.options import LocalOptions
from openclaw_rl.engines.tinker import sdk
from openclaw_rl.engines.tinker.connection import Account, Connection
from openclaw_rl.engines.tinker.learner import CAPABILITIES, TinkerLearner
from openclaw_rl.engines.tinker.options import TinkerOptions
from openclaw_rl.engines.tinker.sampler import SamplerOptions, TinkerSampler, sampler_capabilities
from openclaw_rl.engines.tinker.training_run import TrainingRunOptions
from openclaw_rl.errors import UserError
from openclaw_rl.models import CLOUD_MODEL

ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
MLP = {"gate_proj", "up_proj", "down_proj"}
LOSSES = {"ppo", "importance_sampling", "cispo"}


class TinkerFactory:
    """What both factories have in common."""

    name = "tinker"
    has_lines = True
    model_files = ModelFiles.TOKENIZER

    def check(self, settings: EngineSettings) -> None:
        """Check what can be known without the service. Raises UserError."""
        if not sdk.installed():
            raise UserError(sdk.MISSING)
        if not settings.section(TinkerOptions).has_account:
            raise ConfigError(
                "The tinker backend needs a key in TINKER_API_KEY or a server in --tinker-base-url; "
                "or use --backend local."
            )


class TinkerSamplerFactory(TinkerFactory, SamplerFactory):
    """Samplers at Tinker's service, or at a server with the same API."""

    default_model = CLOUD_MODEL

    def capabilities(self, settings: EngineSettings) -> SamplerCapabilities:
        return sampler_capabilities()

    def open(self, settings: EngineSettings, resources: Resources, folder: Path, name: str) -> Sampler:
        engine = settings.engine
        options = SamplerOptions(
            model=name,
            folder=folder,
            max_context=engine.max_context_tokens,
            max_sequences=engine.max_sequences,
            max_queue=engine.max_queue,
            stream_chunk=settings.section(TinkerOptions).tinker_stream_chunk,
            policies=settings.policies_held,
            lines=engine.policy_per_user,
        )
        return TinkerSampler(connection_of(settings, resources), options)


class TinkerLearnerFactory(TinkerFactory, LearnerFactory):
    """Learners at the same service."""

    def check(self, settings: EngineSettings) -> None:
        super().check(settings)
        for unfit, reason in unsupported(settings):
            if unfit:
                raise ConfigError(f"{reason} on Tinker; leave it out, or use --backend local.")

    def capabilities(self, settings: EngineSettings) -> LearnerCapabilities:
        return CAPABILITIES

    def open(self, settings: EngineSettings, resources: Resources, folder: Path, sampler: Sampler) -> Learner:
        assert isinstance(sampler, TinkerSampler)
        connection = connection_of(settings, resources)
        check_loss(settings, connection)
        modules = set(settings.model.adapted_modules)
        options = TrainingRunOptions(
            rank=settings.model.lora_rank,
            train_attn=bool(modules & ATTENTION),
            train_mlp=bool(modules & MLP),
            training=settings.training,
        )
        return TinkerLearner(connection, sampler, options)


def unsupported(settings: EngineSettings) -> list[tuple[bool, str]]:
    """What cannot be chosen, because the service computes the gradients."""
    model = settings.model
    modules = set(settings.model.adapted_modules)
    halves = bool(modules & ATTENTION) is (modules >= ATTENTION) and bool(modules & MLP) is (modules >= MLP)
    return [
        (model.full_weights, "--lora-rank 0: all weights cannot be trained"),
        (
            settings.training.loss.kl_coef > 0,
            "--kl-loss-coef: the distance from the base model cannot be penalised",
        ),
        (settings.custom_loss is not None, "--custom-loss-function-path: losses of your own are impossible"),
        (model.lora_dropout > 0, "--lora-dropout: the adapter's input cannot be dropped"),
        (model.lora_experts, "--lora-experts: adapters on experts cannot be chosen"),
        (model.lora_alpha is not None, "--lora-alpha: the adapter's scale cannot be chosen"),
        (
            settings.section(LocalOptions).learner_ranks != "auto",
            "--learner-ranks: the learner's processes cannot be chosen",
        ),
        (not halves, "--lora-target-modules: only all of the attention's and all of the MLP's can be chosen"),
    ]


def connection_of(settings: EngineSettings, resources: Resources) -> Connection:
    """The one connection that sampler and learner share."""
    options = settings.section(TinkerOptions)
    key = os.environ.get("TINKER_API_KEY", "").strip()
    account = Account(options.tinker_base_url, key, options.tinker_timeout)
    return resources.shared(Connection, lambda: Connection(account))


def check_loss(settings: EngineSettings, connection: Connection) -> None:
    """Raise EngineUnavailable if we cannot compute the loss here, or the server has said that it does not know it."""
    said = connection.traits.losses
    known = LOSSES if said is None else LOSSES & said
    loss = settings.training.loss.kind
    if loss not in known:
        names = ", ".join(sorted(known))
        raise EngineUnavailable(f"{connection.traits.name} does not know --loss-fn {loss}; it knows {names}.")


SAMPLER = TinkerSamplerFactory()
LEARNER = TinkerLearnerFactory()
