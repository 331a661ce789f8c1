"""Measures the learner's gradients against a plain PEFT loop: full logits, one forward pass per sample.

    python benchmarks/learning.py                 the embedded model on the CPU, float32
    python benchmarks/learning.py --device cuda   random weights at the shapes of Qwen3-0.6B and Qwen3-4B, bf16
    python benchmarks/learning.py --device cuda --all-weights     only steps that train all weights

Both sides train LoRA of rank 16 on all linear layers with AdamW. Times are the best of three after a warm-up; on the
CPU the two sides alternate. Memory is the peak of a step above the memory before it, with each side in its own process.
Run it on an otherwise idle machine.
"""

import dataclasses
import gc
import json
import random
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

import torch
from common import argument_parser, machine, model_folder, sized, table, verdict
from measuring import Step, best, matmul_rate, peak, timed
from ranks import options
from shapes import SHAPES, random_decoder, transformers_model

from openclaw_rl.engines.local.model.decoder import PROJECTIONS, Decoder, Shape, load_decoder
from openclaw_rl.engines.local.model.language_model import LanguageModel
from openclaw_rl.engines.local.training.lora import LoraWeights
from openclaw_rl.engines.local.training.policy_trainer import PolicyTrainer
from openclaw_rl.engines.local.training.trainer import Trainer
from openclaw_rl.losses.policy import PolicyLoss
from openclaw_rl.types import Span, TrainingSequence

RANK, ALPHA = 16, 32
LOSS = PolicyLoss()
SAMPLES, PROMPT, RESPONSE = sized((8, 512, 64), (2, 16, 8))
#: A turn of a session adds this many tokens, the last of which are its response.
TURN = sized(400, 16)
SESSION_TURNS = sized(16, 2)
SESSION_LENGTHS = sized((1, 2, 4, 8, 16, 32), (1, 2))
#: A few layers are enough, because all layers cost the same; the whole embedded model would take minutes.
SESSION_LAYERS = 2
#: The head is computed for the responses of both sides alike, so that few layers would show less than the whole model.
SIBLING_LAYERS = sized(6, 2)
SIBLINGS, SIBLING_PROMPT = sized((8, 2000), (3, 80))
CPU_MICRO_BATCH = 1024
PEFT, OURS, LIMITED = "plain PEFT", "ours", "ours, in half of PEFT's memory"
#: Bytes for activations in the limited step, at the shape of Qwen3-4B: a little less than half of what plain PEFT took.
LIMIT = 2_700_000_000
GIB = 1 << 30
#: Bytes in which all activations fit.
PLENTY = 1024 * GIB


def sequence(length: int, vocabulary: int, stops: Iterable[int], response: int = RESPONSE) -> TrainingSequence:
    """Random tokens with a response before each of `stops`."""
    spans = [Span(0, stop - response, stop, [-10.0] * response, [1.0] * response) for stop in stops]
    return TrainingSequence([random.randrange(100, vocabulary) for _ in range(length)], spans)


def samples(vocabulary: int) -> list[TrainingSequence]:
    return [sequence(PROMPT + RESPONSE, vocabulary, [PROMPT + RESPONSE]) for _ in range(SAMPLES)]


def session(turns: int, vocabulary: int) -> TrainingSequence:
    return sequence(turns * TURN, vocabulary, range(TURN, turns * TURN + 1, TURN))


def apart(whole: TrainingSequence) -> list[TrainingSequence]:
    """Every turn of a session as a separate sample."""
    return [TrainingSequence(whole.ids[: span.stop], [span]) for span in whole.spans]


def siblings(vocabulary: int) -> list[TrainingSequence]:
    """Attempts at one prompt."""
    length = SIBLING_PROMPT + RESPONSE
    first, *others = (sequence(length, vocabulary, [length]) for _ in range(SIBLINGS))
    prompt = first.ids[:SIBLING_PROMPT]
    return [first, *(TrainingSequence([*prompt, *one.ids[SIBLING_PROMPT:]], one.spans) for one in others)]


