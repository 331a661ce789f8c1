"""Families that Transformers' code computes: sampled, adapted, merged and shared as those of our own decoder."""

import json
import pickle
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BambaConfig,
    MambaConfig,
    OPTConfig,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
)

from openclaw_rl.engines.local.families import describe_family, runnable
from openclaw_rl.engines.local.merge import merge_adapter
from openclaw_rl.engines.local.model import transformers_decoder, transformers_sizes
from openclaw_rl.engines.local.model.attention import PLAIN
from openclaw_rl.engines.local.model.model_config import UnsupportedModel
from openclaw_rl.engines.local.model.shared_weights import share, take_up
from openclaw_rl.engines.local.model.transformers_decoder import (
    TransformersDecoder,
    load_language_model,
    load_transformers_decoder,
)
from openclaw_rl.engines.local.process.sampler_worker import Worker
from openclaw_rl.engines.local.process.worker_messages import Add, LoadPolicy, PolicyLoaded, Score, WorkerOptions
from openclaw_rl.engines.local.sampling.page_pool import PagePool
from openclaw_rl.engines.local.training.lora import LoraWeights
from openclaw_rl.engines.local.training.trainer import Trainer
from openclaw_rl.errors import UserError
from openclaw_rl.losses.policy import PolicyLoss
from openclaw_rl.models import ModelNotFound
from openclaw_rl.types import SampledToken, ScoreRequest, Span, TrainingSequence
from support.decoders import MAMBA, OTHERS, STATE_FAMILIES, TRANSFORMERS_FAMILIES, core_and_more, save_random
from support.trainers import trained_lora
from support.workers import ids, load, request, run

CPU = torch.device("cpu")
#: Their tensors have other names on disk than in memory: merging refuses that.
RENAMED = {"gemma3-vision"}
EVERY_FAMILY = {**TRANSFORMERS_FAMILIES, **STATE_FAMILIES}
#: Their experts are products of groups: those of float32 wait for the device, so that steps on CUDA are not captured.
GROUPED = {"deepseek-v3", "glm4-moe", "gpt-oss", "granite-moe", "mixtral", "qwen2-moe", "qwen3-moe"}
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
every_family = pytest.mark.parametrize("family", core_and_more(EVERY_FAMILY))


def make_worker(decoder: TransformersDecoder, model: Path) -> Worker:
    device, dtype = decoder.embed.device.type, str(decoder.embed.dtype).removeprefix("torch.")
    worker = Worker(decoder, WorkerOptions(model, device, dtype, 8, None, 0.02, 4, 4))
    worker.scheduler.prefill_tokens = 20  # small, so that prompts take several steps
    return worker


def logprobs_of(model: Any, prompt: list[int], tokens: list[SampledToken]) -> list[float]:
    """What a model of Transformers or PEFT gives the sampled tokens."""
    with torch.no_grad():
        rows = model.eval()(torch.tensor([[*prompt, *ids(tokens)]])).logits[0].float().log_softmax(-1)
    return [rows[len(prompt) - 1 + i, token.token_id].item() for i, token in enumerate(tokens)]


