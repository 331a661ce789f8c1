"""The user's own code that runs beside a server: `async rollout(base_url, config)`."""

import inspect
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from openclaw_rl.app.config import Config
from openclaw_rl.config.options import ConfigError
from openclaw_rl.plugins import describe, load_plugin

log = logging.getLogger(__name__)

ROLLOUT_OPTION = "--rollout-function-path"
ROLLOUT_NAMES = ("rollout",)


class Rollout:
    """Runs the user's `async rollout(base_url, config)` once, in the server's process, where it calls the API.

    Its end or its failure is logged and does not stop the server.
    What fails because the server stops is no failure.
    """

    def __init__(self, path: str, settings: dict[str, Any]) -> None:
        self.file = Path(path.partition(":")[0]).expanduser()
        self.settings = settings
        self.function = load_plugin(path, ROLLOUT_OPTION, ROLLOUT_NAMES)
        if not inspect.iscoroutinefunction(self.function):
            raise ConfigError(f"{ROLLOUT_OPTION} {path} is not an async function: async def rollout(base_url, config).")

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


def build_rollout(config: Config) -> Rollout | None:
    path = config.rollout.rollout_function_path
    return Rollout(path, config.values()) if path else None
