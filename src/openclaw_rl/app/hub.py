"""Whether the Hugging Face Hub has the models that a start would download. Without a network, nothing is refused."""

import queue
import threading
from enum import StrEnum
from pathlib import Path
from typing import Any

from openclaw_rl.app.config import Config
from openclaw_rl.models import EMBEDDED, ModelNotFound, can_be_fetched, find_model, is_gguf, transport_errors

#: How long the Hub may take to answer, with everything that comes before it (names, proxies).
MAX_SECONDS = 5.0


class OnHub(StrEnum):
    """What the Hub says about a model."""

    THERE = "is on the Hugging Face Hub: the first start downloads it"
    GATED = "is on the Hugging Face Hub, for those who were given access: log in with hf auth login"
    MISSING = "is not on the Hugging Face Hub, or is private: check the name, or log in with hf auth login"
    UNKNOWN = "may be on the Hugging Face Hub: this could not be checked, because the Hub could not be reached"


def check_downloads(config: Config) -> list[str]:
    """What the Hub says about each model that a start would download. Raises ModelNotFound if one is not there."""
    options = {"--model-name": config.policy_name, "--teacher-model-name": config.model.teacher_model_name}
    sentences = []
    for option, name in options.items():
        if name is None or not is_downloaded(name, config):
            continue
        state = ask_hub(name)
        if state is OnHub.MISSING:
            raise ModelNotFound(f"{option} {name} {state}.")
        sentences.append(f"{name} {state}.")
    return sentences


def is_downloaded(name: str, config: Config) -> bool:
    """Whether a start would download a model by its Hub id. The embedded model is there also without the Hub."""
    if config.engine.takes_text:
        return False
    is_id = name != EMBEDDED and can_be_fetched(name) and not is_gguf(Path(name))
    return is_id and find_model(name, config.run.cache) is None


def ask_hub(name: str) -> OnHub:
    """Ask the Hub about a model, for at most `MAX_SECONDS`."""
    answers: queue.SimpleQueue[OnHub] = queue.SimpleQueue()
    # In a thread, because looking up the Hub's address has no time limit of its own.
    threading.Thread(target=lambda: answers.put(_ask(name)), name="hub", daemon=True).start()
    try:
        return answers.get(timeout=MAX_SECONDS)
    except queue.Empty:
        return OnHub.UNKNOWN


def _ask(name: str) -> OnHub:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    unreachable: Any = (OSError, HfHubHTTPError, ValueError, *transport_errors())
    try:
        HfApi().model_info(name, timeout=MAX_SECONDS)
    except GatedRepoError:
        return OnHub.GATED
    except (RepositoryNotFoundError, HFValidationError):
        return OnHub.MISSING
    except unreachable:
        return OnHub.UNKNOWN
    return OnHub.THERE
