"""Weights in bfloat16 on a CPU: products round to them and sum in float32, prompts attend as products do, and all else
is float32."""

import random
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from openclaw_rl.engines.local.model.decoder import load_decoder
from openclaw_rl.engines.local.model.packed import has_half_products
from openclaw_rl.engines.local.process.sampler_worker import Worker
from openclaw_rl.engines.local.process.worker_messages import Add, LoadPolicy, WorkerOptions
from openclaw_rl.engines.local.sampling.runner import RowKVCache
from openclaw_rl.engines.local.sampling.scheduler import Sequence, Work
from openclaw_rl.types import SamplingParams, Span, TrainingSequence
from support.decoders import FAMILIES, causal
from support.trainers import InProcessLearner, batch, options
from support.workers import request, run

CPU = torch.device("cpu")
#: How far log-probs of sampler and learner may be apart, by the precisions of the two: on average, and at most. Here it
#: is 2e-6 at most if both have the same precision, and 0.02 on average and 0.1 at most if not. In bfloat16 a sum in
#: another order may change the last of a number's 8 bits.
GAPS = {
    ("float32", "float32"): (1e-5, 1e-4),
    ("bfloat16", "bfloat16"): (0.01, 0.1),
    ("float32", "bfloat16"): (0.05, 0.3),
    ("bfloat16", "float32"): (0.05, 0.3),
}
#: The same for a float32 sampler with a packed copy in float16. Here it is 0.0004 on average and 0.002 at most.
HALF_GAPS = (0.002, 0.01)
#: How far scores may be from the reference, as a share of the largest, for the same reason. Here they are equal.
ROUNDING = 0.01


class RoundedLinear(torch.nn.Linear):
    """What a product in bfloat16 with sums in float32 is, in float32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rounded(F.linear(rounded(x), self.weight, self.bias))


def rounded(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.bfloat16).float()


def reference(folder: Path) -> torch.nn.Module:
    """The model of Transformers in float32, with rounded weights and rounded products."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(rounded(parameter))
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.__class__ = RoundedLinear
    return model


