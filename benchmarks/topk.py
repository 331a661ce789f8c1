"""Measures top-k distillation against a plain implementation that holds whole distributions, and what hints share.

    python benchmarks/topk.py                 a small shape on the CPU, float32
    python benchmarks/topk.py --device cuda   a vocabulary of 152k, 2,048 response tokens, width 2,560, bf16

Both sides start after the teacher has been asked, and end with the gradient for the policy's hidden states. The plain
side has the teacher's three distributions, which count as its memory, and computes the old policy's. Ours has the few
numbers that a run asks of the teacher, and those that were recorded while sampling. Times are the best of three after a
warm-up. Each side's memory is measured in its own process. Run it on an otherwise idle machine.
"""

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from common import machine, sized, table, verdict
from measuring import Step, best, peak
from torch import Tensor

from openclaw_rl.engines.local.sampling.page_pool import PagePool
from openclaw_rl.engines.local.sampling.scheduler import Scheduler, Scoring, Sequence
from openclaw_rl.engines.local.training.packing import with_alternatives
from openclaw_rl.losses.logprobs import chunked_logprobs
from openclaw_rl.losses.policy import PolicyLoss
from openclaw_rl.methods.options import MethodOptions
from openclaw_rl.methods.topk_select import TopkSelect
from openclaw_rl.types import Hint, SampleKind, SamplingParams, ScoreRequest, TopTokens, Verdict

K, HINTS = 4, 3
METHOD = TopkSelect(MethodOptions(method="topk-select", topk_k=K, topk_max_cand=HINTS, w_rl=0.0))
LOSS = PolicyLoss()
PLAIN, OURS = "whole distributions", "ours"
#: A long conversation, which is shared, then a hint in its last message, then the response.
PROMPT, HINT, RESPONSE = sized(4000, 400), 20, sized(200, 40)


@dataclass(frozen=True)
class Shape:
    vocabulary: int
    tokens: int
    width: int
    dtype: torch.dtype


SHAPES = {
    "cpu": sized(Shape(49_152, 1024, 576, torch.float32), Shape(400, 32, 16, torch.float32)),
    "cuda": Shape(151_936, 2048, 2560, torch.bfloat16),
}


@dataclass(frozen=True)
class Problem:
    """Hidden states and the sampled tokens."""

    head: Tensor
    policy: Tensor
    old: Tensor
    teacher: list[Tensor]
    sampled: list[int]

    @classmethod
    def make(cls, device: str) -> "Problem":
        torch.manual_seed(0)
        shape = SHAPES[device]

        def random(*size: int) -> Tensor:
            return torch.randn(size, dtype=shape.dtype, device=device)

        old = random(shape.tokens, shape.width)
        teacher = [old + 0.3 * random(shape.tokens, shape.width) for _ in range(HINTS)]
        head = random(shape.vocabulary, shape.width) * 0.05
        policy = (old + 0.05 * random(shape.tokens, shape.width)).requires_grad_()
        return cls(head, policy, old, teacher, torch.randint(shape.vocabulary, (shape.tokens,)).tolist())


def whole(hidden: Tensor, head: Tensor) -> Tensor:
    return F.linear(hidden, head).float().log_softmax(-1)


def plain_step(problem: Problem) -> Step:
    """The definition, written with tensors over the vocabulary: sequence_optimal, subset student."""
    with torch.no_grad():
        teacher = torch.stack([whole(hidden, problem.head) for hidden in problem.teacher])

    def step() -> Tensor:
        with torch.no_grad():
            old = whole(problem.old, problem.head)
            ours, theirs = old.topk(K).indices, teacher.topk(K).indices
            overlap = (ours[None, :, :, None] == theirs[:, :, None, :]).any(-1).sum(-1)
            chosen = teacher[overlap.sum(1).argmax()]
            old_of = old.gather(1, ours)
            gaps = (chosen.gather(1, ours) - old_of).clamp(-METHOD.topk.clip, METHOD.topk.clip)
            worth = gaps * old_of.softmax(-1)
        new = whole(problem.policy, problem.head).gather(1, ours)
        ratio = (new - old_of).exp()
        bounded = ratio.clamp(1 - LOSS.eps_clip, 1 + LOSS.eps_clip_high)
        loss = torch.maximum(-worth * ratio, -worth * bounded).sum(1).mean()
        problem.policy.grad = None
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    return step


