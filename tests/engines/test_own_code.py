"""Folders that bring the code of their model: run only if --trust-remote-code allows it, and computed right then."""

import json
import random
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, dynamic_module_utils

from openclaw_rl.cli import main
from openclaw_rl.engines.local.families import describe_family, needed_code, runnable
from openclaw_rl.engines.local.family_size import size_of_model
from openclaw_rl.engines.local.model.model_config import UnsupportedModel
from openclaw_rl.engines.local.model.shared_weights import share, take_up
from openclaw_rl.engines.local.model.transformers_decoder import (
    TransformersDecoder,
    load_language_model,
    load_transformers_decoder,
)
from openclaw_rl.engines.local.process.sampler_worker import Worker
from openclaw_rl.engines.local.process.worker_messages import Add, LoadPolicy, PolicyLoaded, WorkerOptions
from openclaw_rl.engines.local.training.lora import LoraWeights
from openclaw_rl.engines.local.training.trainer import Trainer
from openclaw_rl.losses.policy import PolicyLoss
from openclaw_rl.models import ModelNotFound
from openclaw_rl.types import Span, TrainingSequence
from support.own_code import ALONE, ATTENDING, STATELESS, save_with_code
from support.server_program import SERVE, serving, until
from support.trainers import trained_lora
from support.workers import ids, request, run

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers copies code that it runs into this folder."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))


