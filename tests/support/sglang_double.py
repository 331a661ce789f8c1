"""A double of SGLang's server, as a program: the endpoints that we use, with the tiny model behind them.

Shapes, refusals and defaults are those of SGLang 0.5.23. If OPENCLAW_RL_SGLANG names a folder with SGLang's package
(`make test-sglang`), its own types decode every request and encode every answer.
"""

import argparse
import ast
import contextlib
import importlib
import json
import os
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from openclaw_rl.types import Priority, SampledToken, SampleRequest, SamplingParams, ScoreRequest
from support.constraints import after_the_mask, constraint_of
from support.model_server import ModelServer, NoSuchModel, new_app, serve

SGLANG = os.environ.get("OPENCLAW_RL_SGLANG", "")
FIELDS = {"input_ids", "stream", "return_logprob", "logprob_start_len", "top_logprobs_num", "sampling_params"}
FIELDS |= {"lora_path", "priority", "cache_salt"}
PARAMS = {"max_new_tokens", "temperature", "top_p", "top_k", "sampling_seed", "stop_token_ids", "ignore_eos"}
PARAMS |= {"no_stop_trim", "structural_tag"}
RELOAD_FIELDS = {"model_path", "weight_version", "flush_cache"}


def api_types() -> Any:
    """SGLang's own request and answer types, if they are there. They are loaded without the rest of its package."""
    if not SGLANG:
        return None
    sys.path += [SGLANG, str(Path(SGLANG) / "sglang" / "api" / "v1")]
    types = importlib.import_module("api_types")
    # Its own decoder ignores fields that it does not know, so a misspelt one would do nothing.
    assert set(types.GenerateRequest.__struct_fields__) >= FIELDS
    assert fields_of("UpdateWeightFromDiskReqInput") >= RELOAD_FIELDS
    return types


