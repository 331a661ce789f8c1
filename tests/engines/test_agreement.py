"""A model is compared with what Transformers computes by itself before it serves."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from openclaw_rl.engines.local.model.agreement import COMPARED_TOKENS, EXACT, check_agreement
from openclaw_rl.engines.local.model.language_model import Sizes
from openclaw_rl.engines.local.model.model_config import UnsupportedModel
from openclaw_rl.engines.local.model.transformers_sizes import TransformersSizes

VOCABULARY = 200


@dataclass
class RoundedModel:
    """A model whose own attention in 16 bits is off by `rounding`."""

    rounding: float
    activation_dtype: torch.dtype = torch.bfloat16

    @property
    def embed(self) -> Tensor:
        return torch.zeros(1)

    @property
    def shape(self) -> Sizes:
        return TransformersSizes(VOCABULARY, *[1] * 7)

    def eager_logits(self, ids: Tensor, attention: str) -> Tensor:
        return logits(ids, 0.0 if attention == EXACT else self.rounding)


def logits(ids: Tensor, off: float) -> Tensor:
    """Every token is as likely as the others, but for the one that comes next, whose log-prob is about `off` higher."""
    rows = torch.zeros(len(ids), VOCABULARY)
    rows[torch.arange(len(ids) - 1), ids[1:]] = off
    return rows


@pytest.mark.parametrize(
    ("rounding", "gap", "fits"),
    [(0.0, 0.09, True), (0.0, 0.12, False), (0.05, 0.12, False), (0.2, 0.28, True), (0.2, 0.32, False)],
)
def test_in_16_bits_a_model_may_differ_as_much_as_rounding_does(rounding: float, gap: float, fits: bool) -> None:
    if fits:
        check_agreement(RoundedModel(rounding), lambda ids: logits(ids, gap), COMPARED_TOKENS)
        return
    with pytest.raises(UnsupportedModel, match=r"differ .* by 0\.\d+ on average"):
        check_agreement(RoundedModel(rounding), lambda ids: logits(ids, gap), COMPARED_TOKENS)


def test_in_float32_rounding_is_no_excuse() -> None:
    model = RoundedModel(0.2, torch.float32)
    check_agreement(model, lambda ids: logits(ids, 0.0005), COMPARED_TOKENS)
    with pytest.raises(UnsupportedModel, match=r"where 0\.001 on average is allowed"):
        check_agreement(model, lambda ids: logits(ids, 0.01), COMPARED_TOKENS)
