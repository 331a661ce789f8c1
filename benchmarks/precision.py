"""Weights in bfloat16 on this machine's CPU: what their products gain, what `--dtype auto` chooses, and what it costs.

    python benchmarks/precision.py

The second table compares the log-probs that a sampler drew with those of a learner, for each pair of precisions, and
for a sampler in float32 with a packed copy of the weights in float16 (`--pack-weights half`), where there is one. Where
products in bfloat16 have no fast version, they are computed in float32 from rounded numbers and rounded afterwards,
which is the same up to the order of sums.
"""

import statistics

import torch
import torch.nn.functional as F
from common import machine, model_folder, percentile, sized, table, verdict
from torch import Tensor

from openclaw_rl.engines.local.model.cpu_precision import (
    HOPELESS,
    LEAST_SPEEDUP,
    MAX_ERROR,
    Measurement,
    choice_of,
    measure,
)
from openclaw_rl.engines.local.model.decoder import Decoder, load_decoder
from openclaw_rl.engines.local.model.packed import has_half_products
from openclaw_rl.engines.local.model.placement import weight_bytes
from openclaw_rl.engines.local.process.sampler_worker import Worker
from openclaw_rl.engines.local.process.worker_messages import Add, WorkerOptions
from openclaw_rl.engines.local.training.lora import LoraWeights
from openclaw_rl.engines.local.training.trainer import Trainer
from openclaw_rl.learn.reporting import MAX_MEAN_GAP
from openclaw_rl.losses.policy import PolicyLoss
from openclaw_rl.rendering.chat import ChatRenderer
from openclaw_rl.types import SampledToken, SampleRequest, SamplingParams, Span, TrainingSequence

QUESTIONS = sized(
    (
        "Write a short story about a lighthouse.",
        "Explain how photosynthesis works.",
        "Give me a recipe for tomato soup.",
        "What is the capital of France, and why is it famous?",
    ),
    ("Hello!",),
)
TOKENS = sized(64, 3)
DTYPES = ("float32", "bfloat16")
MAX_WEIGHT_SHARE = 0.6

plain_linear = F.linear


def rounded_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`; in bfloat16 with float32 arithmetic."""
    if weight.dtype != torch.bfloat16:
        return plain_linear(x, weight, bias)
    return plain_linear(x.float(), weight.float(), None if bias is None else bias.float()).to(torch.bfloat16)


def show_choice(measured: Measurement) -> None:
    rows = [(name, f"{ratio:.2g}", "") for name, ratio in measured.speedups.items()]
    rows.append(("geometric mean", f"{measured.speedup:.2g}", verdict(measured.speedup, LEAST_SPEEDUP)))
    rows.append(("largest error", f"{measured.error:.2g}", verdict(measured.error, MAX_ERROR, at_least=False)))
    head = ("product", "fp32 / bf16, time", "needed for bfloat16")
    table(f"What --dtype auto measures ({machine()}, {torch.get_num_threads()} threads)", head, rows)
    choice = choice_of(measured)
    print(f"  --dtype auto is {choice.dtype} on this CPU: {choice.reason}")


def sample(decoder: Decoder, prompts: list[list[int]], packed: str) -> list[list[SampledToken]]:
    """Answers of a worker to all prompts at once, at temperature 1."""
    options = WorkerOptions(model_folder(), "cpu", "float32", 8, sized(2048, None), 0.2, 2, 4, pack_weights=packed)
    worker = Worker(decoder, options)
    for number, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=TOKENS, temperature=1.0, seed=number)
        worker.obey(Add(number, SampleRequest(prompt, params), 0))
    answers: list[list[SampledToken]] = [[] for _ in prompts]
    while not worker.scheduler.idle:
        for number, tokens in worker.step().tokens.items():
            answers[number] += tokens
    return answers


def gaps(decoder: Decoder, prompts: list[list[int]], answers: list[list[SampledToken]]) -> list[float]:
    """How far a learner's log-probs are from those of the sampled tokens."""
    sequences = []
    for prompt, answer in zip(prompts, answers, strict=True):
        nothing = [0.0] * len(answer)
        span = Span(0, len(prompt), len(prompt) + len(answer), nothing, nothing)
        sequences.append(TrainingSequence([*prompt, *(token.token_id for token in answer)], [span]))
    trainer = Trainer(decoder, LoraWeights.create(decoder.shape, 4, 8.0), PolicyLoss())
    scored = [logprob for spans in trainer.score(sequences) for span in spans for logprob in span]
    sampled = [token.logprob for answer in answers for token in answer]
    return [abs(one - other) for one, other in zip(scored, sampled, strict=True)]


def show_gaps() -> None:
    folder = model_folder()
    renderer = ChatRenderer(folder)
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    prompts = [renderer.prompt(renderer.text(chat)).ids for chat in chats]
    decoders = {dtype: load_decoder(folder, getattr(torch, dtype), torch.device("cpu")) for dtype in DTYPES}
    rows = []
    samplers = [(dtype, decoder, "off") for dtype, decoder in decoders.items()]
    if has_half_products():
        samplers.append(("float32, packed in float16", decoders["float32"], "half"))
    for samples, sampler, packed in samplers:
        answers = sample(sampler, prompts, packed)
        for learns, learner in decoders.items():
            found = gaps(learner, prompts, answers)
            mean = statistics.fmean(found)
            cells = (f"{mean:.2g}", f"{percentile(found, 0.99):.2g}", f"{max(found):.2g}")
            rows.append((samples, learns, *cells, verdict(mean, MAX_MEAN_GAP, at_least=False)))
    head = ("sampler", "learner", "mean", "p99", "most", "a step warns above")
    table(f"Log-probs of sampler and learner ({sum(map(len, answers))} tokens, embedded model)", head, rows)
    wide, narrow = (weight_bytes(decoder) for decoder in decoders.values())
    share = verdict(narrow / wide, MAX_WEIGHT_SHARE, at_least=False)
    sizes = f"{wide / 1e6:.3g} MB in float32, {narrow / 1e6:.3g} MB in bfloat16"
    print(f"  weights: {sizes}, × {narrow / wide:.2f} ({share})")


if __name__ == "__main__":
    products = measure()
    show_choice(products)
    if products.speedup < HOPELESS:
        torch.nn.functional.linear = rounded_linear
    show_gaps()
