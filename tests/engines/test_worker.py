"""The worker with a real model, in this process: what else is in the batch changes no answer."""

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given
from hypothesis import strategies as st
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from openclaw_rl.engines.local.model.decoder import load_decoder
from openclaw_rl.engines.local.model.model_config import UnsupportedModel
from openclaw_rl.engines.local.model.placement import describe
from openclaw_rl.engines.local.process.sampler_worker import Worker
from openclaw_rl.engines.local.process.worker_messages import (
    Add,
    Cancel,
    LoadPolicy,
    PolicyLoaded,
    RequestFailed,
    Score,
    WorkerOptions,
)
from openclaw_rl.engines.local.sampling.runner import bytes_per_page
from openclaw_rl.types import FinishReason, Priority, SampledToken, SampleRequest, SamplingParams, ScoreRequest, Scores
from support.properties import examples
from support.workers import ids, on_every_device, request, run, transformers_greedy

#: How far sums in float32 may be off; here they are by less than 3e-6.
ROUNDING = 1e-5


def make_worker(
    model: Path, pages: int | None = None, max_sequences: int = 8, device: str = "cpu", pack_weights: str = "on"
) -> Worker:
    decoder = load_decoder(model, torch.float32, torch.device(device))
    gib = pages and (pages + 0.5) * bytes_per_page(decoder.shape, torch.float32) / (1 << 30)
    options = WorkerOptions(model, device, "float32", max_sequences, None, gib or 0.05, 4, 4, pack_weights=pack_weights)
    worker = Worker(decoder, options)
    worker.pack()
    worker.scheduler.prefill_tokens = 48  # small, so that long prompts take several steps
    return worker


def alone(model: Path, job: SampleRequest, version: int = 0) -> list[SampledToken]:
    """What a worker without packed weights answers; others must answer the same."""
    return run(make_worker(model, pack_weights="off"), [(0, Add(1, job, version))])[1, 0]


def assert_same(one: list[SampledToken], other: list[SampledToken]) -> None:
    assert ids(one) == ids(other)
    assert [t.logprob for t in one] == pytest.approx([t.logprob for t in other], abs=1e-4)


def assert_same_draws(model: Path, job: SampleRequest, one: list[SampledToken], other: list[SampledToken]) -> None:
    """The same tokens, except after a draw that rounding decides.

    Matrix products of another shape add in another order. If a draw is within `ROUNDING` of the edge between two
    tokens, either of them is right, and what follows is another answer.
    """
    same = next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a.token_id != b.token_id), len(one))
    assert_same(one[:same], other[:same])
    if same < len(one):
        before = [*job.prompt_ids, *ids(one[:same])]
        whole = request(
            before, max_tokens=1, top_logprobs=json.loads((model / "config.json").read_text())["vocab_size"]
        )
        (token,) = alone(model, whole)
        logprobs = dict(token.top)
        for drawn in (one[same], other[same]):
            assert drawn.logprob == pytest.approx(logprobs[drawn.token_id], abs=1e-4)
            assert distance(job.params, same, logprobs, drawn.token_id) < ROUNDING


def distance(params: SamplingParams, draws_before: int, logprobs: dict[int, float], token: int) -> float:
    """How far a draw was from drawing this token; 0 if it is the one to be drawn.

    In log-probs from the likeliest token if it is greedy, else from the random number to the token's part of [0, 1].
    """
    if not params.temperature:
        return max(logprobs.values()) - logprobs[token]
    weights = np.exp(np.array([logprobs[id] for id in sorted(logprobs)]) / params.temperature)
    ends = np.cumsum(weights / weights.sum())
    rng = random.Random(f"{params.seed}:0")
    uniform = [rng.random() for _ in range(draws_before + 1)][-1]
    return max(0.0, ends[token] - weights[token] / weights.sum() - uniform, uniform - ends[token])


