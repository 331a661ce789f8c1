"""Measures models of other families and weights of 4 and 8 bits, with random weights at real shapes, on one GPU.

    python benchmarks/families.py [--most SECONDS] [PART …]     all parts, within four minutes

A row is printed when it is measured. Each part has its own process, which ends with the time. Sampling is 512-token
prompts and 64 tokens each, with an adapter. A step has 4,096 tokens in four sequences. Plain PEFT needs `peft`.
"""

import argparse
import gc
import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch
from common import SMOKE, argument_parser, machine, sized, verdict
from cuda_engine import CUDA_PROMPT, CUDA_TOKENS, CudaEngine, random_prompt
from learning import GIB, PLENTY, our_step, peft_step, sequence
from measuring import best, timed, wait
from sampling import generate
from shapes import QWEN3_4B, QWEN3_8B, qwen3_config, random_decoder

from openclaw_rl.engines.local.model.decoder import PROJECTIONS, Decoder, Shape
from openclaw_rl.engines.local.model.language_model import LanguageModel
from openclaw_rl.engines.local.model.linear import quantised
from openclaw_rl.engines.local.model.transformers_decoder import (
    TransformersDecoder,
    decoder_of,
    experts_for,
    new_model,
    put,
)

T = TypeVar("T")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
SEQUENCES, LENGTH, RESPONSE = sized((4, 1024, 128), (2, 24, 8))
STREAMS = sized((1, 16), (1, 2))
CACHE_GIB = sized(4.0, 0.05)
#: The longest time of all parts, in seconds.
MOST_SECONDS = sized(240, 280)
#: What a step of 4,096 tokens may take with weights of 4 bits, in GiB of the whole process.
MOST_GIB = {"Qwen3-8B": 10, "Qwen3-4B": 6}
#: So much may be left in memory between two models, in GiB, without a word about it.
LEFT_GIB = 0.1
OURS, BY_TRANSFORMERS, STEP = "bf16", "Transformers' code", "a step"
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


class Rows:
    """The rows of a part, each printed when it is measured."""

    def __init__(self, title: str) -> None:
        self.rates: dict[tuple[str, str], float] = {}
        self.failed = 0
        print(f"\n{title} ({machine()})\n  {'-' * 60}", flush=True)

    def attempt(self, side: str, what: str, work: Callable[[], T]) -> T | None:
        """The result; None if it failed, which has a row."""
        try:
            return work()
        except Exception as error:  # noqa: BLE001 - the other rows can still be measured
            self.failed += 1
            reason = " ".join(str(error).split())[:300]
            print(f"  {side:20} {what:22} FAILED: {type(error).__name__}: {reason}", flush=True)
            return None

    def tell(self, side: str, what: str, words: str) -> None:
        print(f"  {side:20} {what:22} {words}", flush=True)

    def add(
        self, side: str, what: str, work: Callable[[], tuple[float, str]], of: str = "", least: float = 0.0
    ) -> None:
        """A row with tokens a second, perhaps as a share of those of another side, which should be `least`."""
        found = self.attempt(side, what, work)
        if found is None:
            return
        rate, more = found
        self.rates[side, what] = rate
        words = [f"{rate:.0f} tokens/s", more]
        if base := self.rates.get((of, what)):
            words += [f"{rate / base:.2f} × {of}", verdict(rate / base, least) if least else ""]
        self.tell(side, what, "; ".join(filter(None, words)))


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
    real |= {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131072}
    experts = sized({"num_local_experts": 32}, {"num_local_experts": 4})
    return GptOssConfig(**sized(real, SMALL), **experts, num_experts_per_tok=sized(4, 2))


def by_transformers(config: Any) -> TransformersDecoder:
    """Random weights of a family that Transformers' code computes."""
    with torch.device(DEVICE):
        return decoder_of(new_model(config, DTYPE))


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


def allocated() -> float:
    """GiB that PyTorch has allocated, after everything that is not used any more is gone."""
    gc.collect()
    if DEVICE.type != "cuda":
        return 0.0
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated() / GIB


def peak_of(work: Callable[[], object], before: float) -> float:
    """GiB at the peak of some work, above those `before` the model was made."""
    allocated()
    if DEVICE.type != "cuda":
        work()
        return 0.0
    torch.cuda.reset_peak_memory_stats()
    work()
    wait()
    return torch.cuda.max_memory_allocated() / GIB - before


def trained(step: Callable[[], object], before: float, most: float = 0.0) -> tuple[float, str]:
    """Tokens a second of a step, and its memory, which should be at most so many GiB."""
    peak = peak_of(step, before)
    target = f", {verdict(peak, most, at_least=False)}" if most else ""
    return SEQUENCES * LENGTH / best(step)[0], f"{peak:.1f} GiB at the peak{target}"


