"""The options of work that runs beside the server."""

from openclaw_rl.config.options import Section, option


class RolloutOptions(Section):
    """The user's own rollouts."""

    rollout_function_path: str | None = option(
        None,
        "Your own function that runs beside the server and calls its API: path/file.py or package.module:name.",
        group="Training",
        env="ROLLOUT_FUNCTION_PATH",
        shown="no function",
    )