def test_greedy_tokens_and_logprobs_equal_those_of_transformers(tiny_model: Path) -> None:
    prompt = random.Random(0).choices(range(300), k=60)
    model = LlamaForCausalLM.from_pretrained(tiny_model).eval()
    theirs = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt)),
        max_new_tokens=12,
        do_sample=False,
        eos_token_id=-1,
    )[0, len(prompt) :].tolist()
    ours = alone(tiny_model, request(prompt))
    assert ids(ours) == theirs
    with torch.inference_mode():
        logprobs = model(torch.tensor([prompt + theirs])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    expected = [row[token].item() for row, token in zip(logprobs, theirs, strict=True)]
    assert [token.logprob for token in ours] == pytest.approx(expected, abs=1e-4)
    assert ours[-1].finish is FinishReason.LENGTH


@on_every_device
@examples(15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(1, 150), min_size=2, max_size=10),
    steps=st.lists(st.integers(0, 12), min_size=10, max_size=10),
    seed=st.integers(0, 99),
)
@example(lengths=[109, 99], steps=[0] * 10, seed=31)  # a random number 6e-8 from the edge between two tokens
def test_any_batch_gives_each_request_what_it_gets_alone(
    tiny_model: Path, device: str, lengths: list[int], steps: list[int], seed: int
) -> None:
    """Mixed lengths, joining and leaving at any step, greedy and sampled."""
    rng = random.Random(seed)
    jobs = [
        request(rng.choices(range(300), k=length), temperature=rng.choice([0.0, 0.8]), seed=i, max_tokens=4 + i)
        for i, length in enumerate(lengths)
    ]
    arrivals = [(step, Add(i, job, 0)) for i, (step, job) in enumerate(zip(steps, jobs, strict=False))]
    answers = run(make_worker(tiny_model, device=device), arrivals)
    for i, job in enumerate(jobs):
        assert_same_draws(tiny_model, job, answers[i, 0], alone(tiny_model, job))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_only_a_draw_on_the_edge_between_two_tokens_may_differ(tiny_model: Path, temperature: float) -> None:
    job = request(random.Random(6).choices(range(300), k=20), temperature=temperature, seed=3)
    answer = alone(tiny_model, job)
    assert_same_draws(tiny_model, job, answer, answer)
    others = alone(tiny_model, replace(job, params=replace(job.params, temperature=1.0, seed=4)))
    assert ids(others) != ids(answer)
    with pytest.raises(AssertionError):
        assert_same_draws(tiny_model, job, answer, others)


@on_every_device
def test_a_cache_too_small_for_all_changes_no_answer(tiny_model: Path, device: str) -> None:
    rng = random.Random(3)
    jobs = [request(rng.choices(range(300), k=100), max_tokens=60, temperature=0.7, seed=i) for i in range(6)]
    worker = make_worker(tiny_model, pages=34, device=device)
    answers = run(worker, [(i, Add(i, job, 0)) for i, job in enumerate(jobs)])
    for i, job in enumerate(jobs):
        assert_same(answers[i, 0], alone(tiny_model, job))
    assert worker.scheduler.pool.available == worker.scheduler.pool.pages


