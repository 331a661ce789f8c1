"""Drawing tokens from logits on CUDA, as Triton kernels. The host does not wait for them.

They follow `draw`: a row's token is where its uniform number falls in its cumulative distribution. For temperature and
greedy choice, launches and allocations follow from shapes alone, so that the draws belong to the CUDA graph of a decode
step. Rows with top-k or top-p are drawn again afterwards; those with a constraint are drawn by `draw`.

Nothing is sorted to find the likeliest tokens. Numbers are compared by keys, whole numbers in the same order, and the
smallest key that is kept is found bit by bit, a few at a time: each pass over the vocabulary measures what lies at or
above each of 16 keys.
"""

# Triton infers the types of a kernel's arguments at launch; only `tl.constexpr` is annotated.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

#: Tokens of the vocabulary that one program sums up.
CHUNK = 4096
WARPS = 8
#: Bits of a key that one pass finds, and tokens that are compared with all of a pass's keys at once.
PASS_BITS = 4
COMPARED = 256


def draw_tokens(logits: Tensor, temperatures: Tensor, uniforms: Tensor) -> Tensor:
    """Draw one token per row of logits [rows, vocabulary] of any dtype; a temperature of 0 means the likeliest token.

    Returns int32 [2, rows]: the tokens, and the bits of their raw log-probs in float32.
    """
    sums = ChunkSums.of(logits, temperatures)
    return _pick(logits, temperatures, uniforms, sums, None)


class ChunkSums(NamedTuple):
    """What the chunks of each row hold, [rows, chunks] each."""

    peaks: Tensor
    sums: Tensor
    weights: Tensor
    likeliest: Tensor

    @classmethod
    def of(cls, logits: Tensor, temperatures: Tensor) -> "ChunkSums":
        rows, vocabulary = logits.shape
        chunks = triton.cdiv(vocabulary, CHUNK)
        peaks, sums, weights = torch.empty((3, rows, chunks), dtype=torch.float32, device=logits.device)
        likeliest = torch.empty((rows, chunks), dtype=torch.int32, device=logits.device)
        _sum_chunks_kernel[(chunks, rows)](
            logits, temperatures, peaks, sums, weights, likeliest, logits.stride(0), CHUNKS=chunks, **sizes(logits)
        )
        return cls(peaks, sums, weights, likeliest)


class Cut(NamedTuple):
    """Which tokens of each row are kept: those above a key, and the first of those at it."""

    keys: Tensor
    """int64 [rows]; -1 keeps all."""
    equals: Tensor
    """int32 [rows]: how many of the tokens at the key."""


def sizes(logits: Tensor) -> dict[str, int]:
    return {"VOCABULARY": logits.shape[1], "CHUNK": CHUNK, "num_warps": WARPS}


def key_bits(logits: Tensor) -> int:
    """Two numbers of 16 bits in bfloat16 differ in the first 16 bits as float32."""
    return 16 if logits.dtype == torch.bfloat16 else 32


def draw_truncated(
    logits: Tensor, temperatures: Tensor, uniforms: Tensor, top_ps: Tensor, top_ks: Tensor | None
) -> Tensor:
    """As `draw_tokens`, from the `top_ks` likeliest tokens (int32 [rows], 0 for all; None if no row has any), then from
    the likeliest of these that have the share `top_ps` of their weight. No temperature is 0."""
    rows = len(logits)
    sums = ChunkSums.of(logits, temperatures)
    chunks = sums.peaks.shape[1]
    options: Any = {"device": logits.device}
    cut = Cut(torch.full((rows,), -1, **options), torch.zeros(rows, dtype=torch.int32, **options))
    kept, found = torch.full((rows,), -1.0, **options), torch.empty(rows, dtype=torch.int64, **options)
    counts, masses = torch.empty((2, rows, 1 << PASS_BITS, chunks), **options)
    above = torch.empty((2, rows), **options)
    shared: dict[str, Any] = {"CHUNKS": chunks, "CHUNKS_BLOCK": triton.next_power_of_2(chunks)}
    shared |= {"PASS_BITS": PASS_BITS, "KEY_BITS": key_bits(logits)}
    for by_mass, limits in ((False, top_ks), (True, top_ps)):
        for shift in range(key_bits(logits) - PASS_BITS, -1, -PASS_BITS) if limits is not None else ():
            first = shift == key_bits(logits) - PASS_BITS
            _measure_kernel[(chunks, rows)](
                logits, temperatures, limits, sums.peaks, found, counts, masses, logits.stride(0), SHIFT=shift,
                BY_MASS=by_mass, FIRST=first, COMPARED=COMPARED, **shared, **sizes(logits),
            )  # fmt: skip
            _choose_kernel[(rows,)](
                temperatures, limits, sums.peaks, found, counts, masses, above, kept, cut.keys, cut.equals, rows,
                SHIFT=shift, BY_MASS=by_mass, FIRST=first, **shared,
            )  # fmt: skip
    return _pick(logits, temperatures, uniforms, sums, cut)


