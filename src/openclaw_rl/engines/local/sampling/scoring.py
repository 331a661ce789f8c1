"""Log-probs of given tokens, in pieces as the model reads them."""

import numpy as np
import torch
from torch import Tensor

from openclaw_rl.engines.local.model.decoder import Decoder
from openclaw_rl.types import ScoreRequest, Scores, TopTokens

#: Rows of logits held at a time: at a vocabulary of 150,000, about 150 MB in float32.
ROWS = 256


class Scoring:
    """An unfinished scoring request. If its sequence is preempted, pieces come again and replace the earlier ones."""

    def __init__(self, request: ScoreRequest) -> None:
        self.request = request
        self.first = len(request.ids) - request.last_n - 1
        """The position whose logits are of the first scored token."""
        self._logprobs = np.zeros(request.last_n, np.float32)
        top = (request.last_n, request.top_k)
        self._top = TopTokens(np.zeros(top, np.int32), np.zeros(top, np.float32)) if request.top_k else None
        self._targets = None if request.targets is None else np.zeros(request.targets.shape, np.float32)

    @torch.inference_mode()
    def read(self, decoder: Decoder, start: int, hidden: Tensor) -> None:
        """Take the hidden states of positions `start` and after."""
        for offset in range(0, len(hidden), ROWS):
            self._read(start + offset, decoder.logits(hidden[offset : offset + ROWS]))

    def scores(self) -> Scores:
        return Scores(self._logprobs.tolist(), self._top, self._targets)

    def _read(self, start: int, logits: Tensor) -> None:
        request, place = self.request, slice(start - self.first, start - self.first + len(logits))
        normaliser = logits.logsumexp(-1, keepdim=True)
        ids = torch.tensor(request.ids[start + 1 : start + 1 + len(logits)], device=logits.device)
        self._logprobs[place] = (logits.gather(1, ids[:, None]) - normaliser)[:, 0].cpu()
        if self._top is not None:
            values, tokens = logits.topk(request.top_k)
            self._top.ids[place], self._top.logprobs[place] = tokens.cpu(), (values - normaliser).cpu()
        if self._targets is not None and request.targets is not None:
            wanted = torch.from_numpy(request.targets[place]).long().to(logits.device)
            self._targets[place] = (logits.gather(1, wanted) - normaliser).cpu()