def test_n_completions_share_one_reading_of_the_prompt(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = random.Random(1).choices(range(300), k=161)
    worker = make_worker(tiny_model)
    computed = count_computed(worker, monkeypatch)
    answers = run(worker, [(0, Add(1, request(prompt, n=4, temperature=1.0, seed=5, max_tokens=8), 0))])
    assert len(answers) == 4
    # 161 once, the one token after the ten full pages for each sibling, and seven drawn tokens of each.
    assert sum(computed) == 161 + 3 * 1 + 4 * 7
    assert len({tuple(ids(tokens)) for tokens in answers.values()}) > 1
    for index in range(4):
        again = run(
            make_worker(tiny_model), [(0, Add(1, request(prompt, n=4, temperature=1.0, seed=5, max_tokens=8), 0))]
        )
        assert_same(answers[1, index], again[1, index])


def test_a_request_that_extends_another_computes_only_what_is_new(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = random.Random(2).choices(range(300), k=100)
    worker = make_worker(tiny_model)
    first = run(worker, [(0, Add(1, request(prompt), 0))])[1, 0]
    longer = prompt + ids(first) + [7, 8, 9]
    computed = count_computed(worker, monkeypatch)
    second = run(worker, [(0, Add(2, request(longer, max_tokens=1), 0))])[2, 0]
    assert sum(computed) == len(longer) - 96  # six full pages of the hundred tokens, and one token is always computed
    assert_same(second, alone(tiny_model, request(longer, max_tokens=1)))


def test_gathered_pages_give_the_same_answer_as_consecutive_ones(tiny_model: Path) -> None:
    worker = make_worker(tiny_model, pages=32)
    pool = worker.scheduler.pool
    holes = [pool.allocate() for _ in range(32)]
    pool.release([page for page in holes if page is not None and page % 2])
    job = request(random.Random(4).choices(range(300), k=70))
    answer = run(worker, [(0, Add(1, job, 0))])[1, 0]
    assert_same(answer, alone(tiny_model, job))


@on_every_device
def test_one_batch_mixes_versions_and_each_equals_peft(tiny_model: Path, adapters: list[Path], device: str) -> None:
    worker = make_worker(tiny_model, device=device)
    for version, folder in enumerate(adapters, start=1):
        loaded = worker.obey(LoadPolicy(version, version, folder))
        assert isinstance(loaded, PolicyLoaded)
        assert loaded.error is None
    prompt = random.Random(5).choices(range(300), k=50)
    arrivals = [(version % 2, Add(version, request(prompt), version, version)) for version in (0, 2, 1, 3)]
    answers = run(worker, arrivals)
    expected = {0: transformers_greedy(LlamaForCausalLM.from_pretrained(tiny_model), prompt)}
    for version, folder in enumerate(adapters, start=1):
        base = LlamaForCausalLM.from_pretrained(tiny_model)
        expected[version] = transformers_greedy(PeftModel.from_pretrained(base, folder), prompt)
    assert {version: ids(answers[version, 0]) for version in expected} == expected
    assert len({tuple(tokens) for tokens in expected.values()}) == 4


def test_an_adapter_replaces_another_in_its_slot(tiny_model: Path, adapters: list[Path]) -> None:
    worker = make_worker(tiny_model)
    prompt = random.Random(6).choices(range(300), k=40)
    worker.obey(LoadPolicy(1, 1, adapters[0]))
    one = run(worker, [(0, Add(1, request(prompt), 1, 1))])[1, 0]
    for version in (2, 3, 4):
        worker.obey(LoadPolicy(version, version, adapters[1]))
    worker.obey(LoadPolicy(5, 1, adapters[0]))
    again = run(worker, [(0, Add(2, request(prompt), 5, 1)), (0, Add(3, request(prompt), 4, 4))])
    assert_same(again[2, 0], one)
    assert ids(again[3, 0]) != ids(one)


def test_an_adapter_that_does_not_fit_is_refused_in_words(tiny_model: Path, tmp_path: Path) -> None:
    loaded = make_worker(tiny_model).obey(LoadPolicy(1, 1, tmp_path))
    assert isinstance(loaded, PolicyLoaded)
    assert "adapter_config.json" in (loaded.error or "")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"alpha_pattern": {"q_proj": 2}}, "alpha_pattern"),
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "biases"),
        ({"r": None}, "no rank"),
        ({"r": 64}, "rank 64"),
    ],
)
def test_adapters_that_would_be_computed_wrongly_are_refused(
    tiny_model: Path, adapters: list[Path], tmp_path: Path, change: dict, reason: str
) -> None:
    folder = Path(shutil.copytree(adapters[0], tmp_path / "adapter"))
    config = {**json.loads((folder / "adapter_config.json").read_text()), **change}
    config = {key: value for key, value in config.items() if value is not None}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    loaded = make_worker(tiny_model).obey(LoadPolicy(1, 1, folder))
    assert isinstance(loaded, PolicyLoaded)
    assert reason in (loaded.error or "")


def test_damaged_adapters_are_refused(tiny_model: Path, adapters: list[Path], tmp_path: Path) -> None:
    worker = make_worker(tiny_model)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        folder = Path(shutil.copytree(adapters[0], tmp_path / name))
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: len(content) // 2])
        loaded = worker.obey(LoadPolicy(1, 1, folder))
        assert isinstance(loaded, PolicyLoaded)
        assert "damaged" in (loaded.error or "")