def theirs(model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager")


@every_family
def test_a_served_policy_and_its_base_have_the_logprobs_of_transformers_and_peft(family: str, tmp_path: Path) -> None:
    model = save_random(EVERY_FAMILY[family], tmp_path / "model")
    decoder, shared = share(load_transformers_decoder(model, torch.float32, CPU))
    assert isinstance(decoder, TransformersDecoder)
    worker = make_worker(decoder, model)
    lora = trained_lora(decoder)
    lora.save(tmp_path / "adapter", "model")
    assert load(worker, LoadPolicy(1, 1, tmp_path / "adapter")) == PolicyLoaded(1)
    draw = random.Random(family)
    beginning = draw.choices(range(3, 200), k=33)
    jobs = [(version, [*beginning, *draw.choices(range(3, 200), k=size)]) for version, size in enumerate((9, 12, 5, 1))]
    # Versions 0 and 2 are the base model, in one batch with the policy; the last two come later and find a prefix.
    arrivals = [
        (step, Add(i, request(prompt, temperature=1.0, seed=i), i % 2, i % 2))
        for step, (i, prompt) in zip((0, 0, 4, 4), jobs, strict=True)
    ]
    answers = run(worker, arrivals)
    base = theirs(model)
    expected = [logprobs_of(base, jobs[i][1], answers[i, 0]) for i in (0, 2)]
    policy = PeftModel.from_pretrained(base, tmp_path / "adapter")
    expected[1:1] = [logprobs_of(policy, jobs[1][1], answers[1, 0])]
    expected.append(logprobs_of(policy, jobs[3][1], answers[3, 0]))
    for i, logprobs in enumerate(expected):
        assert [token.logprob for token in answers[i, 0]] == pytest.approx(logprobs, abs=1e-4)
    with policy.disable_adapter():
        unadapted = logprobs_of(policy, jobs[1][1], answers[1, 0])
    assert max(abs(one - other) for one, other in zip(unadapted, expected[1], strict=True)) > 0.01

    # The learner opens the same weights, and gives the sampled tokens the same log-probs.
    assert shared is not None
    taken = take_up(shared)
    assert isinstance(taken, TransformersDecoder)
    prompt, answer = jobs[1][1], ids(answers[1, 0])
    sequence = TrainingSequence([*prompt, *answer], [Span(0, len(prompt), len(prompt) + len(answer), [], [])])
    scored = Trainer(taken, lora, PolicyLoss()).score([sequence])[0][0]
    assert scored == pytest.approx(expected[1], abs=1e-4)


@needs_cuda
@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_a_policy_served_on_cuda_has_the_logprobs_of_peft(family: str, tmp_path: Path) -> None:
    model = save_random(EVERY_FAMILY[family], tmp_path / "model")
    decoder = load_transformers_decoder(model, torch.float32, torch.device("cuda"))
    assert isinstance(decoder, TransformersDecoder)
    worker = make_worker(decoder, model)
    trained_lora(decoder).save(tmp_path / "adapter", "model")
    assert load(worker, LoadPolicy(1, 1, tmp_path / "adapter")) == PolicyLoaded(1)
    prompts = [random.Random(f"{family} {size}").choices(range(3, 200), k=size) for size in (31, 5, 20)]
    # Versions 0 and 2 are the base model, in one batch with the policy.
    arrivals = [(i, Add(i, request(prompt, temperature=1.0, seed=i), i % 2, i % 2)) for i, prompt in enumerate(prompts)]
    answers = run(worker, arrivals)
    base = theirs(model)
    expected = {i: logprobs_of(base, prompts[i], answers[i, 0]) for i in (0, 2)}
    policy = PeftModel.from_pretrained(base, tmp_path / "adapter")
    expected[1] = logprobs_of(policy, prompts[1], answers[1, 0])
    for i, logprobs in expected.items():
        assert [token.logprob for token in answers[i, 0]] == pytest.approx(logprobs, abs=1e-3)
    assert not decoder.mixes_sequences or captures(worker) == (family not in GROUPED)


@needs_cuda
@pytest.mark.parametrize("family", sorted(GROUPED))
def test_steps_with_experts_are_captured_in_bfloat16(family: str, tmp_path: Path) -> None:
    model = save_random(EVERY_FAMILY[family], tmp_path)
    decoder = load_transformers_decoder(model, torch.bfloat16, torch.device("cuda"))
    assert isinstance(decoder, TransformersDecoder)
    assert captures(make_worker(decoder, model))


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["gemma3", "phi3", "gpt-oss"])
def test_fused_modules_are_trained_through(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    device = torch.device("cuda")
    decoder = load_transformers_decoder(save_random(EVERY_FAMILY[family], tmp_path / "model"), dtype, device)
    trained_lora(decoder).save(tmp_path / "adapter", "model")
    lora = LoraWeights.load(tmp_path / "adapter", decoder.shape, device)
    tokens = random.Random(0).choices(range(200), k=40)
    sequence = TrainingSequence(tokens, [Span(0, 9, 40, [-5.0] * 31, [1.0] * 31)])
    Trainer(decoder, lora, PolicyLoss()).forward_backward([sequence])
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in lora.parameters())


def captures(worker: Worker) -> bool:
    from openclaw_rl.engines.local.sampling.transformers_runner import TransformersRunner  # imports Triton

    return isinstance(worker.runner, TransformersRunner) and worker.runner.captures


