"""The options of a server whose learner is outside, and of slime's command line."""

from openclaw_rl.config.options import Section, option


class OutsideOptions(Section):
    """How long an outside trainer may hold what it has claimed."""

    heading = "Engine"
    lease_seconds: float = option(
        3600.0,
        "With --learner outside or slime: seconds in which a trainer has to confirm claimed turns, if its claim does "
        "not say. Otherwise they go back.",
        ge=1,
        le=604800,
    )


class SlimeOptions(Section):
    """slime is started by its user. These options are for the command that --dry-run prints."""

    heading = "Engine"
    slime_args: str = option(
        "",
        "With --learner slime: more arguments for the command of slime that --dry-run prints.",
        shown="no more arguments",
    )