def test_a_request_for_a_slot_without_adapter_fails_alone(tiny_model: Path) -> None:
    worker = make_worker(tiny_model)
    assert isinstance(worker.obey(Add(1, request([1, 2]), 3, 3)), RequestFailed)
    assert worker.scheduler.idle


@pytest.mark.parametrize(("context", "reason"), [(1000, "the model's 512"), (512, "--kv-cache-gib")])
def test_contexts_that_cannot_be_had_are_refused(tiny_model: Path, context: int, reason: str) -> None:
    decoder = load_decoder(tiny_model, torch.float32, torch.device("cpu"))
    options = WorkerOptions(tiny_model, "cpu", "float32", 8, context, 1e-5, 4, 4)
    with pytest.raises(UnsupportedModel, match=reason):
        Worker(decoder, options)


def test_quantised_weights_are_refused(tiny_model: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.mlp.down_proj.weight"] = weights["model.layers.0.mlp.down_proj.weight"].to(
        torch.float8_e4m3fn
    )
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(UnsupportedModel, match="quantised"):
        load_decoder(folder, torch.float32, torch.device("cpu"))


def test_a_short_prompt_does_not_wait_for_a_long_one(tiny_model: Path) -> None:
    worker = make_worker(tiny_model)
    worker.obey(Add(1, request(random.Random(1).choices(range(300), k=480), max_tokens=2), 0))
    worker.step()
    worker.obey(Add(2, request(random.Random(2).choices(range(300), k=20), max_tokens=2), 0))
    assert 2 in worker.step().tokens


def test_background_work_makes_place_for_users(tiny_model: Path) -> None:
    worker = make_worker(tiny_model, max_sequences=2)
    background = [
        SampleRequest([i, i + 1, i + 2], SamplingParams(max_tokens=60, seed=i), priority=Priority.BACKGROUND)
        for i in (1, 2)
    ]
    for number, job in enumerate(background):
        worker.obey(Add(number, job, 0))
    for _ in range(5):
        worker.step()
    worker.obey(Add(9, request([5, 6, 7], max_tokens=3), 0))
    assert 9 in worker.step().tokens
    answers = run(worker, [])
    assert len(answers[0, 0]) + len(answers[1, 0]) > 60


def test_a_stop_token_ends_the_completion_and_belongs_to_it(tiny_model: Path) -> None:
    prompt = random.Random(8).choices(range(300), k=30)
    whole = ids(alone(tiny_model, request(prompt)))
    stop = whole[5]
    ended = alone(tiny_model, request(prompt, stop_token_ids=frozenset([stop])))
    assert ids(ended) == whole[: whole.index(stop) + 1]
    assert ended[-1].finish is FinishReason.STOP


def test_cancel_frees_everything(tiny_model: Path) -> None:
    worker = make_worker(tiny_model)
    worker.obey(Add(1, request([1, 2, 3] * 30, n=3, max_tokens=100), 0))
    for _ in range(6):
        worker.step()
    worker.obey(Cancel(1, 0))
    assert len(worker.scheduler.running) == 2
    worker.obey(Cancel(1))
    assert worker.scheduler.idle
    assert worker.scheduler.pool.available == worker.scheduler.pool.pages


