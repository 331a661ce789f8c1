"""Measures models of other families and weights of 4 bits, with random weights at real shapes, on one GPU.

    python benchmarks/families.py              all parts (about four minutes on an H200), each in a process of its own
    python benchmarks/families.py qwen3-4b     one part

A part that fails or takes too long is named, and the others go on. Sampling is 512-token prompts and 64 tokens each,
with an adapter. A training step has 4,096 tokens in four sequences. Memory is the peak of the process in PyTorch.
"""

import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from common import SMOKE, machine, sized, table, verdict
from cuda_engine import CUDA_PROMPT, CUDA_TOKENS, CudaEngine, random_prompt
from learning import GIB, PLENTY, our_step, peft_step, sequence
from measuring import best, timed, wait
from sampling import generate
from shapes import QWEN3_4B, QWEN3_8B, qwen3_config, random_decoder

from openclaw_rl.engines.local.model.codes import encode
from openclaw_rl.engines.local.model.decoder import PROJECTIONS, Decoder, Shape
from openclaw_rl.engines.local.model.language_model import LanguageModel
from openclaw_rl.engines.local.model.linear import decode, quantised
from openclaw_rl.engines.local.model.quantised_modules import quantise_modules
from openclaw_rl.engines.local.model.transformers_decoder import (
    TransformersDecoder,
    decoder_of,
    experts_for,
    new_model,
    put,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
SEQUENCES, LENGTH, RESPONSE = sized((4, 1024, 128), (2, 24, 8))
STREAMS = sized((1, 16), (1, 2))
CACHE_GIB = sized(4.0, 0.05)
#: The longest time of a part, in seconds.
LIMIT = sized(75, 120)
#: What a step of 4,096 tokens may take with weights of 4 bits, in GiB of the whole process.
MOST = {"Qwen3-8B": 10, "Qwen3-4B": 6}
SMALL: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
}


def small(shape: Shape) -> Shape:
    if not SMOKE:
        return shape
    sizes: dict[str, Any] = {"vocab": 512, "hidden": 128, "intermediate": 128, "layers": 2, "heads": 4, "kv_heads": 2}
    return replace(shape, **sizes, head_dim=32, max_context=2048, rotary_layers=(True,) * 2)


