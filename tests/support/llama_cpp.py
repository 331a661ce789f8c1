"""What llama.cpp computes from a GGUF file. `ask` runs this file in a Python that has xllamacpp."""

import json
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CONTEXT = 512


def ask(
    python: str, model: Path, lora: Path | None = None, *, prompts: Sequence[list[int]] = (), texts: Sequence[str] = ()
) -> dict[str, Any]:
    """Log-probs of all next tokens after each prompt (`logprobs`), and the ids of each text (`ids`)."""
    job = {"model": str(model), "lora": lora and str(lora), "prompts": list(prompts), "texts": list(texts)}
    done = subprocess.run([python, __file__], input=json.dumps(job), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def serve(model: str, lora: str | None) -> Any:
    """llama.cpp's server in this process, as exact as it can compute."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = model
    params.n_ctx = CONTEXT
    params.n_parallel = 1
    params.warmup = False
    params.cpuparams.n_threads = 2
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    if lora:
        params.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(lora, 1.0)]
    return xllamacpp.Server(params)


def logprobs(server: Any, prompt: list[int]) -> list[list[float]]:
    """[id, log-prob] of every token of the vocabulary, as the model computes them."""
    # An end, or a byte that is no character yet, is answered without log-probs; so another token is made to win.
    winner = ids_of(server, "a")[-1]
    request = {"prompt": prompt, "n_predict": 1, "n_probs": 1 << 20, "temperature": 0, "cache_prompt": False}
    answer = server.handle_completions({**request, "logit_bias": [[winner, 1000]]})
    top = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    return [[token["id"], token["logprob"]] for token in top]


def ids_of(server: Any, text: str) -> list[int]:
    body = json.dumps({"content": text, "add_special": True, "parse_special": True}).encode()
    request = urllib.request.Request(f"{server.listening_address}/tokenize", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        ids: list[int] = json.load(answer)["tokens"]
    return ids


def main() -> None:
    job = json.load(sys.stdin)
    server = serve(job["model"], job["lora"])
    found = {
        "logprobs": [logprobs(server, prompt) for prompt in job["prompts"]],
        "ids": [ids_of(server, text) for text in job["texts"]],
    }
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