def _pick(logits: Tensor, temperatures: Tensor, uniforms: Tensor, sums: ChunkSums, cut: Cut | None) -> Tensor:
    """The last kernel of a draw, and with a cut the one before it: what each chunk has above and at the key."""
    rows, chunks = sums.peaks.shape
    drawn = torch.empty((2, rows), dtype=torch.int32, device=logits.device)
    shared: dict[str, Any] = {"CHUNKS": chunks, "CHUNKS_BLOCK": triton.next_power_of_2(chunks), **sizes(logits)}
    equals = None if cut is None else torch.empty((rows, chunks), dtype=torch.int32, device=logits.device)
    if cut is not None:
        _keep_kernel[(chunks, rows)](
            logits, temperatures, sums.peaks, cut.keys, sums.weights, equals, logits.stride(0),
            KEY_BITS=key_bits(logits), **shared,
        )  # fmt: skip
    _pick_kernel[(rows,)](
        logits,
        temperatures,
        uniforms,
        *sums,
        *(cut or (None, None)),
        equals,
        drawn,
        drawn[1].view(torch.float32),
        logits.stride(0),
        CUT=cut is not None,
        KEY_BITS=key_bits(logits),
        **shared,
    )
    return drawn


@triton.jit
def _weights(value, peak, temperature):
    """Unnormalised probabilities at a temperature; 0 where the value is -inf."""
    return tl.exp((value - peak) / temperature)


@triton.jit
def _key(value, KEY_BITS: tl.constexpr):
    """A whole number of `KEY_BITS` bits, larger for larger numbers."""
    bits = value.to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (bits.to(tl.int64) + 2147483648) >> (32 - KEY_BITS)


@triton.jit
def _number(key, KEY_BITS: tl.constexpr):
    """The number that has the key."""
    bits = (key << (32 - KEY_BITS)) - 2147483648
    # Of a negative number the bits are inverted, also those that the key leaves out.
    bits = tl.where(bits < 0, (bits | ((1 << (32 - KEY_BITS)) - 1)) ^ 0x7FFFFFFF, bits)
    return bits.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _peak(peaks, row, CHUNKS: tl.constexpr, CHUNKS_BLOCK: tl.constexpr):
    chunk = tl.arange(0, CHUNKS_BLOCK)
    return tl.max(tl.load(peaks + row * CHUNKS + chunk, mask=chunk < CHUNKS, other=float("-inf")), axis=0)


