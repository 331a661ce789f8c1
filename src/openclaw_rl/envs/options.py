"""The options of `openclaw-rl rollout` that are not the server's."""

from pathlib import Path
from typing import Literal

from openclaw_rl.config.options import Section, fields_of, option

#: Where the options of this section are listed in --help and in the docs.
EPISODES, LIMITS = "Episodes", "Limits"
#: The largest group that the server takes.
MAX_GROUP = 1024


class DriverOptions(Section):
    """Which episodes are run, how many at once, and what an episode may take."""

    heading = EPISODES
    env: str = option(
        "toolcall",
        "The environment: a built-in name, path/file.py:Name for your own, or verifiers:NAME.",
        env="ENV_TYPE",
    )
    tasks: int = option(64, "Number of tasks; each is attempted by one group.", env="ENV_TASKS", ge=1)
    group: int = option(
        8,
        "Attempts at each task; their rewards are compared with each other. 1: no groups.",
        env="ENV_GROUP",
        ge=1,
        le=MAX_GROUP,
    )
    parallel: int = option(8, "Most episodes at once.", env="PARALLEL_ENVS", ge=1)
    split: str = option("train", "Which tasks of the environment: train or held-out.", env="ENV_SPLIT", min_length=1)
    eval: bool = option(False, "Record rewards, and train on nothing.", env="ENV_EVAL")
    tools_config: Path | None = option(
        None,
        "Tools that you define: a YAML or JSON file, for environments that take one.",
        shown="the environment's own tools",
    )
    sandbox: Literal["auto", "bubblewrap", "fences", "docker", "podman"] = option(
        "auto",
        "Where commands of the model run, for environments that run some; auto: bubblewrap, else fences of our own.",
        env="ENV_SANDBOX",
    )
    unsafe_no_sandbox: bool = option(
        False,
        "Run commands of the model without a sandbox where auto finds none; they reach your files and the network.",
        env="ENV_UNSAFE_NO_SANDBOX",
    )
    verifiers_python: str | None = option(
        None,
        "Python interpreter that has verifiers, for --env verifiers:NAME.",
        shown="the one that make verifiers installs",
    )
    minutes: float | None = option(
        None, "Start no new group after this time.", group=LIMITS, env="ENV_MINUTES", shown="no limit", gt=0
    )
    max_turns: int = option(
        16,
        "Most answers in an episode; after the last one it is rewarded as it stands.",
        group=LIMITS,
        env="ENV_MAX_TURNS",
        ge=1,
    )
    turn_timeout: float = option(
        120.0,
        "Seconds for one answer of the server, and for one call of the environment.",
        group=LIMITS,
        env="ENV_TURN_TIMEOUT",
        gt=0,
    )
    episode_timeout: float = option(
        1200.0, "Seconds for one attempt from start to reward.", group=LIMITS, env="ENV_EPISODE_TIMEOUT", gt=0
    )
    temperature: float | None = option(
        None,
        "Temperature of the answers.",
        group=LIMITS,
        env="ENV_TEMPERATURE",
        shown="the server's default",
        ge=0,
        le=2,
    )
    max_tokens: int = option(256, "Most tokens in an answer.", group=LIMITS, env="ENV_MAX_TOKENS", ge=1)


FIELDS = fields_of((DriverOptions,))
