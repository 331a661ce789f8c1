"""The options of slime's command line."""

from openclaw_rl.config.options import Section, option


class SlimeOptions(Section):
    """slime is started by its user. These options are for the command that --dry-run prints."""

    slime_args: str = option(
        "",
        "With --learner slime: more arguments for the command of slime that --dry-run prints.",
        group="Engine",
        env="SLIME_ARGS",
        shown="no more arguments",
    )
