"""The user's own rollouts: `async rollout(base_url, config)` runs in the server's process and calls its API.

It can be an environment or a simulated user. It asks through the API, and gives feedback through its next message or
POST /v1/feedback.
"""

import inspect
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from openclaw_rl.config.options import ConfigError
from openclaw_rl.plugins import describe, load_plugin

log = logging.getLogger(__name__)

OPTION = "--rollout-function-path"
NAMES = ("rollout",)


class Rollout:
    """Runs the user's function once. Its end or its failure is logged and does not stop the server.

    What fails because the server stops is no failure.
    """

    def __init__(self, path: str, settings: dict[str, Any]) -> None:
        self.file, self.settings = Path(path.partition(":")[0]).expanduser(), settings
        self.function = load_plugin(path, OPTION, NAMES)
        if not inspect.iscoroutinefunction(self.function):
            raise ConfigError(f"{OPTION} {path} is not an async function: async def rollout(base_url, config).")

    async def run(self, base_url: str, is_stopping: Callable[[], bool] = lambda: False) -> None:
        try:
            await self.function(base_url, self.settings)
        except Exception as error:
            if is_stopping():
                # A server that stops refuses the function's requests.
                log.info("The rollout has ended with the server.")
                return
            log.error("The rollout has failed: %s.", describe(error, self.file), exc_info=error)
        else:
            log.info("The rollout has ended.")