def our_step(problem: Problem) -> Step:
    """Our implementation: the method chooses from the recorded numbers, and the learner computes the loss."""
    top = recorded(problem)
    model: Any = SimpleNamespace(logits=lambda hidden: F.linear(hidden, problem.head).float())
    device = problem.head.device

    def score(number: int, hidden: Tensor) -> Hint:
        request = ScoreRequest([0, *problem.sampled], len(problem.sampled), top_k=K, targets=top.ids)
        scoring = Scoring(request)
        scoring.read(model, 0, hidden)
        scores = scoring.scores()
        # Hints with the same words would count as one.
        return Hint(f"hint {number}", scores.logprobs, top=scores.top, of_policy_top=scores.targets)

    hints = tuple(score(number, hidden) for number, hidden in enumerate(problem.teacher))
    nothing = [0.0] * len(problem.sampled)

    def step() -> Tensor:
        turn: Any = SimpleNamespace(
            top=top,
            response_ids=problem.sampled,
            logprobs=nothing,
            forced=[],
            sample=SampleKind.OPD,
            verdict=Verdict(hints=hints),
        )
        alternatives = METHOD.lesson(turn).alternatives
        assert alternatives is not None
        ids = with_alternatives([problem.sampled], [alternatives.ids], torch.long, device)
        old = with_alternatives([nothing], [alternatives.old_logprobs], torch.float32, device)
        worth = with_alternatives([nothing], [alternatives.advantages], torch.float32, device)
        new = chunked_logprobs(problem.policy, problem.head, ids)
        loss = LOSS.over_alternatives(new[:, 1:], old[:, 1:], worth[:, 1:]).mean()
        problem.policy.grad = None
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    return step


@torch.no_grad()
def recorded(problem: Problem) -> TopTokens:
    """The old policy's likeliest tokens, as sampling records them."""
    scoring = Scoring(ScoreRequest([0, *problem.sampled], len(problem.sampled), top_k=K))
    scoring.read(SimpleNamespace(logits=lambda h: F.linear(h, problem.head).float()), 0, problem.old)  # type: ignore[arg-type]
    top = scoring.scores().top
    assert top is not None
    return top


STEPS = {PLAIN: plain_step, OURS: our_step}


def memory_of(side: str, device: str) -> int:
    """Peak bytes of one side above the hidden states and the head, in a new process."""
    command = [sys.executable, __file__, "--device", device, "--measure", side]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    return int(json.loads(result.stdout.splitlines()[-1]))


def show_loss(device: str) -> None:
    problem, shape = Problem.make(device), SHAPES[device]
    steps = [make(problem) for make in STEPS.values()]
    losses = [float(step()) for step in steps]  # type: ignore[arg-type]
    assert abs(losses[0] - losses[1]) < 1e-3 * max(1.0, abs(losses[0])), losses
    seconds = best(*steps)
    memory = [memory_of(side, device) for side in STEPS]
    rows: list[list[object]] = []
    for side, time, taken in zip(STEPS, seconds, memory, strict=True):
        faster, part = seconds[0] / time, taken / memory[0]
        bounds = (verdict(faster, 2), verdict(part, 0.25, at_least=False)) if side == OURS else ("", "")
        rows.append([side, f"{time:.3f}", f"{faster:.1f}", bounds[0], f"{taken / 2**30:.2f}", f"{part:.2f}", bounds[1]])
    title = (
        f"Loss and gradient, {shape.tokens} tokens, vocabulary {shape.vocabulary}, k = {K}, {HINTS} hints ({machine()})"
    )
    table(title, ["", "seconds", "times faster", "target", "GiB", "ratio", "target"], rows)


def tokens_read(prompts: list[list[int]]) -> int:
    """How many tokens go through the model for responses scored after these prompts, asked at once."""
    scheduler = Scheduler(PagePool(4096), max_sequences=16, prefill_tokens=512)
    for number, prompt in enumerate(prompts):
        ids = [*prompt, *range(RESPONSE)]
        scoring = Scoring(ScoreRequest(ids, RESPONSE))
        params = SamplingParams(max_tokens=0)
        scheduler.add([Sequence(number, 0, ids[:-1], params, 0, 0, (1, number), scoring)])
    read = 0
    while not scheduler.idle:
        work = scheduler.plan()
        scheduler.commit(work)
        read += sum(item.count for item in work)
        for item in work:
            if item.ends:
                scheduler.finish(item.sequence)
    return read


def show_sharing() -> None:
    conversation = list(range(PROMPT))
    prompts = [[*conversation, *[10_000 + hint] * (HINT + 5 * hint)] for hint in range(HINTS)]
    apart, together = sum(tokens_read([prompt]) for prompt in prompts), tokens_read(prompts)
    ratio = together / apart
    table(
        f"Tokens that the teacher reads: {HINTS} hints at the end of {PROMPT} tokens, a response of {RESPONSE}",
        ["", "tokens", "ratio", "target"],
        [["apart", apart, "1.00", ""], ["at once", together, f"{ratio:.2f}", verdict(ratio, 0.4, at_least=False)]],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=list(SHAPES), default="cpu")
    parser.add_argument("--measure", choices=list(STEPS), help="one side's peak memory, as JSON")
    options = parser.parse_args()
    if options.measure:
        problem = Problem.make(options.device)
        print(json.dumps(peak(lambda: STEPS[options.measure](problem)(), options.device)))
        return
    show_loss(options.device)
    show_sharing()


if __name__ == "__main__":
    main()