def fields_of(name: str) -> set[str]:
    """The fields of a type in a module of SGLang that loads only with the rest of its package."""
    module = ast.parse((Path(SGLANG) / "sglang" / "srt" / "managers" / "io_struct.py").read_text())
    (found,) = [node for node in module.body if isinstance(node, ast.ClassDef) and node.name == name]
    return {
        node.target.id for node in found.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


TYPES = api_types()


class Refused(Exception):
    """An answer with status 400, which is SGLang's for all mistakes of a client."""


def check(body: dict[str, Any], options: argparse.Namespace) -> None:
    if TYPES is not None:
        TYPES.GenerateRequest.from_json_value(body)
    if unknown := (set(body) - FIELDS) | (set(body["sampling_params"]) - PARAMS):
        raise Refused(f"unknown fields {sorted(unknown)}")
    if len(body["input_ids"]) >= options.context_length:
        raise Refused(f"The input is longer than the model's context length {options.context_length}.")
    if body["sampling_params"].get("top_k") == 0:
        raise Refused("top_k must be -1 (disable), or at least 1")


def entries(ids: Sequence[int], logprobs: Sequence[float]) -> list[list[Any]]:
    return [[float(logprob), int(id), None] for id, logprob in zip(ids, logprobs, strict=True)]


def as_sent(answer: dict[str, Any]) -> str:
    if TYPES is not None:
        TYPES.GenerateResponse.from_json_value(answer)
    return json.dumps(answer)


def create(model: ModelServer, options: argparse.Namespace) -> FastAPI:
    app = new_app(model)
    folders: dict[str, Path] = {}

    @app.exception_handler(Refused)
    async def refuse(_request: Request, error: Refused) -> JSONResponse:
        return JSONResponse({"error": {"message": str(error)}}, 400)

    @app.get("/server_info")
    async def server_info() -> dict[str, Any]:
        info = {
            "version": "0.5.23+double",
            "max_context_length": options.context_length,
            "enable_lora": options.enable_lora,
            "enable_priority_scheduling": options.enable_priority_scheduling,
        }
        if TYPES is not None:
            known = TYPES.GetServerInfoResponse.from_json_value(info)
            assert (known.version, known.max_context_length) == (info["version"], options.context_length)
        return info

    @app.get("/model_info")
    async def model_info() -> dict[str, Any]:
        info = {"model_path": str(options.model_path), "served_model_name": options.served_model_name}
        if TYPES is not None:
            assert TYPES.GetModelInfoResponse.from_json_value(info).served_model_name == info["served_model_name"]
        return info

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        base = options.served_model_name
        names = [{"id": name, "root": str(folders[name]), "parent": base} for name in model.slots]
        return {"data": [{"id": base, "root": base, "parent": None}, *names]}

    @app.post("/load_lora_adapter")
    async def load(body: dict[str, Any]) -> JSONResponse:
        name, folder = body["lora_name"], Path(body["lora_path"])
        problem = f"{name} is already loaded" if name in model.slots else None
        if problem is None and not (folder / "adapter_config.json").is_file():
            problem = f"Can't find 'adapter_config.json' at '{folder}'"
        if problem is None and json.loads((folder / "adapter_config.json").read_text())["r"] > options.max_lora_rank:
            problem = "LoRA rank is larger than max_lora_rank"
        problem = problem or model.load(name, folder)
        folders[name] = folder
        return JSONResponse({"success": not problem, "error_message": problem or ""}, 400 if problem else 200)

    @app.post("/unload_lora_adapter")
    async def unload(body: dict[str, Any]) -> JSONResponse:
        gone = model.slots.pop(body["lora_name"], None) is None
        return JSONResponse({"success": not gone, "error_message": ""}, 400 if gone else 200)

    @app.post("/generate", response_model=None)
    async def generate(body: dict[str, Any]) -> Response | StreamingResponse:
        check(body, options)
        try:
            slot = model.slot(body["lora_path"], None)
        except NoSuchModel as error:
            raise Refused(f"The following requested LoRA adapters are not loaded: {error}") from error
        if body.get("stream"):
            return StreamingResponse(stream(model, body, slot, options), media_type="text/event-stream")
        async with model.working():
            return Response(as_sent(await prefill(model, body, slot)), media_type="application/json")

    @app.post("/update_weights_from_disk")
    async def update_weights(body: dict[str, Any]) -> JSONResponse:
        assert set(body) <= RELOAD_FIELDS
        await model.pause()
        problem = model.replace_weights(Path(body["model_path"]))
        if problem is None:
            model.weights = body["weight_version"]
            if body.get("flush_cache", True):
                model.empty_cache()
        model.resume()
        answer = {"success": problem is None, "message": problem or "Succeeded.", "num_paused_requests": 0}
        return JSONResponse(answer, 400 if problem else 200)

    return app


async def stream(
    model: ModelServer, body: dict[str, Any], slot: int, options: argparse.Namespace
) -> AsyncIterator[str]:
    params, top = body["sampling_params"], body["top_logprobs_num"]
    settings = SamplingParams(
        max_tokens=params["max_new_tokens"],
        temperature=params["temperature"],
        top_p=params["top_p"],
        top_k=max(0, params["top_k"]),
        seed=params["sampling_seed"],
        stop_token_ids=frozenset(params["stop_token_ids"]),
        top_logprobs=top,
    )
    request = SampleRequest(
        body["input_ids"],
        settings,
        priority=Priority(-body.get("priority", 0)),
        owner=body.get("cache_salt", ""),
        constraint=constraint_of(params.get("structural_tag")),
    )
    so_far: list[SampledToken] = []
    async with model.working(), contextlib.aclosing(model.sample(request, slot)) as batches:
        async for tokens, cached in batches:
            so_far += [after_the_mask(token, request) for token in tokens]
            shown = so_far[-len(tokens) :] if options.incremental_streaming_output else so_far
            finish = {"type": str(tokens[-1].finish)} if tokens[-1].finish else None
            if finish == {"type": "length"}:
                finish["length"] = len(so_far)  # type: ignore[assignment]
            elif finish:
                finish["matched"] = tokens[-1].token_id  # type: ignore[assignment]
            info = {
                "id": "double",
                "prompt_tokens": len(body["input_ids"]),
                "completion_tokens": len(so_far),
                "cached_tokens": cached,
                "weight_version": model.weights,
                "finish_reason": finish,
                "output_token_logprobs": entries([t.token_id for t in shown], [t.logprob for t in shown]),
                "output_top_logprobs": [entries(*zip(*t.top, strict=True)) if t.top else None for t in shown],
            }
            answer = {"text": "", "output_ids": [t.token_id for t in shown], "meta_info": info}
            yield f"data: {as_sent(answer)}\n\n"
    yield "data: [DONE]\n\n"


async def prefill(model: ModelServer, body: dict[str, Any], slot: int) -> dict[str, Any]:
    """The log-probs of the input from logprob_start_len on; the first has none."""
    ids, start, top = body["input_ids"], body["logprob_start_len"], body["top_logprobs_num"]
    scores = await model.score(
        ScoreRequest(ids, len(ids) - start - 1, top_k=top, owner=body.get("cache_salt", "")), slot
    )
    info: dict[str, Any] = {"id": "double", "prompt_tokens": len(ids), "completion_tokens": 0}
    info["finish_reason"], info["weight_version"] = {"type": "length", "length": 0}, model.weights
    info["input_token_logprobs"] = [[None, ids[start], None], *entries(ids[start + 1 :], scores.logprobs)]
    if scores.top is not None:
        rows = zip(scores.top.ids, scores.top.logprobs, strict=True)
        info["input_top_logprobs"] = [None, *(entries(row, logprobs) for row, logprobs in rows)]
    return {"text": "", "output_ids": [], "meta_info": info}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-path", type=Path, required=True)
    parser.add_argument("--served-model-name", default="base")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--context-length", type=int, default=257)
    parser.add_argument("--max-running-requests", type=int, default=4)
    parser.add_argument("--max-lora-rank", type=int, default=16)
    parser.add_argument("--enable-lora", action="store_true")
    parser.add_argument("--enable-priority-scheduling", action="store_true")
    parser.add_argument("--incremental-streaming-output", action="store_true")
    options, _others = parser.parse_known_args()
    model = ModelServer(options.model_path, options.max_running_requests, options.max_lora_rank)
    serve(create(model, options), options)


if __name__ == "__main__":
    main()