def measure(
    rows: Rows,
    side: str,
    make: Callable[[], LanguageModel],
    of: str = "",
    targets: tuple[float, float] = (0.0, 0.0),
    most: float = 0.0,
) -> LanguageModel | None:
    """A step, publishing and sampling. `targets`: the least shares of sampling and training. `most`: GiB of a step."""
    before = allocated()
    if before > LEFT_GIB:
        rows.tell(side, "", f"{before:.1f} GiB are left of what was measured before; they are not counted")
    decoder = rows.attempt(side, "random weights", make)
    if decoder is None:
        return None
    sampling, training = targets
    weights = decoder.weight_bytes
    rows.tell(side, "random weights", f"{weights / GIB:.1f} GiB")
    batch = batch_for(decoder)

    def train(free: int, limit: float = 0.0) -> tuple[float, str]:
        return trained(our_step(decoder, batch, SEQUENCES * LENGTH, free), before, limit)

    rows.add(side, STEP, lambda: train(PLENTY), of, training)
    if most:
        rows.add(side, f"{STEP} in {most:g} GiB", lambda: train(int((most - 1) * GIB - weights), most))
        # The share is that of a step in any memory.
        rate, whole = rows.rates.get((side, f"{STEP} in {most:g} GiB")), rows.rates.get((of, STEP))
        if rate and whole:
            rows.tell(side, f"{STEP} in {most:g} GiB", f"{rate / whole:.2f} × {of}; {verdict(rate / whole, training)}")
    engine = rows.attempt(
        side, "the sampler's start", lambda: CudaEngine(decoder, CACHE_GIB, max_sequences=STREAMS[-1])
    )
    if engine is None:
        return decoder
    runs_ahead = engine.worker.run_ahead
    publishing = rows.attempt(side, "publish", engine.load_adapter)
    if publishing is not None:
        rows.tell(side, "publish", f"{publishing:.2f} s; the sampler's start took {engine.warm_up:.1f} s")
    for streams in STREAMS:

        def sample(streams: int = streams) -> tuple[float, str]:
            rate, step = engine.run(streams, slots=(1,), run_ahead=runs_ahead, rounds=2)
            return rate, f"{1e3 * step:.2f} ms a step"

        rows.add(side, f"sampling, {streams} at once", sample, of, sampling)
    return decoder


def qwen3(name: str, shape: Shape, general: bool) -> Rows:
    """Our decoder with weights of 16, 4 and 8 bits; and Transformers' code around our attention at the same shape."""
    rows = Rows(f"{name}: our decoder")
    shape = small(shape)
    measure(rows, OURS, lambda: own(shape))
    measure(rows, "4 bits", lambda: own(shape, 4), OURS, (0.7, 0.5), MOST_GIB[name])
    if general:
        measure(rows, BY_TRANSFORMERS, lambda: by_transformers(qwen3_config(shape)), OURS, (0.5, 0.6))
    measure(rows, "8 bits", lambda: own(shape, 8), OURS, (0.7, 0.5))
    return rows


def family(name: str, config: Callable[[], Any]) -> Rows:
    """Serve, step and publish beside `generate` and plain PEFT on the same weights."""
    rows = Rows(f"{name}: Transformers' code with our attention")
    before = allocated()
    decoder = measure(rows, "ours", lambda: by_transformers(config()))
    if not isinstance(decoder, TransformersDecoder):
        return rows
    model = rows.attempt("generate", "plain model", lambda: plain_model(decoder, config()))
    if model is None:
        return rows
    rows.attempt("generate", "warm-up", lambda: generate(model, [random_prompt(CUDA_PROMPT, decoder.shape.vocab)], 4))
    for streams in STREAMS:
        prompts = [random_prompt(CUDA_PROMPT, decoder.shape.vocab) for _ in range(streams)]

        def sample(prompts: list[list[int]] = prompts) -> tuple[float, str]:
            return len(prompts) * CUDA_TOKENS / timed(lambda: generate(model, prompts, CUDA_TOKENS)), ""

        rows.add("generate", f"sampling, {streams} at once", sample, "ours")
    modules = sorted({module.target for module in decoder.shape.adaptable})
    step = rows.attempt("plain PEFT", "adapter", lambda: peft_step(model, batch_for(decoder), modules))
    if step is not None:
        rows.add("plain PEFT", STEP, lambda: trained(step, before), "ours")
    return rows


PARTS: dict[str, Callable[[], Rows]] = {
    "qwen3-4b": lambda: qwen3("Qwen3-4B", QWEN3_4B, general=True),
    "gemma-3-4b": lambda: family("Gemma-3-4B", gemma_3_4b),
    "gpt-oss-20b": lambda: family("gpt-oss-20B", gpt_oss_20b),
    "qwen3-8b": lambda: qwen3("Qwen3-8B", QWEN3_8B, general=False),
    "qwen3-30b-a3b": lambda: family("Qwen3-30B-A3B", qwen3_30b_a3b),
}


class Part:
    """A process that has imported everything, and measures a part when it is told to."""

    def __init__(self, name: str) -> None:
        self.name = name
        command = [sys.executable, __file__, "--now", name]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)

    def run(self, seconds: float) -> bool:
        """Whether it came to its end within this time, without a row that failed."""
        start = time.perf_counter()
        try:
            self.process.communicate("go\n", timeout=max(seconds, 0.0))
            ended = "is done" if self.process.returncode == 0 else f"FAILED (exit status {self.process.returncode})"
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()
            ended = "was ended: the time is over"
        print(f"=== {self.name} {ended}, {time.perf_counter() - start:.0f} s ===", flush=True)
        return self.process.returncode == 0


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], metavar="PART", help="which parts, in this order")
    parser.add_argument("--most", type=float, default=MOST_SECONDS, help="seconds for all parts together")
    parser.add_argument("--now", choices=PARTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.now:
        sys.stdin.readline()
        return min(1, PARTS[options.now]().failed)
    end = time.perf_counter() + options.most
    names = options.parts or list(PARTS)
    following: Part | None = Part(names[0])
    well = True
    for after in [*names[1:], None]:
        part = following
        assert part is not None
        # Importing takes seconds, so the next process does it meanwhile.
        following = Part(after) if after else None
        well = part.run(end - time.perf_counter()) and well
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
