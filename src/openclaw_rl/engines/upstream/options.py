"""The options of a model behind another API."""

from openclaw_rl.config.options import Section, option


class UpstreamOptions(Section):
    """Which API answers, and how long it may take."""

    heading = "Engine"
    upstream_url: str = option(
        "",
        "With --sampler upstream: URL of an OpenAI-compatible API, such as http://127.0.0.1:11434/v1, or several of "
        "the same model, separated by commas.",
        shown="no API",
    )
    upstream_model: str = option("", "With --sampler upstream: the model's name in that API.", shown="no model")
    upstream_key: str = option("", "Key of that API.", env="UPSTREAM_API_KEY", shown="no key", secret=True)
    upstream_timeout: float = option(600.0, "Seconds that the API may be silent before an answer is given up.", gt=0)
