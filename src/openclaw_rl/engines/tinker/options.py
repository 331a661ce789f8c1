"""The options of the Tinker engine."""

import os

from openclaw_rl.config.options import Section, option


class TinkerOptions(Section):
    """Which Tinker server to use, and how to call it."""

    heading = "Engine"
    tinker_base_url: str | None = option(
        None,
        "URL of a self-hosted Tinker server.",
        env=("TINKER_BASE_URL", "TINKER_HOST", "TINKER_ENDPOINT"),
        shown="the service in the cloud",
    )
    tinker_stream_chunk: int = option(
        32, "On Tinker: tokens per sampling call, so that answers can be streamed; 0: one call per answer.", ge=0
    )
    tinker_timeout: float = option(300.0, "On Tinker: seconds after which a call is retried or given up.", gt=0)

    @property
    def has_account(self) -> bool:
        """Whether there is a key for the cloud, or a server of one's own."""
        return bool(os.environ.get("TINKER_API_KEY") or self.tinker_base_url)
