"""A double of vLLM's server, as a program: the endpoints that we use, with the tiny model behind them.

Shapes, refusals and defaults are those of vLLM 0.32. `make test-vllm` runs the same tests on the real server.
"""

import argparse
import base64
import contextlib
import io
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from openclaw_rl.types import Priority, SampledToken, SampleRequest, SamplingParams, ScoreRequest
from support.constraints import after_the_mask, constraint_of
from support.model_server import ModelServer, NoSuchModel, new_app, serve

FIELDS = {"model", "token_ids", "stream", "stream_options", "sampling_params", "priority", "cache_salt"}


class Refused(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def refusal(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "type": "BadRequestError", "code": status}}, status)


def entry(token_id: int, logprob: float, rank: int) -> dict[str, Any]:
    return {"token_id": token_id, "logprob": logprob, "rank": rank}


def logprobs_of(token: SampledToken, k: int) -> dict[str, Any]:
    """The sampled token first, then the likeliest; k in all."""
    rank = next((place for place, (id, _) in enumerate(token.top, 1) if id == token.token_id), len(token.top) + 1)
    own = entry(token.token_id, token.logprob, rank)
    others = [entry(id, logprob, place) for place, (id, logprob) in enumerate(token.top, 1) if id != token.token_id]
    return {**own, "top_logprobs": [own, *others][:k]}


def create(model: ModelServer, options: argparse.Namespace) -> FastAPI:
    app = new_app(model)
    folders: dict[str, Path] = {}

    @app.exception_handler(Refused)
    async def refuse(_request: Request, error: Refused) -> JSONResponse:
        return refusal(error.status, str(error))

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": "0.32.0+double"}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        base = options.served_model_name
        names = [{"id": base, "root": str(options.model), "parent": None, "max_model_len": options.max_model_len}]
        return {"data": names + [{"id": name, "root": str(folders[name]), "parent": base} for name in model.slots]}

    @app.post("/v1/load_lora_adapter")
    async def load(body: dict[str, str]) -> Response:
        name, folder = body["lora_name"], Path(body["lora_path"])
        if name in model.slots:
            raise Refused(400, f"The lora adapter '{name}' has already been loaded.")
        if not (folder / "adapter_config.json").is_file():
            raise Refused(404, f"No adapter found for {folder}")
        rank = json.loads((folder / "adapter_config.json").read_text())["r"]
        if rank > options.max_lora_rank:
            raise Refused(400, f"LoRA rank {rank} is greater than max_lora_rank {options.max_lora_rank}.")
        if problem := model.load(name, folder):
            raise Refused(400, problem)
        folders[name] = folder
        return Response("Success: LoRA adapter added")

    @app.post("/v1/unload_lora_adapter")
    async def unload(body: dict[str, str]) -> Response:
        if model.slots.pop(body["lora_name"], None) is None:
            raise Refused(404, f"The lora adapter '{body['lora_name']}' cannot be found.")
        return Response("Success")

    if options.dev_mode:
        add_weight_endpoints(app, model, options)

    @app.post("/inference/v1/generate", response_model=None)
    async def generate(body: dict[str, Any]) -> JSONResponse | StreamingResponse:
        if not options.enable_scale_out:
            raise Refused(403, "The endpoint is disabled")
        check(body, options)
        try:
            slot = model.slot(body["model"], options.served_model_name)
        except NoSuchModel as error:
            raise Refused(404, f"The model `{error}` does not exist.") from error
        if body.get("stream"):
            return StreamingResponse(stream(model, body, slot), media_type="text/event-stream")
        async with model.working():
            die_if_half_loaded(model)
            weights = [{"version": model.weights, "start": 0, "end": 1}]
            choice = {"index": 0, "token_ids": [1], "finish_reason": "length", "weight_versions": weights}
            answer: dict[str, Any] = {"choices": [choice]}
            if body["sampling_params"].get("prompt_logprobs") is not None:
                answer |= await prompt_logprobs(model, body, slot)
        return JSONResponse(answer)

    return app


def add_weight_endpoints(app: FastAPI, model: ModelServer, options: argparse.Namespace) -> None:
    """What VLLM_SERVER_DEV_MODE=1 adds."""

    @app.post("/pause")
    async def pause(mode: str = "abort") -> dict[str, str]:
        assert mode == "wait"
        await model.pause()
        return {"status": "paused"}

    @app.post("/resume")
    async def resume() -> dict[str, str]:
        model.resume()
        return {"status": "resumed"}

    @app.post("/collective_rpc")
    async def call(body: dict[str, Any]) -> dict[str, Any]:
        assert body["method"] == "reload_weights"
        problem = model.replace_weights(Path(body["kwargs"]["weights_path"]))
        model.is_half_loaded = problem is not None
        if problem is not None:
            raise Refused(500, f"Call to collective_rpc method failed: {problem}")
        return {"results": [None]}

    @app.post("/reset_prefix_cache")
    async def reset() -> Response:
        model.empty_cache()
        return Response() if getattr(options, "empty_answers", False) else JSONResponse({"success": True})

    @app.post("/update_weight_version")
    async def name_weights(body: dict[str, str]) -> dict[str, Any]:
        model.weights = body["new_version"]
        return {"success": True, "new_version": model.weights}


