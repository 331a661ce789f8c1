"""Policy losses on sampled tokens.

Losses are per token: `PolicyLoss.per_token` does not depend on samples or batches, and `token_weight` defines the
reduction. The loss of a batch is the sum of weight times loss over its tokens, so it does not depend on how the tokens
are divided into micro-batches.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from openclaw_rl.types import MAX_LOG_RATIO

LossKind = Literal["ppo", "importance_sampling", "cispo"]


class TokenLosses(NamedTuple):
    """One number for each token; only `loss` carries a gradient."""

    loss: Tensor
    clipped: Tensor
    """1 where the loss of the token is clipped, else 0."""
    kl_base: Tensor
    """Estimate of the KL divergence from the base model; 0 if no base log-probs were given."""


class Loss(Protocol):
    """What a trainer requires of a loss."""

    @property
    def kl_coef(self) -> float: ...
    def per_token(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, base_logprobs: Tensor | None = None
    ) -> TokenLosses: ...
    def over_alternatives(self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """A policy loss with its constants."""

    kind: LossKind = "ppo"
    eps_clip: float = 0.2
    eps_clip_high: float = 0.28
    kl_coef: float = 0.0
    """Weight of the KL divergence from the base model; if not 0, base log-probs must be given."""

    def per_token(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, base_logprobs: Tensor | None = None
    ) -> TokenLosses:
        """The losses of tokens; `logprobs` are of the policy in training and carry the gradient."""
        ratio = clamped(logprobs - old_logprobs).exp()
        loss, clipped = self._surrogate(logprobs, ratio, advantages)
        kl_base = torch.zeros_like(loss)
        if base_logprobs is not None:
            kl_base = k3(logprobs, base_logprobs)
            loss = loss + self.kl_coef * kl_base
        elif self.kl_coef:
            raise ValueError("kl_coef is set, so the base model's log-probs are needed")
        return TokenLosses(loss, clipped.to(loss.dtype), kl_base.detach())

    def over_alternatives(self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor) -> Tensor:
        """The clipped loss, one number per token, of n alternatives to each token: arrays [tokens, n].

        Alternatives with an advantage of 0 add nothing.
        """
        loss, _clipped = self._clipped(clamped(logprobs - old_logprobs).exp(), advantages)
        return loss.sum(dim=1)

    def _surrogate(self, logprobs: Tensor, ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        high = 1 + self.eps_clip_high
        if self.kind == "importance_sampling":
            return -advantages * ratio, torch.zeros_like(ratio, dtype=torch.bool)
        if self.kind == "cispo":
            return -advantages * ratio.detach().clamp(max=high) * logprobs, ratio > high
        return self._clipped(ratio, advantages)

    def _clipped(self, ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        """PPO's clipped loss: a ratio beyond the bound in the direction of its advantage has no gradient."""
        unclipped = -advantages * ratio
        clipped = -advantages * ratio.clamp(1 - self.eps_clip, 1 + self.eps_clip_high)
        return torch.maximum(unclipped, clipped), clipped > unclipped


def clamped(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Unbiased, non-negative estimate of KL(policy ‖ reference) from tokens that the policy sampled."""
    log_ratio = clamped(reference - logprobs)
    return log_ratio.exp() - 1 - log_ratio


def token_weight(length: int, samples: int) -> float:
    """The weight of each token of a sample of `length` tokens in a batch: the mean over tokens, then over samples.

    With a sum over tokens, long responses would dominate.
    """
    return 1 / (length * samples)
