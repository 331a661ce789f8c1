"""Policy losses on sampled tokens.

Everything is per token: `PolicyLoss.per_token` knows nothing of samples or batches, and `token_weight` is all
there is to know about reduction. A batch's loss is the sum of weight times loss over its tokens, so it does not
matter how the tokens are spread over micro-batches.
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
    """1 where the clip holds the token back, else 0."""
    kl_old: Tensor
    """Estimate of the divergence from the policy that sampled."""
    kl_base: Tensor
    """Estimate of the divergence from the base model; 0 where no base log-probs were given."""


class Loss(Protocol):
    """What a trainer needs of a loss."""

    @property
    def kl_coef(self) -> float: ...
    def per_token(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, base_logprobs: Tensor | None = None
    ) -> TokenLosses: ...
    def over_alternatives(self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """Which loss, and its constants."""

    kind: LossKind = "ppo"
    eps_clip: float = 0.2
    eps_clip_high: float = 0.28
    kl_coef: float = 0.0
    """Weight of the divergence from the base model; if not 0, base log-probs have to be given."""

    def per_token(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, base_logprobs: Tensor | None = None
    ) -> TokenLosses:
        """Losses of tokens whose log-probs are given: those of the policy in training, with a gradient, and others."""
        log_ratio = clamped(logprobs - old_logprobs)
        ratio = log_ratio.exp()
        loss, clipped = self._surrogate(logprobs, ratio, advantages)
        kl_base = torch.zeros_like(loss)
        if base_logprobs is not None:
            kl_base = k3(logprobs, base_logprobs)
            loss = loss + self.kl_coef * kl_base
        elif self.kl_coef:
            raise ValueError("kl_coef is set, so the base model's log-probs are needed")
        return TokenLosses(loss, clipped.to(loss.dtype), (ratio - 1 - log_ratio).detach(), kl_base.detach())

    def over_alternatives(self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor) -> Tensor:
        """The clipped loss, one number a token, of tokens [tokens, n] in its place; of those that are not there, 0."""
        loss, _held = self._clipped(clamped(logprobs - old_logprobs).exp(), advantages)
        return loss.sum(dim=1)

    def _surrogate(self, logprobs: Tensor, ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        high = 1 + self.eps_clip_high
        if self.kind == "importance_sampling":
            return -advantages * ratio, torch.zeros_like(ratio, dtype=torch.bool)
        if self.kind == "cispo":
            return -advantages * ratio.detach().clamp(max=high) * logprobs, ratio > high
        return self._clipped(ratio, advantages)

    def _clipped(self, ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        """A ratio that has gone far enough the way its advantage points has no more slope."""
        free, bounded = -advantages * ratio, -advantages * ratio.clamp(1 - self.eps_clip, 1 + self.eps_clip_high)
        return torch.maximum(free, bounded), bounded > free


def clamped(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Unbiased, never negative estimate of KL(policy ‖ reference) from tokens that the policy sampled."""
    log_ratio = clamped(reference - logprobs)
    return log_ratio.exp() - 1 - log_ratio


def token_weight(length: int, samples: int) -> float:
    """What each token of a sample counts in a batch of so many: the mean over a sample's tokens, then over samples.

    A sum over tokens would let long responses dominate.
    """
    return 1 / (length * samples)
