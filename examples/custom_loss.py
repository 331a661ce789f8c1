"""A loss of one's own: openclaw-rl serve --custom-loss-function-path examples/custom_loss.py

One number for each response token; what a token counts in the batch is decided outside. Here: the ratio is not clipped
but squashed, so that far tokens still have a small gradient.
"""

import torch
from torch import Tensor


def compute_loss(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, config: dict[str, float]) -> Tensor:
    bound = config["eps_clip_high"]
    change = torch.tanh((logprobs - old_logprobs) / bound) * bound
    return -advantages * change