def count_computed(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens that went through the model, step by step."""
    computed: list[int] = []
    run_model = worker.runner.run

    def counted(work: list) -> torch.Tensor:
        computed.append(sum(item.count for item in work))
        return run_model(work)

    monkeypatch.setattr(worker.runner, "run", counted)
    return computed


def score_all(worker: Worker, commands: list[Score | Add]) -> dict[int, Scores]:
    """What scoring requests give, whatever else runs beside them."""
    for command in commands:
        assert worker.obey(command) is None
    scores: dict[int, Scores] = {}
    while not worker.scheduler.idle:
        scores.update(worker.step().scores)
    return scores


def reference(model: Path, tokens: list[int], last_n: int, adapter: Path | None = None) -> torch.Tensor:
    """Log-probs [last_n, vocabulary] before each of the last tokens, by Transformers."""
    theirs = LlamaForCausalLM.from_pretrained(model).eval()
    if adapter is not None:
        theirs = PeftModel.from_pretrained(theirs, adapter)
    with torch.no_grad():
        logits = theirs(torch.tensor([tokens])).logits[0]
    return logits.log_softmax(-1)[len(tokens) - last_n - 1 : -1]


@on_every_device
@pytest.mark.parametrize(("length", "last_n"), [(2, 1), (40, 39), (100, 1), (100, 64), (17, 16), (33, 5)])
def test_scores_are_those_of_transformers(tiny_model: Path, length: int, last_n: int, device: str) -> None:
    tokens = random.Random(length).choices(range(300), k=length)
    targets = np.array([[tokens[i] % 7, 300] for i in range(last_n)])
    job = ScoreRequest(tokens, last_n, top_k=3, targets=targets)
    scores = score_all(make_worker(tiny_model, device=device), [Score(1, job)])[1]
    expected = reference(tiny_model, tokens, last_n)
    picked = expected.gather(1, torch.tensor(tokens[-last_n:])[:, None])[:, 0]
    assert scores.logprobs == pytest.approx(picked.tolist(), abs=1e-4)
    values, ids_ = expected.topk(3)
    assert scores.top is not None
    assert scores.top.ids.tolist() == ids_.tolist()
    assert scores.top.logprobs == pytest.approx(values.numpy(), abs=1e-4)
    assert scores.targets == pytest.approx(expected.gather(1, torch.tensor(targets)).numpy(), abs=1e-4)


def test_scoring_uses_the_cached_prompt_and_the_version_that_is_asked_for(
    tiny_model: Path, adapters: list[Path]
) -> None:
    worker = make_worker(tiny_model)
    worker.obey(LoadPolicy(7, 2, adapters[0]))
    tokens = random.Random(3).choices(range(300), k=120)
    run(worker, [(0, Add(1, request(tokens[:100], max_tokens=2), 0))])
    worker.obey(Score(2, ScoreRequest(tokens, 20)))
    work = worker.scheduler.plan()
    assert work[0].start >= 80, "the prompt was in the cache"
    worker.obey(Score(3, ScoreRequest(tokens, 20, version=7), slot=2))
    scores = score_all(worker, [])
    for id, adapter in ((2, None), (3, adapters[0])):
        expected = reference(tiny_model, tokens, 20, adapter).gather(1, torch.tensor(tokens[-20:])[:, None])[:, 0]
        assert scores[id].logprobs == pytest.approx(expected.tolist(), abs=1e-4)


@on_every_device
def test_scores_do_not_depend_on_what_else_runs_nor_on_preemption(tiny_model: Path, device: str) -> None:
    rng = random.Random(5)
    tokens = rng.choices(range(300), k=150)
    alone_ = score_all(make_worker(tiny_model, device=device), [Score(1, ScoreRequest(tokens, 90))])[1]
    worker = make_worker(tiny_model, pages=22, device=device)
    commands: list[Score | Add] = [Score(1, ScoreRequest(tokens, 90))]
    for id in range(2, 8):
        commands.append(Add(id, request(rng.choices(range(300), k=rng.randint(10, 60))), 0))
    assert score_all(worker, commands)[1].logprobs == pytest.approx(alone_.logprobs, abs=1e-4)


def test_an_answer_beside_scoring_is_what_it_is_alone(tiny_model: Path) -> None:
    prompt = random.Random(6).choices(range(300), k=50)
    worker = make_worker(tiny_model)
    worker.obey(Score(9, ScoreRequest(random.Random(7).choices(range(300), k=140), 100)))
    assert_same(run(worker, [(0, Add(1, request(prompt), 0))])[1, 0], alone(tiny_model, request(prompt)))


def test_a_cancelled_scoring_frees_its_pages(tiny_model: Path) -> None:
    worker = make_worker(tiny_model)
    before = worker.scheduler.pool.available
    worker.obey(Score(1, ScoreRequest(list(range(200)), 100)))
    worker.step()
    worker.obey(Cancel(1))
    assert worker.scheduler.idle
    assert worker.scheduler.pool.available == before


def test_an_error_of_cuda_is_one_sentence() -> None:
    error = RuntimeError("CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA` to find out more.\n")
    assert describe(error) == "RuntimeError: CUDA error: out of memory."
    assert describe(UnsupportedModel("it has no layers.")) == "it has no layers."