def our_step(
    decoder: LanguageModel,
    batch: list[TrainingSequence],
    micro_batch_tokens: int | None,
    free: int = PLENTY,
    separately: bool = False,
) -> Step:
    """`free` limits the activations in bytes. With `separately` each sequence has a pass of its own."""
    lora = LoraWeights.create(decoder.shape, RANK, ALPHA, device=decoder.embed.device)
    trainer = Trainer(decoder, lora, LOSS, micro_batch_tokens, free=lambda _: free)
    optimiser = torch.optim.AdamW(lora.parameters())

    def step() -> None:
        for part in [[one] for one in batch] if separately else [batch]:
            trainer.forward_backward(part)
        optimiser.step()
        optimiser.zero_grad()

    return step


def peft_step(model: Any, batch: list[TrainingSequence], modules: str | list[str] = "all-linear") -> Step:
    from peft import LoraConfig, get_peft_model

    policy = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=modules))
    optimiser = torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad])

    def step() -> None:
        for one in batch:
            (span,) = one.spans
            ids = torch.tensor([one.ids], device=policy.device)
            logprobs = policy(ids).logits[0, :-1].float().log_softmax(-1).gather(1, ids[0, 1:, None]).squeeze(1)
            columns = (torch.tensor(c, device=policy.device) for c in (span.old_logprobs, span.advantages))
            loss = LOSS.per_token(logprobs[span.start - 1 : span.stop - 1], *columns).loss.mean() / len(batch)
            loss.backward()
        optimiser.step()
        optimiser.zero_grad()

    return step


def peft_model(device: str, shape: Shape | None) -> Any:
    from transformers import AutoModelForCausalLM

    if shape is None:
        return AutoModelForCausalLM.from_pretrained(model_folder(), dtype=torch.float32)
    return transformers_model(shape, device)


def our_decoder(device: str, shape: Shape | None) -> Decoder:
    if shape is None:
        return load_decoder(model_folder(), torch.float32, torch.device(device))
    return random_decoder(shape, torch.bfloat16, torch.device(device))


def make_step(side: str, device: str, shape: Shape | None) -> Step:
    """The step on 8 samples, for one side."""
    random.seed(0)
    if side == PEFT:
        model = peft_model(device, shape)
        return peft_step(model, samples(model.config.vocab_size))
    decoder = our_decoder(device, shape)
    micro_batch_tokens = CPU_MICRO_BATCH if device == "cpu" else None
    free = LIMIT if side == LIMITED else PLENTY
    return our_step(decoder, samples(decoder.shape.vocab), micro_batch_tokens, free)


def in_own_process(side: str, device: str, name: str) -> dict[str, float]:
    """Run `measure` in a new process."""
    command = [sys.executable, __file__, "--device", device, "--measure", side, name]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(result.stdout.splitlines()[-1])
    return found


def measure(side: str, device: str, name: str) -> None:
    step = make_step(side, device, SHAPES.get(name))
    memory = peak(step, device)
    # On CUDA, two models in memory would disturb the measurement, and speed does not vary over time.
    seconds = best(step)[0] if device == "cuda" else 0.0
    print(json.dumps({"memory": memory, "seconds": seconds}))


def show_step(title: str, found: dict[str, tuple[float, float]], bounds: tuple[float, float]) -> None:
    """(seconds, bytes) of each side and of PEFT."""
    base_seconds, base_memory = found[PEFT]
    rows: list[tuple[object, ...]] = []
    for side, (seconds, memory) in found.items():
        faster, share = base_seconds / seconds, memory / base_memory
        speed = (f"{seconds:.3g}", f"{faster:.2f}", "" if side == PEFT else verdict(faster, bounds[0]))
        size = (f"{memory / GIB:.2f}", f"{share:.2f}", "" if side == PEFT else verdict(share, bounds[1], False))
        rows.append((side, *speed, *size))
    head = (
        f"{SAMPLES} × ({PROMPT} + {RESPONSE}) tokens",
        "seconds",
        "times faster",
        "target",
        "GiB above weights",
        "ratio",
        "target",
    )
    table(title, head, rows)


