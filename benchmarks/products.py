"""Measures the matrix products of a model on this machine's CPU, in each precision that PyTorch offers.

    python benchmarks/products.py

Each number is the time of all products of one forward pass, each layer with weights of its own, so that no weight is in
the processor's cache when its turn comes. One row is a token of one answer; 8 and 16 rows are as many answers at once;
512 rows are part of a prompt, or of a training step. Run it on an otherwise idle machine.
"""

import warnings
from collections.abc import Callable, Iterator
from itertools import islice

import torch
import torch.nn.functional as F
from common import machine, model_folder, sized, table
from measuring import best, timed
from torch import Tensor

from openclaw_rl.engines.local.model.decoder import PROJECTIONS, Shape
from openclaw_rl.engines.local.model.model_config import read_model_config

ROWS = sized((1, 8, 16, 512), (1, 4))
#: Weights that share a scale, as in a GGUF file.
GROUP = 32
#: A kind is not measured at a number of rows where its first layer takes so many times as long as in float32: some
#: products have no fast version for a processor, and would take minutes.
TOO_SLOW = 10

Product = Callable[[Tensor], Tensor]


def in_dtype(dtype: torch.dtype) -> Callable[[Tensor], Product]:
    """Weights and activations in a 16-bit or 32-bit type. Activations arrive and leave in float32."""

    def make(weight: Tensor) -> Product:
        narrow = weight.to(dtype)
        return lambda x: F.linear(x.to(dtype), narrow).float()

    return make


def packed(weight: Tensor) -> Product:
    """Weights in float32, arranged once in the blocks that oneDNN multiplies (`--pack-weights`)."""
    blocks = torch.ops.mkldnn._reorder_linear_weight(weight, 8)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, blocks, None, "none", [], "")


def fp16_packed(weight: Tensor) -> Product:
    """Weights in float16, arranged once in the blocks that FBGEMM multiplies, in float32 (x86 only)."""
    blocks = torch.ops.quantized.linear_prepack_fp16(weight, None)
    return lambda x: torch.ops.quantized.linear_dynamic_fp16(x, blocks)


#: The largest whole number of a row whose bytes are two of int8, and what makes a float32 of two bytes without sign.
LARGEST, TO_BYTES = 256 * 127 + 127, (1 << 23) + 256 * 128 + 128


def int8_two_bytes(weight: Tensor) -> Product:
    """Weights in int8 with a scale for each output, activations in 16 bits as two rows of bytes, through oneDNN."""
    outputs, inputs = weight.shape
    scales, zeros = weight.abs().amax(1) / 127, torch.zeros(outputs, dtype=torch.int64)
    packed = torch.ops.onednn.qlinear_prepack((weight / scales[:, None]).round().to(torch.int8), [16, inputs])
    scales, to_bytes = scales / LARGEST, torch.full((inputs,), float(TO_BYTES))
    rest = (None, 1.0, 0, torch.float32, "none", [], "")

    def product(x: Tensor) -> Tensor:
        largest = x.abs().amax(1, True)
        whole = torch.addcdiv(to_bytes, x, largest, value=LARGEST).view(torch.uint8)
        halves = whole.as_strided((2, len(x), inputs), (1, 4 * inputs, 4)).reshape(-1, inputs)
        lower, upper = torch.ops.onednn.qlinear_pointwise(halves, 1.0, 128, packed, scales, zeros, *rest).chunk(2)
        return lower.add_(upper, alpha=256).mul_(largest)

    return product


def bf16_inside(weight: Tensor) -> Product:
    """Weights in float32 that oneDNN rounds to bfloat16 for the product, where the processor has such products."""

    def product(x: Tensor) -> Tensor:
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"
        try:
            return F.linear(x, weight)
        finally:
            torch.backends.mkldnn.matmul.fp32_precision = "none"

    return product


def int8_weights(weight: Tensor) -> Product:
    """Weights in int8 with a scale for each output; the arithmetic is in float32."""
    scales = weight.abs().amax(1) / 127
    quantised = (weight / scales[:, None]).round().to(torch.int8)
    return lambda x: torch.ops.aten._weight_int8pack_mm(x, quantised, scales)


def int8_dynamic(weight: Tensor) -> Product:
    """Weights and activations in int8, through QNNPACK (Arm) or FBGEMM (x86)."""
    warnings.filterwarnings("ignore", message=".*quantized.*")
    scale = float(weight.abs().max()) / 127
    quantised = torch.quantize_per_tensor(weight, scale, 0, torch.qint8)
    packed = torch.ops.quantized.linear_prepack(quantised, None)
    return lambda x: torch.ops.quantized.linear_dynamic(x, packed)


def int4_weights(weight: Tensor) -> Product:
    """Weights in 4 bits in groups of 32, with the arithmetic in float32: fast with AVX2 and AVX-512 only."""
    outputs, inputs = weight.shape
    groups = weight.view(outputs, -1, GROUP)
    low = groups.amin(2)
    scales = (groups.amax(2) - low) / 15
    values = ((groups - low[..., None]) / scales[..., None]).round().clamp(0, 15).view(outputs, inputs).int()
    quantised = torch.ops.aten._convert_weight_to_int4pack_for_cpu(values, 1)
    # The product takes the middle of each group's range, which is that of the value 8.
    ranges = torch.stack((scales, low + 8 * scales), dim=2).transpose(0, 1).contiguous()
    return lambda x: torch.ops.aten._weight_int4pack_mm_for_cpu(x, quantised, GROUP, ranges)