def gemma_3_4b() -> Any:
    from transformers import Gemma3TextConfig

    real = {"vocab_size": 262208, "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    real |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 32768}
    return Gemma3TextConfig(**sized(real, SMALL), sliding_window=1024, query_pre_attn_scalar=256)


def qwen3_30b_a3b() -> Any:
    from transformers import Qwen3MoeConfig

    real = {"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48}
    real |= {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 40960}
    experts = sized({"num_experts": 128, "num_experts_per_tok": 8}, {"num_experts": 8, "num_experts_per_tok": 2})
    return Qwen3MoeConfig(**sized(real, SMALL), **experts, moe_intermediate_size=sized(768, 64))


def gpt_oss_20b() -> Any:
    from transformers import GptOssConfig

    real = {"vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24}
    real |= {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 32768}
    experts = sized({"num_local_experts": 32}, {"num_local_experts": 4})
    return GptOssConfig(**sized(real, SMALL), **experts, num_experts_per_tok=sized(4, 2))


def by_transformers(config: Any, bits: int = 0) -> TransformersDecoder:
    """Random weights of a family that Transformers' code computes."""
    with torch.device(DEVICE):
        model = new_model(config, DTYPE, one_by_one=bool(bits))
    quantise_modules(model, lambda _name: bits, DTYPE, DEVICE)
    return decoder_of(model)


def plain_model(decoder: TransformersDecoder, config: Any) -> Any:
    """Transformers' own model with the same weights in memory."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        make: Any = AutoModelForCausalLM.from_config
        model = make(config, dtype=DTYPE, experts_implementation=experts_for(DTYPE))
    for name, index in decoder.names:
        put(model, name, decoder.tensors[index])
    return model.eval()


def own(shape: Shape, bits: int = 0) -> Decoder:
    with torch.no_grad():
        decoder = random_decoder(shape, DTYPE, DEVICE)
        for layer in decoder.layers if bits else ():
            for name in PROJECTIONS:
                setattr(layer, name, quantised(getattr(layer, name).weight, None, bits, DTYPE))
        # The 8B model's head is not its embedding.
        return replace(decoder, untied_head=decoder.embed.clone()) if shape.hidden == QWEN3_8B.hidden else decoder


def batch_for(decoder: LanguageModel) -> list[Any]:
    random.seed(0)
    return [sequence(LENGTH, decoder.shape.vocab, [LENGTH], RESPONSE) for _ in range(SEQUENCES)]


def memory(work: Callable[[], object]) -> float:
    """GiB at the peak of some work, with everything that is in memory before it."""
    if DEVICE.type != "cuda":
        work()
        return 0.0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    work()
    wait()
    return torch.cuda.max_memory_allocated() / GIB


def train(decoder: LanguageModel, free: int = PLENTY) -> tuple[float, float]:
    """Tokens a second of a step, and GiB at its peak."""
    step = our_step(decoder, batch_for(decoder), SEQUENCES * LENGTH, free)
    peak = memory(step)
    return SEQUENCES * LENGTH / best(step)[0], peak


def serve(decoder: LanguageModel, rounds: int = 2) -> tuple[list[tuple[float, float]], float]:
    """Tokens a second with prompts and seconds of a decode step, by streams; and seconds to publish an adapter."""
    engine = CudaEngine(decoder, CACHE_GIB)
    publishing = engine.load_adapter()
    return [engine.run(streams, slots=(1,), rounds=rounds) for streams in STREAMS], publishing


def show(title: str, rows: list[tuple[object, ...]], head: tuple[str, ...]) -> None:
    table(f"{title} ({machine()})", head, rows)
    sys.stdout.flush()


SPEED = ("", *(f"tokens/s, {streams} at once" for streams in STREAMS), *(f"ms a step, {n}" for n in STREAMS))


def speed_row(name: str, found: list[tuple[float, float]]) -> tuple[object, ...]:
    return (name, *(f"{rate:.0f}" for rate, _ in found), *(f"{1e3 * step:.2f}" for _, step in found))


def qwen3_4b() -> None:
    """Our decoder against Transformers' code around our attention: the same shape."""
    shape = small(QWEN3_4B)
    ours = own(shape)
    served, _ = serve(ours)
    trained, _ = train(ours)
    del ours
    general = by_transformers(qwen3_config(shape))
    trained_there, _ = train(general)
    served_there, _ = serve(general)
    rows = [speed_row("our decoder", served), speed_row("Transformers' code", served_there)]
    show("Qwen3-4B, sampling", rows, SPEED)
    ratios = [there[0] / here[0] for here, there in zip(served, served_there, strict=True)]
    rows = [(f"sampling, {n} at once", f"{r:.2f}", verdict(r, 0.5)) for n, r in zip(STREAMS, ratios, strict=True)]
    ratio = trained_there / trained
    rows.append((f"training, {trained_there:.0f} / {trained:.0f} tokens/s", f"{ratio:.2f}", verdict(ratio, 0.6)))
    show("Qwen3-4B, Transformers' code as a share of our decoder", rows, ("", "share", "target"))


def family(name: str, config: Callable[[], Any]) -> None:
    """Serve, step and publish beside `generate` and plain PEFT on the same weights."""
    decoder = by_transformers(config())
    found, publishing = serve(decoder, rounds=1)
    show(f"{name}, serving with our scheduler", [speed_row("ours", found)], SPEED)
    rate, peak = train(decoder)
    size = decoder.weight_bytes / GIB
    rows: list[tuple[object, ...]] = [("ours", f"{rate:.0f}", f"{peak:.1f}", f"{size:.1f}", f"{publishing:.2f}")]
    show(f"{name}, a step", rows, ("", "tokens/s", "GiB at the peak", "GiB of weights", "s to publish"))
    model = plain_model(decoder, config())
    rows = []
    for streams in STREAMS:
        prompts = [random_prompt(CUDA_PROMPT, decoder.shape.vocab) for _ in range(streams)]
        seconds = timed(lambda prompts=prompts: generate(model, prompts, CUDA_TOKENS))  # type: ignore[misc]
        rows.append((f"generate, {streams} at once", f"{streams * CUDA_TOKENS / seconds:.0f}"))
    step = peft_step(model, batch_for(decoder), sorted({module.target for module in decoder.shape.adaptable}))
    peak = memory(step)
    rows.append((f"plain PEFT, a step, {peak:.1f} GiB at the peak", f"{SEQUENCES * LENGTH / timed(step):.0f}"))
    show(f"{name}, Transformers and PEFT", rows, ("", "tokens/s"))


def narrow(name: str, shape: Shape, bits: int = 4) -> None:
    """Weights of 4 bits against those of bfloat16: memory of a step of 4,096 tokens, and speed."""
    decoder = own(small(shape), bits)
    weights = decoder.weight_bytes
    free = int(MOST[name] * GIB - weights - GIB)
    limited, most = train(decoder, free)
    whole, most_whole = train(decoder)
    wide = own(small(shape))
    trained, peak = train(wide)
    peak -= weights / GIB
    served, _ = serve(wide)
    del wide
    served_narrow, _ = serve(decoder)
    head = ("", "GiB of weights", "GiB at the peak", "tokens/s of a step", "share of bfloat16", "target")
    rows: list[tuple[object, ...]] = [("bfloat16", "", f"{peak:.1f}", f"{trained:.0f}", "", "")]
    for label, rate, top in ((f"4 bits, in {MOST[name]} GiB", limited, most), ("4 bits", whole, most_whole)):
        targets = f"{verdict(rate / trained, 0.5)}; {verdict(top, MOST[name], at_least=False)} GiB"
        rows.append((label, f"{weights / GIB:.1f}", f"{top:.1f}", f"{rate:.0f}", f"{rate / trained:.2f}", targets))
    show(f"{name}, training", rows, head)
    show(f"{name}, sampling", [speed_row("bfloat16", served), speed_row("4 bits", served_narrow)], SPEED)
    ratios = [b[0] / a[0] for a, b in zip(served, served_narrow, strict=True)]
    targets = [(f"{n} at once", f"{r:.2f}", verdict(r, 0.7)) for n, r in zip(STREAMS, ratios, strict=True)]
    show(f"{name}, sampling in 4 bits as a share of bfloat16", targets, ("", "share", "target"))


def kernels() -> None:
    """Products with few rows: our kernel in several tiles, decoding with cuBLAS, bfloat16, and bitsandbytes."""
    outputs, inputs = sized((12288, 4096), (64, 128))
    weights = [torch.randn(outputs, inputs, device=DEVICE, dtype=DTYPE) for _ in range(sized(8, 1))]
    coded = [encode(weight, 4) for weight in weights]
    rows: list[tuple[object, ...]] = []
    for count in sized((1, 4, 16, 64), (1,)):
        x = torch.randn(count, inputs, device=DEVICE, dtype=DTYPE)
        ways: dict[str, Callable[[int], object]] = {"bfloat16": lambda i, x=x: x @ weights[i].t()}  # type: ignore[misc]
        ways["decoded, then cuBLAS"] = lambda i, x=x: x @ decode(*coded[i], DTYPE).t()  # type: ignore[misc]
        if DEVICE.type == "cuda":
            ways |= tiles(x, coded) | bitsandbytes(x, weights)
        for way, product in ways.items():
            try:
                rows.append((count, way, f"{microseconds(product, len(weights)):.1f}"))
            except Exception as error:  # noqa: BLE001 - a tile that does not fit says so
                rows.append((count, way, str(error)[:60]))
    show(f"A product [{outputs}, {inputs}] in 4 bits", rows, ("rows", "way", "µs"))


def tiles(x: torch.Tensor, coded: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, Callable[[int], object]]:
    from openclaw_rl.engines.local.model.quantised_kernels import TILE, DecodedTile, product

    some = [(16, 2, 4, 4), (16, 4, 4, 3), (16, 4, 8, 4), (32, 2, 4, 4), (32, 4, 4, 4), (64, 1, 4, 4), (64, 2, 8, 4)]
    return {
        f"kernel {tuple(tile)}{' (chosen)' if tile == TILE else ''}": lambda i, tile=tile: product(
            x, *coded[i], None, tile
        )  # type: ignore[misc]
        for tile in (TILE, *(DecodedTile(*sizes) for sizes in some))
    }


def bitsandbytes(x: torch.Tensor, weights: list[torch.Tensor]) -> dict[str, Callable[[int], object]]:
    try:
        import bitsandbytes as library
        from bitsandbytes.functional import quantize_4bit
    except ImportError:
        return {}
    stored = [quantize_4bit(weight, quant_type="nf4", blocksize=64) for weight in weights]
    return {"bitsandbytes": lambda i: library.matmul_4bit(x, stored[i][0].t(), stored[i][1])}


def microseconds(product: Callable[[int], object], weights: int) -> float:
    """Of one product; weights take turns, so that none is in the cache of the device."""
    for i in range(weights):
        product(i)
    rounds = sized(10, 1)
    seconds = timed(lambda: [product(i) for _ in range(rounds) for i in range(weights)])
    return 1e6 * seconds / rounds / weights


PARTS: dict[str, Callable[[], None]] = {
    "qwen3-4b": qwen3_4b,
    "4-bits-8b": lambda: narrow("Qwen3-8B", QWEN3_8B),
    "4-bits-4b": lambda: narrow("Qwen3-4B", QWEN3_4B),
    "gemma-3-4b": lambda: family("Gemma-3-4B", gemma_3_4b),
    "gpt-oss-20b": lambda: family("gpt-oss-20B", gpt_oss_20b),
    "qwen3-30b-a3b": lambda: family("Qwen3-30B-A3B", qwen3_30b_a3b),
    "kernels": kernels,
}


def main() -> None:
    if names := sys.argv[1:]:
        for name in names:
            PARTS[name]()
        return
    for name in PARTS:
        start = time.perf_counter()
        try:
            code = subprocess.run([sys.executable, __file__, name], check=False, timeout=LIMIT).returncode
        except subprocess.TimeoutExpired:
            code = -1
        ended = "is done" if code == 0 else f"took more than {LIMIT} s" if code < 0 else f"FAILED ({code})"
        print(f"\n=== {name} {ended}, {time.perf_counter() - start:.0f} s ===", flush=True)


if __name__ == "__main__":
    main()