def make_worker(model: Path, dtype: str, rank: int = 4, packed: str = "on") -> Worker:
    decoder = load_decoder(model, getattr(torch, dtype), CPU)
    worker = Worker(decoder, WorkerOptions(model, "cpu", dtype, 8, None, 0.05, 2, rank, pack_weights=packed))
    worker.pack()
    return worker


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_those_of_the_reference(family: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(FAMILIES[family])
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    theirs.save_pretrained(tmp_path)
    decoder = load_decoder(tmp_path, torch.bfloat16, CPU)
    ids = torch.randint(0, 200, (40,))
    with torch.inference_mode():
        expected = reference(tmp_path)(ids[None]).logits[0]
        found = decoder.logits(decoder.forward(ids, torch.arange(40), causal))
    assert found.dtype == torch.float32
    assert (found - expected).abs().max() < ROUNDING * expected.abs().max()


def test_greedy_tokens_are_those_of_the_reference(tiny_model: Path) -> None:
    """Wherever the reference's first choice is ahead by more than rounding can be; it mostly is."""
    prompts = [random.Random(seed).choices(range(300), k=20 + seed) for seed in range(6)]
    answers = run(make_worker(tiny_model, "bfloat16"), [(0, Add(i, request(p), 0)) for i, p in enumerate(prompts)])
    model, sure, total = reference(tiny_model), 0, 0
    for i, prompt in enumerate(prompts):
        drawn = [token.token_id for token in answers[i, 0]]
        with torch.inference_mode():
            scores = model(torch.tensor([[*prompt, *drawn]])).logits[0, len(prompt) - 1 : -1]
        best = scores.topk(2)
        for token, values, (choice, _) in zip(drawn, best.values, best.indices.tolist(), strict=True):
            if values[0] - values[1] > 2 * ROUNDING * scores.abs().max():
                assert token == choice
                sure += 1
            total += 1
    assert sure > 0.6 * total


@pytest.mark.parametrize("rank", [4, 0])
@pytest.mark.parametrize(("samples", "learns"), GAPS)
def test_sampler_and_learner_agree_on_log_probs(
    tiny_model: Path, tmp_path: Path, samples: str, learns: str, rank: int
) -> None:
    """For a policy that has learned a little, with an adapter and with all weights."""
    given = options(rank=rank, model=tiny_model, learning_rate=1e-2 if rank else 1e-4, base_model=str(tiny_model))
    learner = InProcessLearner(load_decoder(tiny_model, getattr(torch, learns), CPU), given)
    gaps = gaps_of(learner, make_worker(tiny_model, samples, rank), tmp_path)
    mean, most = GAPS[samples, learns]
    assert gaps.mean() < mean
    assert gaps.max() < most
    if samples != learns:
        assert gaps.mean() > 1e-4, "nothing was rounded"


@pytest.mark.skipif(not has_half_products(), reason="FBGEMM is for x86")
def test_a_copy_in_float16_agrees_with_the_learner(tiny_model: Path, tmp_path: Path) -> None:
    given = options(rank=4, model=tiny_model, learning_rate=1e-2, base_model=str(tiny_model))
    learner = InProcessLearner(load_decoder(tiny_model, torch.float32, CPU), given)
    gaps = gaps_of(learner, make_worker(tiny_model, "float32", packed="half"), tmp_path)
    assert 1e-6 < gaps.mean() < HALF_GAPS[0]
    assert gaps.max() < HALF_GAPS[1]


def gaps_of(learner: InProcessLearner, worker: Worker, tmp_path: Path) -> torch.Tensor:
    """How far log-probs of the two are apart, for a policy that has learned a little."""
    learner.step(batch(learner))
    learner.write_policy(tmp_path / "policy")
    loaded = worker.obey(LoadPolicy(1, 1, tmp_path / "policy"))
    while loaded is None:
        loaded = worker.load_on()
    prompts = [random.Random(seed).choices(range(200), k=12 + seed) for seed in range(4)]
    jobs = [(0, Add(i, request(p, temperature=1.0, seed=i), 1, 1)) for i, p in enumerate(prompts)]
    answers = run(worker, jobs)
    sequences = []
    for i, prompt in enumerate(prompts):
        ids = [*prompt, *(token.token_id for token in answers[i, 0])]
        nothing = [0.0] * (len(ids) - len(prompt))
        sequences.append(TrainingSequence(ids, [Span(i, len(prompt), len(ids), nothing, nothing)]))
    scored = [logprob for spans in learner.trainer.score(sequences) for span in spans for logprob in span]
    sampled = [token.logprob for i in range(len(prompts)) for token in answers[i, 0]]
    return (torch.tensor(scored) - torch.tensor(sampled)).abs()


def test_weights_take_half_the_memory_and_nothing_else_is_narrow(tiny_model: Path, adapters: list[Path]) -> None:
    wide, narrow = (make_worker(tiny_model, dtype) for dtype in ("float32", "bfloat16"))
    assert narrow.runner.decoder.weight_bytes <= 0.6 * wide.runner.decoder.weight_bytes
    assert narrow.runner.decoder.embed.dtype == torch.bfloat16
    for worker in (wide, narrow):
        worker.obey(LoadPolicy(1, 1, adapters[0]))
        factors = worker.policies.factors(0, "qkv")
        held = (factors.down, factors.up, worker.runner.cache.keys, worker.runner.cache.values)
        assert {tensor.dtype for tensor in held} == {torch.float32}


@pytest.mark.parametrize("rank", [4, 0])
@pytest.mark.parametrize(("before", "after"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_a_run_goes_on_in_the_other_precision(
    tiny_model: Path, tmp_path: Path, before: str, after: str, rank: int
) -> None:
    given = options(rank=rank, model=tiny_model, learning_rate=1e-4)
    first, second = (
        InProcessLearner(load_decoder(tiny_model, getattr(torch, dtype), CPU), given) for dtype in (before, after)
    )
    first.step(batch(first))
    (tmp_path / "saved").mkdir()
    first.save(tmp_path / "saved")
    second.load(tmp_path / "saved")
    for ours, theirs in zip(second.trainer.weights.parameters(), first.trainer.weights.parameters(), strict=True):
        assert ours.dtype == torch.float32
        assert torch.equal(ours, theirs)
    assert second.steps == 1
    second.step(batch(second))
    assert second.steps == 2


def test_prompts_attend_in_bfloat16_and_single_tokens_in_float32(tiny_model: Path) -> None:
    shape = load_decoder(tiny_model, torch.float32, CPU).shape
    sequence = Sequence(1, 0, list(range(6)), SamplingParams(max_tokens=1), 0, 0, (0, 0))
    sequence.pages = [0]
    narrow, wide = RowKVCache(shape, 1, torch.float32, weights=torch.bfloat16), RowKVCache(shape, 1, torch.float32)
    generator = torch.Generator().manual_seed(3)
    # The beginning of a prompt, the rest of it, and a token of the answer.
    for start, stop, is_prompt in ((0, 3, True), (3, 5, True), (5, 6, False)):
        heads = (shape.heads, shape.kv_heads, shape.kv_heads)
        q, k, v = (torch.randn(stop - start, count, shape.head_dim, generator=generator) for count in heads)
        got, exact = (cache.attend([Work(sequence, start, stop - start)])(0, q, k, v) for cache in (narrow, wide))
        assert got.dtype == torch.float32
        assert torch.equal(got, exact) is not is_prompt
        torch.testing.assert_close(got, exact, rtol=ROUNDING, atol=2 * ROUNDING)
        assert torch.equal(narrow.keys[0, :stop], wide.keys[0, :stop]), "the cache itself is not rounded"