def show_sessions(title: str, decoder: Decoder, micro_batch_tokens: int | None = None) -> None:
    """A session as one sequence, compared with its turns as separate sequences and with sessions of other lengths."""
    vocabulary = decoder.shape.vocab
    whole = session(SESSION_TURNS, vocabulary)
    separate = our_step(decoder, apart(whole), micro_batch_tokens, separately=True)
    together = our_step(decoder, [whole], micro_batch_tokens)
    seconds = best(separate, together)
    ratio = seconds[0] / seconds[1]
    rows: list[tuple[object, ...]] = []
    for turns in SESSION_LENGTHS:
        (own,) = best(our_step(decoder, [session(turns, vocabulary)], micro_batch_tokens))
        rows.append((turns, turns * TURN, f"{own:.3f}", f"{1e3 * own / turns:.1f}", ""))
    table(title, ("turns", "tokens", "seconds", "ms a turn", ""), rows)
    print(f"  {SESSION_TURNS} turns apart {seconds[0]:.3g} s, as one sequence {seconds[1]:.3g} s: ", end="")
    print(f"{ratio:.1f} × faster, {verdict(ratio, 5)}")


def show_siblings(device: str, shape: Shape | None = None) -> None:
    """Attempts at one prompt in a pass that reads the prompt once, compared with a pass for each."""
    decoder = our_decoder(device, shape)
    if device == "cpu":
        decoder = first_layers(decoder, SIBLING_LAYERS)
    random.seed(0)
    batch = siblings(decoder.shape.vocab)
    steps = [our_step(decoder, batch, None, separately=separately) for separately in (True, False)]
    alone, together = best(*steps)
    size = f"{SIBLINGS} × ({SIBLING_PROMPT} + {RESPONSE}) tokens"
    row = (size, f"{alone:.3g}", f"{together:.3g}", f"{alone / together:.1f}", verdict(alone / together, 3))
    head = ("attempts at one prompt", "seconds apart", "seconds together", "times faster", "target")
    title = f"Siblings of a group, {decoder.shape.layers} layers of hidden size {decoder.shape.hidden}, {device}"
    table(title, head, [row])


def first_layers(decoder: Decoder, count: int) -> Decoder:
    shape = dataclasses.replace(decoder.shape, layers=count, rotary_layers=decoder.shape.rotary_layers[:count])
    return dataclasses.replace(decoder, shape=shape, layers=decoder.layers[:count])


def on_cpu() -> None:
    sides = (PEFT, OURS)
    memory = [in_own_process(side, "cpu", "embedded")["memory"] for side in sides]
    seconds = best(*(make_step(side, "cpu", None) for side in sides))
    found = dict(zip(sides, zip(seconds, memory, strict=True), strict=True))
    show_step(f"One step, embedded model, fp32 ({machine()})", found, (1.3, 0.6))
    decoder = first_layers(our_decoder("cpu", None), SESSION_LAYERS)
    show_sessions(f"Sessions, {SESSION_LAYERS} layers of the embedded model", decoder, CPU_MICRO_BATCH)
    show_siblings("cpu")


# --- CUDA ------------------------------------------------------------------------------------------------

STEP_SEQUENCES, STEP_LENGTH, STEP_RESPONSE = 16, 1024, 128


def step_flops(shape: Shape) -> float:
    """The least FLOPs of a step's gradients: one pass forward and backward, and the head for the response rows."""
    tokens, rows = STEP_SEQUENCES * STEP_LENGTH, STEP_SEQUENCES * STEP_RESPONSE
    weights = shape.layers * sum(a * b for a, b in map(shape.projection_sizes, PROJECTIONS))
    attention = shape.layers * 2 * STEP_LENGTH * shape.q_size
    # Attention has two products in the forward pass and five in the backward pass.
    return tokens * (4 * weights + 3.5 * attention) + rows * 4 * shape.vocab * shape.hidden


def step_batch(shape: Shape) -> list[TrainingSequence]:
    random.seed(0)
    return [sequence(STEP_LENGTH, shape.vocab, [STEP_LENGTH], STEP_RESPONSE) for _ in range(STEP_SEQUENCES)]


