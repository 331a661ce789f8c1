"""A user's own loss: `compute_loss(logprobs, old_logprobs, advantages, config)` returns one number per token.

The arguments are float32 tensors [tokens] for the response tokens of a micro-batch: log-probs of the policy in training
(with a gradient), log-probs of the policy that sampled, and advantages. As for every loss, the trainer weights tokens.
"""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from openclaw_rl.losses.policy import PolicyLoss, TokenLosses, k3
from openclaw_rl.plugins import LOSS_NAMES, LOSS_OPTION, describe, load_plugin


class LossFailed(Exception):
    """The custom loss failed or returned something unusable; the message says why."""


class CustomLoss:
    """Replaces `PolicyLoss` for the sampled tokens; the function receives the settings as `config`."""

    def __init__(self, function: Callable[..., Any], file: Path, settings: PolicyLoss) -> None:
        self.function = function
        self.file = file
        self.kl_coef = settings.kl_coef
        self.over_alternatives = settings.over_alternatives
        self.config = asdict(settings)

    def per_token(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, base_logprobs: Tensor | None = None
    ) -> TokenLosses:
        try:
            loss = self.function(logprobs, old_logprobs, advantages, self.config)
        except Exception as error:
            raise LossFailed(f"the custom loss failed: {describe(error, self.file)}") from error
        self._check(loss, logprobs)
        kl_base = torch.zeros_like(logprobs)
        if base_logprobs is not None:
            kl_base = k3(logprobs, base_logprobs)
            loss = loss + self.kl_coef * kl_base
        return TokenLosses(loss, torch.zeros_like(loss), kl_base.detach())

    def _check(self, loss: Any, logprobs: Tensor) -> None:
        if not isinstance(loss, Tensor) or loss.shape != logprobs.shape:
            shape = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
            raise LossFailed(
                f"{self.file.name} returned {shape}; it must return one number per token: {tuple(logprobs.shape)}"
            )
        if not loss.requires_grad:
            raise LossFailed(f"{self.file.name} returned a loss that does not depend on the policy's log-probs")
        if not bool(torch.isfinite(loss).all()):
            raise LossFailed(f"{self.file.name} returned a loss that is not finite")


def load_loss(path: str, settings: PolicyLoss) -> CustomLoss:
    """Load the loss that `path` names. Raises ConfigError."""
    return CustomLoss(load_plugin(path, LOSS_OPTION, LOSS_NAMES), Path(path.partition(":")[0]).expanduser(), settings)
