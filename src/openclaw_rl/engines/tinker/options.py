"""The options of the Tinker engine."""

from openclaw_rl.config.options import Section, option


class TinkerOptions(Section):
    """Which Tinker server is used, and how it is called."""

    tinker_base_url: str | None = option(
        None, "Address of a self-hosted Tinker server.", group="Engine", env=("TINKER_BASE_URL", "TINKER_HOST")
    )
    tinker_stream_chunk: int = option(
        32,
        "On Tinker: tokens that are sampled at a time, so that answers can be streamed; 0: whole answers.",
        group="Engine",
        env="TINKER_STREAM_CHUNK",
        ge=0,
    )
    tinker_timeout: float = option(
        300.0,
        "On Tinker: seconds that a call may take before it is made again, or given up.",
        group="Engine",
        env="TINKER_TIMEOUT",
        gt=0,
    )