@every_family
def test_an_adapter_is_saved_loaded_and_merged(family: str, tmp_path: Path) -> None:
    model = save_random(EVERY_FAMILY[family], tmp_path / "model")
    decoder = load_transformers_decoder(model, torch.float32, CPU)
    lora = trained_lora(decoder)
    lora.save(tmp_path / "adapter", "model")
    again = LoraWeights.load(tmp_path / "adapter", decoder.shape)
    assert list(again.a) == list(lora.a)
    assert all(one.equal(other) for one, other in zip(lora.parameters(), again.parameters(), strict=True))
    if family in RENAMED:
        with pytest.raises(UserError, match=r"adapts model\.language_model\..*, which .* does not have"):
            merge_adapter(model, tmp_path / "adapter", tmp_path / "merged")
        return
    merge_adapter(model, tmp_path / "adapter", tmp_path / "merged")
    tokens = torch.arange(3, 43)[None]
    with torch.no_grad():
        merged = theirs(tmp_path / "merged").eval()(tokens).logits
        adapted = PeftModel.from_pretrained(theirs(model), tmp_path / "adapter").eval()(tokens).logits
        base = theirs(model).eval()(tokens).logits
    torch.testing.assert_close(merged, adapted, rtol=1e-4, atol=1e-4)
    assert (merged - base).abs().max() > 0.01
    assert (json.loads((tmp_path / "adapter" / "adapter_config.json").read_text()))["r"] == 4


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random(TRANSFORMERS_FAMILIES["gemma2"], tmp_path_factory.mktemp("gemma2"))


def test_layers_that_are_computed_twice_give_the_same_gradients(gemma: Path) -> None:
    decoder = load_transformers_decoder(gemma, torch.float64, CPU)
    found = []
    for free in (0, 1 << 40):
        lora = trained_lora(decoder)
        tokens = random.Random(0).choices(range(200), k=40)
        sequence = TrainingSequence(tokens, [Span(0, 9, 40, [-5.0] * 31, [1.0] * 31)])
        Trainer(decoder, lora, PolicyLoss(), free=lambda _device, free=free: free).forward_backward([sequence])
        found.append([parameter.grad for parameter in lora.parameters()])
    for once, twice in zip(*found, strict=True):
        assert once is not None
        torch.testing.assert_close(once, twice)


def test_a_sequence_that_has_lost_its_state_is_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_random(STATE_FAMILIES["lfm2"], tmp_path)
    decoder = load_transformers_decoder(model, torch.float32, CPU)
    prompts = [random.Random(seed).choices(range(3, 200), k=28) for seed in range(3)]
    arrivals = [(0, Add(i, request(prompt, temperature=1.0, seed=i), 0, 0)) for i, prompt in enumerate(prompts)]
    roomy = run(make_worker(decoder, model), list(arrivals))
    narrow = make_worker(decoder, model)
    narrow.scheduler.pool = PagePool(6)  # enough for the prompts, but not for the answers
    sent_back = []
    preempt = narrow.scheduler._preempt
    monkeypatch.setattr(narrow.scheduler, "_preempt", lambda: (sent_back.append(1), preempt()))
    answers = run(narrow, list(arrivals))
    assert sent_back
    assert {key: ids(tokens) for key, tokens in answers.items()} == {key: ids(tokens) for key, tokens in roomy.items()}
    # Scoring reads the same text in one pass, without a state before it.
    text = [*prompts[0], *ids(roomy[0, 0])]
    narrow.obey(Score(9, ScoreRequest(text, len(roomy[0, 0])), 0))
    logprobs = narrow.step().scores[9].logprobs
    assert logprobs == pytest.approx([token.logprob for token in roomy[0, 0]], abs=1e-4)


def test_the_text_part_of_a_model_with_a_state_and_images_is_served(tmp_path: Path) -> None:
    vision = {"hidden_size": 16, "intermediate_size": 16, "depth": 1, "num_heads": 2, "out_hidden_size": 64}
    config = Qwen3_5Config(text_config=STATE_FAMILIES["qwen3.5"].to_dict(), vision_config=vision)
    torch.manual_seed(0)
    whole = Qwen3_5ForConditionalGeneration(config).eval()
    whole.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    decoder = load_transformers_decoder(runnable(tmp_path), torch.float32, CPU)
    answers = run(make_worker(decoder, tmp_path), [(0, Add(0, request([5, 6, 7], temperature=1.0, seed=1), 0, 0))])
    expected = logprobs_of(whole, [5, 6, 7], answers[0, 0])
    assert [token.logprob for token in answers[0, 0]] == pytest.approx(expected, abs=1e-4)


