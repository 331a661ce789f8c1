"""Drawing tokens from logits on CUDA: temperature and greedy choice, as two Triton kernels.

They follow `draw`: a row's token is where its uniform number falls in its cumulative distribution. Launches and
allocations follow from shapes alone, so that the draws belong to the CUDA graph of a decode step. Rows that are
truncated or constrained are drawn by `draw` afterwards.
"""

# Triton infers the types of a kernel's arguments at launch; only `tl.constexpr` is annotated.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

#: Tokens of the vocabulary that one program sums up.
CHUNK = 4096
WARPS = 8


def draw_tokens(logits: Tensor, temperatures: Tensor, uniforms: Tensor) -> Tensor:
    """Draw one token per row of logits [rows, vocabulary] of any dtype; a temperature of 0 means the likeliest token.

    Returns int32 [2, rows]: the tokens, and the bits of their raw log-probs in float32.
    """
    rows, vocabulary = logits.shape
    chunks = triton.cdiv(vocabulary, CHUNK)
    peaks, sums, weights = torch.empty((3, rows, chunks), dtype=torch.float32, device=logits.device)
    likeliest = torch.empty((rows, chunks), dtype=torch.int32, device=logits.device)
    drawn = torch.empty((2, rows), dtype=torch.int32, device=logits.device)
    sizes = {"VOCABULARY": vocabulary, "CHUNK": CHUNK, "num_warps": WARPS}
    _sum_chunks_kernel[(chunks, rows)](
        logits, temperatures, peaks, sums, weights, likeliest, logits.stride(0), CHUNKS=chunks, **sizes
    )
    _pick_kernel[(rows,)](
        logits,
        temperatures,
        uniforms,
        peaks,
        sums,
        weights,
        likeliest,
        drawn,
        drawn[1].view(torch.float32),
        logits.stride(0),
        CHUNKS=chunks,
        CHUNKS_BLOCK=triton.next_power_of_2(chunks),
        **sizes,
    )
    return drawn


@triton.jit
def _weights(value, peak, temperature):
    """Unnormalised probabilities at a temperature; 0 where the value is -inf."""
    return tl.exp((value - peak) / temperature)


@triton.jit
def _sum_chunks_kernel(
    logits,
    temperatures,
    peaks,
    sums,
    weights,
    likeliest,
    row_stride,
    VOCABULARY: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """One program leaves, for one chunk of one row: the peak and its token, and sums of exponentials below the peak.

    The first sum is of the raw logits, the second at the row's temperature.
    """
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    value = tl.load(logits + row * row_stride + token, mask=token < VOCABULARY, other=float("-inf")).to(tl.float32)
    peak = tl.max(value, axis=0)
    base = tl.maximum(peak, -3.4e38)  # a chunk without any possible token
    temperature = tl.load(temperatures + row)
    temperature = tl.where(temperature > 0.0, temperature, 1.0)
    at = row * CHUNKS + chunk
    tl.store(peaks + at, peak)
    tl.store(likeliest + at, tl.min(tl.where(value == peak, token, VOCABULARY), axis=0))
    tl.store(sums + at, tl.sum(tl.exp(value - base), axis=0))
    tl.store(weights + at, tl.sum(_weights(value, base, temperature), axis=0))


@triton.jit
def _pick_kernel(
    logits,
    temperatures,
    uniforms,
    peaks,
    sums,
    weights,
    likeliest,
    tokens,
    logprobs,
    row_stride,
    VOCABULARY: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_BLOCK: tl.constexpr,
):
    """One program finds the token of one row: first its chunk, then its place there."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS_BLOCK)
    inside = chunk < CHUNKS
    at = row * CHUNKS + chunk
    peak = tl.load(peaks + at, mask=inside, other=float("-inf"))
    top = tl.max(peak, axis=0)
    normaliser = tl.log(tl.sum(tl.load(sums + at, mask=inside, other=0.0) * tl.exp(peak - top), axis=0)) + top

    temperature = tl.load(temperatures + row)
    greedy = temperature <= 0.0
    temperature = tl.where(greedy, 1.0, temperature)
    weight = tl.load(weights + at, mask=inside, other=0.0) * _weights(peak, top, temperature)
    reached = tl.cumsum(weight, axis=0)
    point = tl.load(uniforms + row) * tl.max(reached, axis=0)
    # Rounding can put the point past the end; the last chunk with any weight is the right one then.
    last = tl.max(tl.where(weight > 0.0, chunk, 0), axis=0)
    chosen = tl.minimum(tl.min(tl.where(reached > point, chunk, CHUNKS_BLOCK), axis=0), last)
    before = tl.max(tl.where(chunk < chosen, reached, 0.0), axis=0)

    token = chosen * CHUNK + tl.arange(0, CHUNK)
    row_at = logits + row * row_stride
    value = tl.load(row_at + token, mask=token < VOCABULARY, other=float("-inf")).to(tl.float32)
    share = _weights(value, top, temperature)
    index = tl.arange(0, CHUNK)
    last = tl.max(tl.where(share > 0.0, index, 0), axis=0)
    found = tl.min(tl.where(before + tl.cumsum(share, axis=0) > point, index, CHUNK), axis=0)
    drawn = chosen * CHUNK + tl.minimum(found, last)
    best = tl.min(tl.where(peak == top, tl.load(likeliest + at, mask=inside, other=VOCABULARY), VOCABULARY), axis=0)
    drawn = tl.where(greedy, best, drawn)
    # Logits that are not numbers have no likeliest token; the index must stay inside all the same.
    drawn = tl.minimum(drawn, VOCABULARY - 1)
    tl.store(tokens + row, drawn)
    tl.store(logprobs + row, tl.load(row_at + drawn).to(tl.float32) - normaliser)