# fmt: off
@triton.jit
def _measure_kernel(
    logits, temperatures, limits, peaks, found, counts, masses, row_stride, SHIFT: tl.constexpr,
    BY_MASS: tl.constexpr, FIRST: tl.constexpr, COMPARED: tl.constexpr, CHUNKS: tl.constexpr,
    CHUNKS_BLOCK: tl.constexpr, PASS_BITS: tl.constexpr, KEY_BITS: tl.constexpr, VOCABULARY: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One program measures one chunk of one row: how many tokens, and how much weight, at or above each key."""
    # fmt: on
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    KEYS: tl.constexpr = 1 << PASS_BITS
    if _limits(tl.load(limits + row), BY_MASS):
        number = tl.arange(0, KEYS)
        begin = tl.cast(0, tl.int64) if FIRST else tl.load(found + row)
        keys = (begin + (number.to(tl.int64) << SHIFT))[:, None]
        top = _peak(peaks, row, CHUNKS, CHUNKS_BLOCK)
        temperature = tl.load(temperatures + row)
        count = tl.zeros([KEYS, COMPARED], tl.float32)
        mass = tl.zeros([KEYS, COMPARED], tl.float32)
        for start in range(chunk * CHUNK, chunk * CHUNK + CHUNK, COMPARED):
            token = start + tl.arange(0, COMPARED)
            inside = token < VOCABULARY
            value = tl.load(logits + row * row_stride + token, mask=inside, other=float("-inf")).to(tl.float32)
            reached = (_key(value, KEY_BITS)[None, :] >= keys) & inside[None, :]
            count += reached.to(tl.float32)
            mass += tl.where(reached, _weights(value, top, temperature)[None, :], 0.0)
        at = (row * KEYS + number) * CHUNKS + chunk
        tl.store(counts + at, tl.sum(count, axis=1))
        tl.store(masses + at, tl.sum(mass, axis=1))


@triton.jit
def _limits(limit, BY_MASS: tl.constexpr):
    """Whether a row's parameter leaves out any tokens."""
    return limit < 1.0 if BY_MASS else limit > 0


# fmt: off
@triton.jit
def _choose_kernel(
    temperatures, limits, peaks, found, counts, masses, above, kept, cut_keys, cut_equals, rows, SHIFT: tl.constexpr,
    BY_MASS: tl.constexpr, FIRST: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_BLOCK: tl.constexpr,
    PASS_BITS: tl.constexpr, KEY_BITS: tl.constexpr,
):
    """One program takes the largest key of one row at or above which there is enough; after the last pass, the cut."""
    # fmt: on
    row = tl.program_id(0).to(tl.int64)
    limit = tl.load(limits + row)
    KEYS: tl.constexpr = 1 << PASS_BITS
    if _limits(limit, BY_MASS):
        number, chunk = tl.arange(0, KEYS), tl.arange(0, CHUNKS_BLOCK)
        at = ((row * KEYS + number) * CHUNKS)[:, None] + chunk[None, :]
        inside = (chunk < CHUNKS)[None, :] & (number < KEYS)[:, None]
        count = tl.sum(tl.load(counts + at, mask=inside, other=0.0), axis=1)
        mass = tl.sum(tl.load(masses + at, mask=inside, other=0.0), axis=1)
        whole = tl.load(kept + row)
        if FIRST:
            whole = tl.where(whole < 0.0, tl.max(mass, axis=0), whole)
            tl.store(kept + row, whole)
        if BY_MASS:
            wanted = limit * whole
            # A share of 0 is still a token.
            enough = (mass >= wanted) & (count > 0.0)
        else:
            wanted = limit.to(tl.float32)
            enough = count >= wanted
        chosen = tl.max(tl.where(enough, number, 0), axis=0)
        key = chosen.to(tl.int64) << SHIFT
        count_above = tl.sum(tl.where(number == chosen + 1, count, 0.0), axis=0)
        mass_above = tl.sum(tl.where(number == chosen + 1, mass, 0.0), axis=0)
        if not FIRST:
            key += tl.load(found + row)
            # The next key is the one that was too large in the pass before.
            count_above = tl.where(chosen + 1 < KEYS, count_above, tl.load(above + row))
            mass_above = tl.where(chosen + 1 < KEYS, mass_above, tl.load(above + rows + row))
        tl.store(found + row, key)
        tl.store(above + row, count_above)
        tl.store(above + rows + row, mass_above)
        if SHIFT == 0:
            top = _peak(peaks, row, CHUNKS, CHUNKS_BLOCK)
            weight = _weights(_number(key, KEY_BITS), top, tl.load(temperatures + row))
            if BY_MASS:
                equals = tl.maximum(tl.ceil((wanted - mass_above) / weight), 1.0)
                equals = tl.minimum(equals, 1e9).to(tl.int32)
                equals = tl.where(key == tl.load(cut_keys + row), tl.minimum(equals, tl.load(cut_equals + row)), equals)
            else:
                equals = (wanted - count_above).to(tl.int32)
                tl.store(kept + row, mass_above + equals * weight)
            tl.store(cut_keys + row, key)
            tl.store(cut_equals + row, equals)


# fmt: off
@triton.jit
def _keep_kernel(
    logits, temperatures, peaks, cut_keys, weights, equals, row_stride, CHUNKS: tl.constexpr,
    CHUNKS_BLOCK: tl.constexpr, KEY_BITS: tl.constexpr, VOCABULARY: tl.constexpr, CHUNK: tl.constexpr,
):
    """One program leaves, for one chunk of one row, the weight above the cut and the number of tokens at it."""
    # fmt: on
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = token < VOCABULARY
    value = tl.load(logits + row * row_stride + token, mask=inside, other=float("-inf")).to(tl.float32)
    key, cut = _key(value, KEY_BITS), tl.load(cut_keys + row)
    share = _weights(value, _peak(peaks, row, CHUNKS, CHUNKS_BLOCK), tl.load(temperatures + row))
    at = row * CHUNKS + chunk
    tl.store(weights + at, tl.sum(tl.where((key > cut) & inside, share, 0.0), axis=0))
    tl.store(equals + at, tl.sum(((key == cut) & inside).to(tl.int32), axis=0))


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


# fmt: off
@triton.jit
def _pick_kernel(
    logits, temperatures, uniforms, peaks, sums, weights, likeliest, cut_keys, cut_equals, equals, tokens, logprobs,
    row_stride, VOCABULARY: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_BLOCK: tl.constexpr,
    CUT: tl.constexpr, KEY_BITS: tl.constexpr,
):
    """One program finds the token of one row: first its chunk, then its place there."""
    # fmt: on
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
    weight = tl.load(weights + at, mask=inside, other=0.0)
    if CUT:
        cut, keep = tl.load(cut_keys + row), tl.load(cut_equals + row)
        equal = tl.load(equals + at, mask=inside, other=0)
        earlier = tl.cumsum(equal, axis=0) - equal
        kept = tl.minimum(tl.maximum(keep - earlier, 0), equal)
        weight += tl.where(kept > 0, kept * _weights(_number(cut, KEY_BITS), top, temperature), 0.0)
    else:
        weight *= _weights(peak, top, temperature)
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
    if CUT:
        key = _key(value, KEY_BITS)
        equal_here = ((key == cut) & (token < VOCABULARY)).to(tl.int32)
        place = tl.sum(tl.where(chunk == chosen, earlier, 0), axis=0) + tl.cumsum(equal_here, axis=0)
        share = tl.where((key > cut) | ((equal_here > 0) & (place <= keep)), share, 0.0)
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