def all_weights(name: str) -> None:
    """Tokens per second of a 16k-token step that trains all weights, and its whole memory."""
    policy = PolicyTrainer(our_decoder("cuda", SHAPES[name]), options(0, "cuda"))
    batch, times = step_batch(SHAPES[name]), []

    def step() -> None:
        times.append(timed(lambda: policy.forward_backward(batch)))
        times.append(timed(policy.optim_step))

    first = timed(step)
    (seconds,) = best(step)
    row = (f"{seconds:.3f}", f"{min(times[0::2]):.3f}", f"{min(times[1::2]):.3f}")
    memory = f"{torch.cuda.max_memory_reserved() / GIB:.1f}"
    rows = [(name, *row, f"{STEP_SEQUENCES * STEP_LENGTH / seconds:.0f}", memory, f"{first:.1f}")]
    head = ("all weights", "step s", "gradients", "update", "tok/s", "GiB, weights included", "first step s")
    table(f"16 × 1,024 tokens, micro-batches of 4,096, random {name} shape, bf16 with float32 masters", head, rows)


def throughput(name: str, decoder: Decoder) -> None:
    """Tokens per second of a 16k-token step, and its whole memory."""
    shape = decoder.shape
    batch = step_batch(shape)
    rows: list[tuple[object, ...]] = []
    rate = matmul_rate()
    gc.collect()
    torch.cuda.empty_cache()
    bounds = {"Qwen3-4B": (32000, 23), "Qwen3-0.6B": (80000, 8)}[name]
    for micro_batch_tokens in (None, 4096, 6144, 8192):
        torch.cuda.reset_peak_memory_stats()
        first = timed(step := our_step(decoder, batch, micro_batch_tokens))
        (seconds,) = best(step)
        memory = torch.cuda.max_memory_reserved() / GIB
        speed = STEP_SEQUENCES * STEP_LENGTH / seconds
        use = step_flops(shape) / seconds / rate
        row = (
            f"{speed:.0f}",
            verdict(speed, bounds[0]),
            f"{memory:.1f}",
            verdict(memory, bounds[1], False),
            f"{use:.0%}",
        )
        rows.append((micro_batch_tokens or "default", *row, f"{first:.1f}"))
        del step
        gc.collect()
        torch.cuda.empty_cache()
    head = (
        "micro-batch",
        "tok/s",
        "target",
        "GiB, weights included",
        "target",
        "of a large matmul's rate",
        "first step s",
    )
    table(f"16 × 1,024 tokens, {STEP_RESPONSE} of each a response, random {name} shape, bf16", head, rows)
    print(f"  a large matmul runs at {rate / 1e12:.0f} TFLOP/s")


def on_cuda() -> None:
    found = {side: in_own_process(side, "cuda", "Qwen3-4B") for side in (PEFT, OURS, LIMITED)}
    columns = {side: (own["seconds"], own["memory"]) for side, own in found.items()}
    show_step("One step, random Qwen3-4B shape, bf16", columns, (8, 1.0))
    for name in SHAPES:
        decoder = our_decoder("cuda", SHAPES[name])
        throughput(name, decoder)
        # Shapes are compiled into the kernels.
        torch.compiler.reset()
    show_sessions("Sessions, random Qwen3-4B shape", decoder)
    for shape in SHAPES.values():
        show_siblings("cuda", shape)
        torch.compiler.reset()


if __name__ == "__main__":
    parser = argument_parser(__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where (default: cpu)")
    parser.add_argument("--measure", nargs=2, metavar=("SIDE", "SHAPE"), help="one side's step, as JSON")
    parser.add_argument("--all-weights", action="store_true", help="only steps that train all weights; needs a GPU")
    args = parser.parse_args()
    if args.all_weights:
        for shape_name in SHAPES:
            all_weights(shape_name)
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    elif args.measure:
        measure(args.measure[0], args.device, args.measure[1])
    elif args.device == "cpu":
        on_cpu()
    else:
        on_cuda()
