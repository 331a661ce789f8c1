"""The options of slime's command line."""

from openclaw_rl.config.options import Section, option


class SlimeOptions(Section):
    """slime is started by its user. These options are for the command that --dry-run prints."""

    slime_actor_gpus: int = option(
        4, "With --learner slime: GPUs that slime trains on.", group="Engine", env="SLIME_ACTOR_GPUS", ge=1
    )
    slime_rollout_gpus: int = option(
        2, "With --learner slime: GPUs of slime's SGLang servers.", group="Engine", env="SLIME_ROLLOUT_GPUS", ge=1
    )
    slime_rollout_tp: int = option(
        1, "With --learner slime: GPUs of each of these servers.", group="Engine", env="SLIME_ROLLOUT_TP", ge=1
    )
    slime_args: str = option(
        "",
        "With --learner slime: more arguments for the command of slime that --dry-run prints.",
        group="Engine",
        env="SLIME_ARGS",
        shown="none",
    )
