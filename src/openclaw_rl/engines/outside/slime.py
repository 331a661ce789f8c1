"""slime as the learner: an outside trainer with SGLang servers of its own."""

import json
import shlex
from dataclasses import dataclass
from urllib.parse import urlsplit

from openclaw_rl.config.options import ConfigError
from openclaw_rl.engines.factory import EngineSettings, TrainerStep
from openclaw_rl.engines.outside.factory import OutsideLearnerFactory
from openclaw_rl.engines.outside.options import SlimeOptions
from openclaw_rl.engines.remote.options import SglangOptions
from openclaw_rl.models import EMBEDDED

FUNCTION = "openclaw_rl.integrations.slime.generate_rollout"
#: The port of our server, if the command does not say another.
SERVER_URL = "http://127.0.0.1:30000"
#: The arguments of a model's shape come from a script of slime's, such as scripts/models/qwen3-4B.sh.
MODEL_ARGUMENTS = '"${MODEL_ARGS[@]}"'
#: slime's loss is PPO's.
LOSS = "ppo"


@dataclass(frozen=True, slots=True)
class SlimeSplit:
    """How many GPUs slime gets. Those of a judge and a teacher are servers that slime does not know."""

    actor: int = 4
    rollout: int = 2
    rollout_tp: int = 1


def slime_command(settings: EngineSettings, step: TrainerStep, split: SlimeSplit, arguments: str = "") -> str:
    """The command that starts slime next to a server with these options, as text for a shell."""
    router = urlsplit(settings.section(SglangOptions).server.urls[0])
    model = settings.model.model_name or EMBEDDED
    training = settings.training
    loss = settings.training.loss
    values: dict[str, object] = {
        "actor-num-nodes": 1,
        "actor-num-gpus-per-node": split.actor,
        "rollout-num-gpus": split.rollout,
        "rollout-num-gpus-per-engine": split.rollout_tp,
        "sglang-router-port": router.port or 80,
        "hf-checkpoint": model,
        "ref-load": f"{model}_torch_dist",
        "load": "slime-checkpoints",
        "save": "slime-checkpoints",
        "save-interval": 1,
        "rollout-function-path": FUNCTION,
        "num-rollout": step.max_steps,
        "rollout-batch-size": step.batch_size,
        "n-samples-per-prompt": 1,
        "global-batch-size": step.batch_size,
        "rollout-temperature": 1,
        "advantage-estimator": "grpo",
        "eps-clip": loss.eps_clip,
        "eps-clip-high": loss.eps_clip_high,
        "optimizer": "adam",
        "lr": training.learning_rate,
        "lr-decay-style": "constant",
        "adam-beta1": training.betas[0],
        "adam-beta2": training.betas[1],
        "weight-decay": training.weight_decay,
        "clip-grad": training.max_grad_norm,
    }
    flags = ["disable-rollout-global-dataset", "disable-rewards-normalization", "use-rollout-logprobs"]
    if step.hints:
        flags.append("use-opd")
        values |= {"opd-type": "sglang", "opd-kl-coef": 1}
    if loss.kl_coef:
        flags.append("use-kl-loss")
        values |= {"kl-loss-coef": loss.kl_coef, "kl-loss-type": "low_var_kl"}
    # Log-probs of samples must be raw.
    variables = {"OPENCLAW_RL_URL": SERVER_URL, "OPENCLAW_RL_KEY": "", "SGLANG_RETURN_ORIGINAL_LOGPROB": "1"}
    words = ["ray", "job", "submit", "--runtime-env-json", json.dumps({"env_vars": variables})]
    words += ["--", "python3", "train.py"]
    given = [part for name, value in values.items() for part in (f"--{name}", str(value))]
    rest = [*given, *(f"--{flag}" for flag in flags), *shlex.split(arguments)]
    return f"{shlex.join(words)} {MODEL_ARGUMENTS} {shlex.join(rest)}"


class SlimeLearnerFactory(OutsideLearnerFactory):
    """Implements `LearnerFactory` for slime, which claims turns with `openclaw_rl.integrations.slime`."""

    name = "slime"
    samplers = ("sglang",)
    counts_gpus = True

    def check(self, settings: EngineSettings) -> None:
        super().check(settings)
        if settings.training.epochs != 1:
            raise ConfigError("--train-epochs: slime makes one pass over the turns that it is given; leave it out.")
        if settings.training.loss.kind != LOSS:
            raise ConfigError(f"--loss-fn {settings.training.loss.kind}: slime's loss is {LOSS}; leave it out.")

    def trainer_command(self, settings: EngineSettings, step: TrainerStep) -> str:
        given = settings.split
        usual = SlimeSplit()
        split = SlimeSplit(
            actor=len(given.learner) or usual.actor,
            rollout=len(given.sampling) or usual.rollout,
            rollout_tp=len(given.policy[0]) if given.policy else usual.rollout_tp,
        )
        return slime_command(settings, step, split, settings.section(SlimeOptions).slime_args)


LEARNER = SlimeLearnerFactory()
