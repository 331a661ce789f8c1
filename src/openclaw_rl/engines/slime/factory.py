"""slime as the learner: an outside trainer with SGLang servers of its own."""

from openclaw_rl.config.options import ConfigError
from openclaw_rl.engines.factory import EngineSettings, TrainerStep
from openclaw_rl.engines.outside.factory import OutsideLearnerFactory
from openclaw_rl.engines.slime.command import SlimeSplit, slime_command
from openclaw_rl.engines.slime.options import SlimeOptions

#: slime's loss is PPO's.
LOSS = "ppo"


class SlimeLearnerFactory(OutsideLearnerFactory):
    """Implements `LearnerFactory` for slime, which claims turns with `openclaw_rl.integrations.slime`."""

    name = "slime"
    samplers = ("sglang",)

    def check(self, settings: EngineSettings) -> None:
        super().check(settings)
        if settings.training.epochs != 1:
            raise ConfigError("--train-epochs: slime makes one pass over the turns that it is given; leave it out.")
        if settings.training.loss.kind != LOSS:
            raise ConfigError(f"--loss-fn {settings.training.loss.kind}: slime's loss is {LOSS}; leave it out.")

    def trainer_command(self, settings: EngineSettings, step: TrainerStep) -> str:
        given, usual = settings.split, SlimeSplit()
        split = SlimeSplit(
            actor=len(given.learner) or usual.actor,
            rollout=len(given.sampling) or usual.rollout,
            rollout_tp=len(given.policy[0]) if given.policy else usual.rollout_tp,
        )
        return slime_command(settings, step, split, settings.own(SlimeOptions).slime_args)


LEARNER = SlimeLearnerFactory()
