"""A custom loss: openclaw-rl serve --custom-loss-function-path examples/custom_loss.py

Returns the loss of each response token; the caller weights the tokens in the batch. Here the ratio is squashed by tanh
instead of clipped, so that tokens far from the old policy keep a small gradient.
"""

import torch
from torch import Tensor


def compute_loss(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, config: dict[str, float]) -> Tensor:
    bound = config["eps_clip_high"]
    change = torch.tanh((logprobs - old_logprobs) / bound) * bound
    return -advantages * change
