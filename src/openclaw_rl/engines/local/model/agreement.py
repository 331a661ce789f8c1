"""Whether a model that Transformers' modules compute with our parts gives what Transformers computes by itself."""

import sys
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from openclaw_rl.engines.local.model.language_model import Sizes
from openclaw_rl.engines.local.model.model_config import UnsupportedModel

#: The name of `exact_attention` among Transformers' attentions.
EXACT = "openclaw_rl_exact"
#: Tokens of the text whose log-probs are compared.
COMPARED_TOKENS = 48
#: The largest mean difference of log-probs between our attention and Transformers' own, in float32 and in 16 bits.
MAX_GAP = 0.001
MAX_NARROW_GAP = 0.1
#: In 16 bits it may also be so many times what rounding to 16 bits changes in Transformers' own attention: where tokens
#: choose experts, the last bit of a sum may choose another one.
MAX_TIMES_ROUNDING = 1.5


class ComparedModel(Protocol):
    """What a comparison needs of a model."""

    @property
    def embed(self) -> Tensor: ...

    @property
    def shape(self) -> Sizes: ...

    @property
    def activation_dtype(self) -> torch.dtype: ...

    def eager_logits(self, ids: Tensor, attention: str) -> Tensor:
        """As Transformers computes them by itself, with this attention."""


def check_agreement(model: ComparedModel, compute: Callable[[Tensor], Tensor], tokens: int) -> None:
    """Compare the logits that `compute` returns for a short text with what Transformers computes by itself.

    Raises UnsupportedModel with the numbers if the log-probs differ.
    """
    # Some tokens from all over the vocabulary: what they mean does not matter.
    ids = torch.arange(1, tokens + 1, device=model.embed.device) * 7919 % model.shape.vocab
    with torch.inference_mode():
        rows = (compute(ids), model.eager_logits(ids, EXACT), model.eager_logits(ids, "eager"))
        ours, exact, rounded = (row[:-1].log_softmax(-1).gather(1, ids[1:, None]) for row in rows)
    gap = (ours - exact).abs()
    limit = MAX_GAP
    if model.activation_dtype.itemsize < torch.float32.itemsize:
        limit = max(MAX_NARROW_GAP, MAX_TIMES_ROUNDING * (rounded - exact).abs().mean().item())
    if not gap.mean() <= limit:
        raise UnsupportedModel(
            f"its log-probs of a text of {tokens} tokens differ from those of Transformers' own attention by "
            f"{gap.mean():.4g} on average and {gap.max():.4g} at most, where {limit:.4g} on average is allowed"
        )


def exact_attention(module: Any, query: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, object]:
    """Transformers' own attention, in float32: in 16 bits some families round their softmax."""
    compute = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if compute is None:
        raise UnsupportedModel("its code has no eager_attention_forward to compare our attention with")
    wide = (part.float() if isinstance(part, Tensor) and part.is_floating_point() else part for part in (query, *args))
    attended, *others = compute(module, *wide, **kwargs)
    return attended.to(query.dtype), others[0]
