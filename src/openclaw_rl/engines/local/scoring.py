"""Log-probs of given tokens: what a teacher thinks of a response, in pieces as the model reads it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from openclaw_rl.engines.local.decoder import Decoder
from openclaw_rl.types import ScoreRequest, Scores

#: Rows of logits held at a time: at a vocabulary of 150,000, about 150 MB in float32.
ROWS = 256


class Scoring:
    """A scoring request on its way. Pieces may come again after the sequence was preempted: the last one counts."""

    def __init__(self, request: ScoreRequest) -> None:
        self.request = request
        self.first = len(request.ids) - request.last_n - 1
        """The position whose logits are of the first scored token."""
        self._logprobs = [0.0] * request.last_n
        self._top: list[tuple[tuple[int, float], ...]] = [()] * request.last_n
        self._targets: list[list[float]] = [[] for _ in range(request.last_n)]

    @torch.inference_mode()
    def read(self, decoder: Decoder, start: int, hidden: Tensor) -> None:
        """Take the hidden states of positions `start` and after."""
        for offset in range(0, len(hidden), ROWS):
            self._read(start + offset, decoder.logits(hidden[offset : offset + ROWS]))

    def scores(self) -> Scores:
        return Scores(self._logprobs, self._top, self._targets if self.request.targets else [])

    def _read(self, start: int, logits: Tensor) -> None:
        request, place = self.request, slice(start - self.first, start - self.first + len(logits))
        normaliser = logits.logsumexp(-1, keepdim=True)
        ids = torch.tensor(request.ids[start + 1 : start + 1 + len(logits)], device=logits.device)
        self._logprobs[place] = (logits.gather(1, ids[:, None]) - normaliser)[:, 0].tolist()
        if request.top_k:
            values, tokens = logits.topk(request.top_k)
            pairs = zip(tokens.tolist(), (values - normaliser).tolist(), strict=True)
            self._top[place] = [tuple(zip(t, v, strict=True)) for t, v in pairs]
        if request.targets:
            self._targets[place] = gather_ragged(logits, normaliser, request.targets[place])


def gather_ragged(logits: Tensor, normaliser: Tensor, targets: Sequence[Sequence[int]]) -> list[list[float]]:
    """The log-probs of some tokens of each row, however many each row asks for."""
    counts = [len(row) for row in targets]
    rows = torch.arange(len(targets), device=logits.device).repeat_interleave(
        torch.tensor(counts, device=logits.device)
    )
    columns = torch.tensor([token for row in targets for token in row], dtype=torch.long, device=logits.device)
    flat = iter((logits[rows, columns] - normaliser[rows, 0]).tolist())
    return [[next(flat) for _ in range(count)] for count in counts]
