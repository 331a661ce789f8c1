"""The options of a server whose learner is outside."""

from openclaw_rl.config.options import Section, option


class OutsideOptions(Section):
    """How long an outside trainer may hold what it has claimed."""

    lease_seconds: float = option(
        3600.0,
        "With --learner outside or slime: seconds in which a trainer has to confirm claimed turns, if its claim does "
        "not say. Otherwise they go back.",
        group="Engine",
        env="LEASE_SECONDS",
        ge=1,
        le=604800,
    )