def die_if_half_loaded(model: ModelServer) -> None:
    """vLLM's engine dies of the first request after weights that could not be read."""
    if model.is_half_loaded:
        os._exit(1)


def check(body: dict[str, Any], options: argparse.Namespace) -> None:
    """Refuse what vLLM refuses."""
    params = body["sampling_params"]
    if unknown := set(body) - FIELDS:
        raise Refused(400, f"Extra inputs are not permitted: {unknown}")
    if len(body["token_ids"]) >= options.max_model_len:
        raise Refused(400, f"The prompt is longer than the maximum model length of {options.max_model_len}.")
    if params["max_tokens"] < 1:
        raise Refused(400, "max_tokens must be at least 1")
    if body.get("priority") and options.scheduling_policy != "priority":
        raise Refused(400, "Got priority but Priority scheduling is not enabled")
    for name in ("logprobs", "prompt_logprobs"):
        if (params.get(name) or 0) > options.max_logprobs:
            raise Refused(400, f"Requested {name}, which is greater than max allowed: {options.max_logprobs}")
    if params.get("prompt_logprob_token_ids") is not None and not options.scores_targets:
        raise Refused(400, "prompt_logprob_token_ids requires the V2 model runner")


async def stream(model: ModelServer, body: dict[str, Any], slot: int) -> AsyncIterator[str]:
    params = body["sampling_params"]
    settings = SamplingParams(
        max_tokens=params["max_tokens"],
        temperature=params["temperature"],
        top_p=params["top_p"],
        top_k=params["top_k"],
        seed=params["seed"],
        stop_token_ids=frozenset(params["stop_token_ids"]),
        top_logprobs=params["logprobs"],
    )
    request = SampleRequest(
        body["token_ids"],
        settings,
        priority=Priority(body.get("priority", 0)),
        owner=body.get("cache_salt", ""),
        constraint=constraint_of((params.get("structured_outputs") or {}).get("structural_tag")),
    )
    known, count = 0, 0
    async with model.working(), contextlib.aclosing(model.sample(request, slot)) as batches:
        die_if_half_loaded(model)
        async for tokens, cached in batches:
            known = cached
            for token in tokens:
                count += 1
                choice: dict[str, Any] = {
                    "index": 0,
                    "token_ids": [token.token_id],
                    "finish_reason": token.finish,
                    "logprobs": {"content": [logprobs_of(after_the_mask(token, request), params["logprobs"])]},
                }
                if token.finish:
                    choice["weight_versions"] = [{"version": model.weights, "start": 0, "end": count}]
                yield f"data: {json.dumps({'choices': [choice]})}\n\n"
    usage = {"prompt_tokens": len(body["token_ids"]), "prompt_tokens_details": {"cached_tokens": known}}
    yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n"


async def prompt_logprobs(model: ModelServer, body: dict[str, Any], slot: int) -> dict[str, Any]:
    ids, params, salt = body["token_ids"], body["sampling_params"], body.get("cache_salt", "")
    chosen = params.get("prompt_logprob_token_ids")
    rows: list[dict[str, Any] | None] = [None]
    scores = await model.score(
        ScoreRequest(ids, len(ids) - 1, top_k=max(1, params["prompt_logprobs"]), owner=salt), slot
    )
    assert scores.top is not None
    for place, (id, logprob) in enumerate(zip(ids[1:], scores.logprobs, strict=True)):
        row = {str(id): {"logprob": logprob, "rank": len(scores.top.ids[place]) + 1}}
        for rank in range(params["prompt_logprobs"]):
            other = {"logprob": float(scores.top.logprobs[place][rank]), "rank": rank + 1}
            row[str(scores.top.ids[place][rank])] = other
        rows.append(row)
    if chosen is None:
        return {"prompt_logprobs": rows}
    count = len(ids) - 1 - params["prompt_logprob_start"]
    targets = (await model.score(ScoreRequest(ids, count, targets=np.array(chosen, np.int32)), slot)).targets
    file = io.BytesIO()
    np.save(file, np.asarray(targets))
    return {"prompt_logprobs": rows, "prompt_token_id_logprobs": base64.b64encode(file.getvalue()).decode()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--served-model-name", default="base")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--max-model-len", type=int, default=257)
    parser.add_argument("--max-num-seqs", type=int, default=4)
    parser.add_argument("--max-lora-rank", type=int, default=16)
    parser.add_argument("--max-logprobs", type=int, default=20)
    parser.add_argument("--scheduling-policy", default="fcfs")
    parser.add_argument("--enable-scale-out", action="store_true")
    parser.add_argument("--scores-targets", action="store_true", help="as the V2 runner on a GPU does")
    options, _others = parser.parse_known_args()
    options.dev_mode = os.environ.get("VLLM_SERVER_DEV_MODE") == "1"
    model = ModelServer(options.model, options.max_num_seqs, options.max_lora_rank)
    serve(create(model, options), options)


if __name__ == "__main__":
    main()