def test_a_model_whose_attention_differs_is_refused_with_the_numbers(
    gemma: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = load_language_model(gemma, torch.float32, CPU, compare=True)
    assert isinstance(decoder, TransformersDecoder)
    make_worker(decoder, gemma)
    monkeypatch.setattr(transformers_decoder, "AttentionForm", lambda *_form: PLAIN)
    numbers = r"differ .* by 0\.\d+ on average and \d\.\d+ at most, where 0\.001"
    with pytest.raises(UnsupportedModel, match=numbers):
        make_worker(decoder, gemma)
    with pytest.raises(UnsupportedModel, match=numbers):
        load_language_model(gemma, torch.float32, CPU, compare=True)


def test_a_decoder_can_be_pickled_without_its_modules(gemma: Path) -> None:
    """On CUDA the learner opens it in this way."""
    decoder = load_transformers_decoder(gemma, torch.float32, CPU)
    assert decoder.model is not None
    again = pickle.loads(pickle.dumps(decoder))
    assert "model" not in vars(again)
    assert again.tensors[0].equal(decoder.tensors[0])


def test_weights_that_do_not_fit_are_refused(gemma: Path, tmp_path: Path) -> None:
    tensors = load_file(gemma / "model.safetensors")
    tmp_path.joinpath("config.json").write_text((gemma / "config.json").read_text())
    name = "model.layers.1.self_attn.k_proj.weight"
    for change, reason in (
        ({name: tensors[name][:3].clone()}, f"{name} has another size"),
        ({name: None}, f"no tensor {name}"),
    ):
        kept = {key: tensor for key, tensor in {**tensors, **change}.items() if tensor is not None}
        save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(UnsupportedModel, match=reason):
            load_transformers_decoder(tmp_path, torch.float32, CPU)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (MambaConfig(**OTHERS), "keeps the state of a text in a form of its own"),
        (BambaConfig(**OTHERS, **MAMBA, attn_layer_indices=[1], mamba_d_head=32), r"differ .* by \d\.\d+ on average"),
        (OPTConfig(**OTHERS, ffn_dim=96, word_embed_proj_dim=64), "cannot be set back to Transformers' own"),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_a_family_that_transformers_computes_in_another_way_is_refused(
    config: Any, reason: str, tmp_path: Path
) -> None:
    save_random(config, tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises((ModelNotFound, UnsupportedModel), match=reason):
        make_worker(load_transformers_decoder(runnable(tmp_path), torch.float32, CPU), tmp_path)


@pytest.mark.parametrize(
    ("changes", "longest"),
    [
        ({}, 256),
        ({"layer_types": ["chunked_attention"] * 3, "attention_chunk_size": 64}, 64),
        ({"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 32}}, 32),
    ],
)
def test_the_context_ends_where_texts_of_a_batch_would_change_each_other(
    gemma: Path, changes: dict[str, Any], longest: int
) -> None:
    config = AutoConfig.from_pretrained(gemma)
    for name, value in changes.items():
        setattr(config, name, value)
    calls = [transformers_sizes.AttentionProbe("", 4, 2, 16, 24)] * 3
    assert transformers_sizes.max_context(config, calls) == longest
    assert transformers_sizes.max_context(config, [call._replace(window=None) for call in calls]) == min(
        longest, 24 if "layer_types" not in changes else longest
    )


def test_what_a_family_can_do_is_said(gemma: Path, tiny_model: Path, tmp_path: Path) -> None:
    assert "LlamaForCausalLM is computed by our own decoder. It has prefix cache" in describe_family(tiny_model)
    assert "Gemma2ForCausalLM is computed by the code of Transformers" in describe_family(gemma)
    STATE_FAMILIES["lfm2"].save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["Lfm2ForCausalLM"]}))
    assert "keeps a state for each sequence. It is slower" in describe_family(tmp_path)
    assert "It has --quantize; not prefix cache, packed training" in describe_family(tmp_path)


def test_an_adapter_of_another_model_is_refused(gemma: Path, tmp_path: Path) -> None:
    decoder = load_transformers_decoder(gemma, torch.float32, CPU)
    other = replace(decoder.shape, adaptable=decoder.shape.adaptable[:2])
    trained_lora(decoder).save(tmp_path, "gemma2")
    with pytest.raises(ValueError, match=r"adapts model\.layers\.0\.\w+\.\w+_proj, which this model"):
        LoraWeights.load(tmp_path, other)
    answer = make_worker(replace(decoder, shape=other), gemma).obey(LoadPolicy(1, 1, tmp_path))
    assert isinstance(answer, PolicyLoaded)
    assert "which this model does not have or cannot adapt" in str(answer.error)