def int4_groups(weight: Tensor) -> Product:
    """Weights in 4 bits in groups of 32, activations in int8, through KleidiAI (Arm only)."""
    outputs, inputs = weight.shape
    groups = weight.view(outputs, -1, GROUP)
    scales = groups.abs().amax(2) / 7
    values = (groups / scales[..., None]).round().clamp(-8, 7).view(outputs, inputs).to(torch.int32) + 8
    halves = (values[:, 1::2] << 4 | values[:, ::2]).to(torch.uint8)
    sizes = (GROUP, inputs, outputs)
    packed = torch.ops.aten._dyn_quant_pack_4bit_weight(halves, scales.to(torch.bfloat16), None, *sizes)
    return lambda x: torch.ops.aten._dyn_quant_matmul_4bit(x, packed, *sizes)


#: How a product is made of a weight, by name; and the bytes of a weight.
KINDS: dict[str, tuple[Callable[[Tensor], Product], float]] = {
    "fp32": (in_dtype(torch.float32), 4),
    "fp32, packed": (packed, 4),
    "fp16, packed, fp32 products": (fp16_packed, 2),
    "fp32, bf16 inside": (bf16_inside, 4),
    "fp16": (in_dtype(torch.float16), 2),
    "bf16": (in_dtype(torch.bfloat16), 2),
    "int8 weights, fp32 products": (int8_weights, 1),
    "int8 weights, 16-bit activations": (int8_two_bytes, 1),
    "int8 weights and activations": (int8_dynamic, 1),
    "int4 weights, fp32 products": (int4_weights, 0.5 + 8 / GROUP),
    "int4 weights, int8 activations": (int4_groups, 0.5 + 2 / GROUP),
}


def weights(shape: Shape) -> Iterator[Tensor]:
    """The weights of one pass, in order: those of the layers, then the head."""
    for _ in range(shape.layers):
        for name in PROJECTIONS:
            yield torch.randn(*reversed(shape.projection_sizes(name)))
    yield torch.randn(shape.vocab, shape.hidden)


def forward(products: list[tuple[int, Product]], rows: int) -> Callable[[], None]:
    """All products of a pass; the head computes one row for every sequence, and so one of a long prompt."""
    inputs = {width: torch.randn(rows, width) for width in {width for width, _ in products}}
    last = torch.randn(rows if rows < ROWS[-1] else 1, products[-1][0])

    def run() -> None:
        for width, product in products[:-1]:
            product(inputs[width])
        products[-1][1](last)

    return run


def first_layer(layer: list[tuple[int, Product]], rows: int) -> float:
    """Seconds of the products of one layer, after a first call of each with one row."""
    inputs = {width: torch.randn(rows, width) for width in {width for width, _ in layer}}
    for width, product in layer:
        product(inputs[width][:1])
    return min(timed(lambda: [product(inputs[width]) for width, product in layer]) for _ in range(2))


@torch.inference_mode()
def measure(shape: Shape) -> dict[str, list[float | None] | str]:
    """Milliseconds of a pass at each number of rows (None: too slow), by kind; or why there are none."""
    measured: dict[str, list[float | None] | str] = {}
    limits: list[float] = []
    for name, (make, _bytes) in KINDS.items():
        try:
            # A kind that is too slow is found out before all layers are made.
            layer = [(weight.shape[1], make(weight)) for weight in islice(weights(shape), len(PROJECTIONS))]
            seconds: list[float] = []
            for rows in ROWS:
                seconds.append(first_layer(layer, rows))
                if limits and seconds[-1] > limits[len(seconds) - 1]:
                    break
            limits = limits or [TOO_SLOW * second for second in seconds]
            fast = [second <= limit for second, limit in zip(seconds, limits, strict=False)]
            # More rows take longer, so those are too slow too.
            count = fast.index(False) if False in fast else len(ROWS)
            products = [(weight.shape[1], make(weight)) for weight in weights(shape)] if count else []
            times = [1e3 * best(forward(products, rows))[0] for rows in ROWS[:count]]
            measured[name] = [*times, *[None] * (len(ROWS) - count)]
        except (RuntimeError, AttributeError, NotImplementedError) as error:
            measured[name] = str(error).splitlines()[0][:80]
        print(f"  {name}: {measured[name]}", flush=True)
    return measured


def show(shape: Shape, measured: dict[str, list[float | None] | str]) -> None:
    base = measured["fp32"]
    assert not isinstance(base, str)
    elements = sum(weight.numel() for weight in weights(shape))
    rows = []
    for name, times in measured.items():
        size = f"{elements * KINDS[name][1] / 1e6:.0f}"
        if isinstance(times, str):
            rows.append((name, size, *["–"] * len(ROWS), times))
        else:
            cells = [
                f"{time:.2f} (× {first / time:.2f})" if time and first else f"× < {1 / TOO_SLOW:g}"
                for time, first in zip(times, base, strict=True)
            ]
            rows.append((name, size, *cells, ""))
    head = ("products", "MB", *(f"{count} rows, ms" for count in ROWS), "")
    table(
        f"Products of one pass ({machine()}; {torch.get_num_threads()} threads, PyTorch {torch.__version__})",
        head,
        rows,
    )


if __name__ == "__main__":
    model = Shape.from_config(read_model_config(model_folder()))
    show(model, measure(model))