def changed(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


@pytest.mark.parametrize(
    "command",
    [
        ("serve",),
        ("serve", "--dry-run"),
        ("serve", "--sampler", "vllm", "--dry-run"),
        ("serve", "--sampler", "upstream", "--upstream-url", "http://127.0.0.1:9"),
        ("doctor",),
        ("train", "runs/other"),
        ("eval", "--own-server"),
        pytest.param(("rollout", "--env", "toolcall", "--own-server"), marks=pytest.mark.more),
        ("merge", "no-adapter", "out"),
        ("merge", "FOLDER", "out", "--gguf", "f32"),
        ("import", "conversations.jsonl"),
    ],
    ids=" ".join,
)
def test_no_command_runs_the_code_of_a_folder(
    command: tuple[str, ...],
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    mark = save_with_code(tiny_model, tmp_path / "model")
    words = [word.replace("FOLDER", str(tmp_path / "model")) for word in command]
    with pytest.MonkeyPatch.context() as context:
        # Nobody who is asked would say yes.
        context.setattr("builtins.input", lambda _question: "y")
        code = main([*words, "--model-name", str(tmp_path / "model")])
    assert code != 0
    assert not mark.exists()
    assert not (tmp_path / "modules").exists()
    if command[0] == "serve" and "upstream" not in command:
        said = capsys.readouterr().err
        assert "which only its own code modeling_mine.MineForCausalLM knows: it would run on this machine" in said
        assert "with all your rights, so read it first, and then allow it with --trust-remote-code." in said


def test_what_is_known_without_the_code_is_found_without_it(tiny_model: Path, tmp_path: Path) -> None:
    mark = save_with_code(tiny_model, folder := tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    assert runnable(folder, trusts_code=True) == folder
    assert "code of its own, modeling_mine.MineForCausalLM, which runs in the worker processes" in describe_family(
        folder
    )
    assert size_of_model(config) is None
    with pytest.raises(UnsupportedModel, match="which needs --trust-remote-code"):
        load_transformers_decoder(folder, torch.float32, CPU)
    # Where the family is known, the folder's code is not needed, and never runs.
    for family, kind in (("LlamaForCausalLM", "llama"), ("Olmo2ForCausalLM", "olmo2")):
        changed(folder, architectures=[family], model_type=kind)
        assert not needed_code(json.loads((folder / "config.json").read_text()))
        assert runnable(folder) == folder
    changed(folder, architectures=["LlamaForCausalLM"], model_type="llama")
    load_language_model(folder, torch.float32, CPU, trusts_code=True)
    assert not mark.exists()


def test_dry_run_says_that_the_code_will_run_and_does_not_run_it(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mark = save_with_code(tiny_model, folder := tmp_path / "model")
    flags = ("--model-name", str(folder), "--trust-remote-code", "--run-dir", str(tmp_path / "run"))
    assert main(["serve", "--dry-run", *flags]) == 0
    assert "MineForCausalLM is computed by code of its own" in " ".join(capsys.readouterr().out.split())
    assert not mark.exists()


@pytest.mark.parametrize("code", [ATTENDING, ALONE], ids=["our attention", "its own"])
def test_own_code_has_the_logprobs_of_transformers_and_is_trained(code: str, tiny_model: Path, tmp_path: Path) -> None:
    mark = save_with_code(tiny_model, folder := tmp_path / "model", code)
    decoder, shared = share(load_transformers_decoder(folder, torch.float32, CPU, trusts_code=True))
    assert mark.exists()
    assert isinstance(decoder, TransformersDecoder)
    assert decoder.mixes_sequences == (code == ATTENDING)
    lora = trained_lora(decoder)
    lora.save(tmp_path / "adapter", "model")
    worker = Worker(decoder, WorkerOptions(folder, "cpu", "float32", 8, None, 0.02, 4, 4))
    assert worker.obey(LoadPolicy(1, 1, tmp_path / "adapter")) == PolicyLoaded(1)
    prompt = random.Random(0).choices(range(3, 200), k=40)
    answers = run(worker, [(0, Add(i, request(prompt, temperature=1.0, seed=i), i, i)) for i in (0, 1)])
    base: Any = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    models = [base, PeftModel.from_pretrained(base, tmp_path / "adapter").eval()]
    for i, model in reversed(list(enumerate(models))):
        answer = ids(answers[i, 0])
        with torch.no_grad():
            if i == 0:
                models[1].disable_adapter_layers()
            rows = model(torch.tensor([[*prompt, *answer]])).logits[0].log_softmax(-1)
        expected = [rows[len(prompt) - 1 + place, token].item() for place, token in enumerate(answer)]
        assert [token.logprob for token in answers[i, 0]] == pytest.approx(expected, abs=1e-4)

    # The learner opens the same weights, and moves the adapter.
    assert shared is not None
    taken = take_up(shared)
    again = LoraWeights.load(tmp_path / "adapter", decoder.shape)
    assert isinstance(taken, TransformersDecoder)
    sequence = TrainingSequence([*prompt, *ids(answers[1, 0])], [Span(0, 40, 52, [-5.0] * 12, [1.0] * 12)])
    Trainer(taken, again, PolicyLoss()).forward_backward([sequence])
    assert all(one.grad is not None and one.grad.isfinite().all() for one in again.parameters())
    assert any(one.grad.abs().max() > 0 for one in again.parameters())


def test_own_code_that_cannot_be_used_is_refused_in_a_sentence(tiny_model: Path, tmp_path: Path) -> None:
    save_with_code(tiny_model, folder := tmp_path / "model", STATELESS)
    with pytest.raises(
        UnsupportedModel, match=r"modeling_mine\.MineForCausalLM keeps the state of a text in a form of"
    ):
        load_transformers_decoder(folder, torch.float32, CPU, trusts_code=True)
    (folder / "modeling_mine.py").write_text("import a_package_that_nobody_has")
    with pytest.raises(UnsupportedModel, match=r"cannot load it: This modeling file requires .* a_package_that_nobody"):
        load_transformers_decoder(folder, torch.float32, CPU, trusts_code=True)
    changed(folder, auto_map={"AutoModelForCausalLM": "somebody/else--modeling_mine.MineForCausalLM"})
    with pytest.raises(ModelNotFound, match="code from elsewhere is not fetched: put it there"):
        runnable(folder, trusts_code=True)


def test_own_code_with_weights_of_four_bits(tiny_model: Path, tmp_path: Path) -> None:
    save_with_code(tiny_model, folder := tmp_path / "model")
    decoder = load_language_model(folder, torch.float32, CPU, quantize="4bit", compare=True, trusts_code=True)
    plain = load_language_model(folder, torch.float32, CPU, trusts_code=True)
    assert decoder.weight_bytes < plain.weight_bytes


@pytest.mark.more
def test_a_server_answers_and_learns_with_the_code_of_a_folder(tiny_model: Path, tmp_path: Path) -> None:
    mark = save_with_code(tiny_model, folder := tmp_path / "model")
    flags = ("--method", "rl", "--judge", "feedback", "--batch-size", "2", "--lora-rank", "4", "--max-kl", "100")
    with serving(SERVE, folder, "--run-dir", str(tmp_path / "run"), "--trust-remote-code", *flags) as program:
        assert mark.exists()
        for score in (1, -1):
            asked = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 6}
            answer = httpx.post(f"{program.url}/v1/chat/completions", json=asked, timeout=60).json()
            httpx.post(f"{program.url}/v1/feedback", json={"id": answer["id"], "score": score}, timeout=60)
        until(lambda: httpx.get(f"{program.url}/readyz").json()["policy_version"] > 0, program)
