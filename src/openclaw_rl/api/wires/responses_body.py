"""A response of the Responses API, as it is answered and as it is read again later."""

from typing import Any

from openclaw_rl.api.wires.responses_request import ResponsesRequest

#: How the ids of responses begin, and of those whose request had instructions.
RESPONSE, INSTRUCTED = "resp_", "resp_i_"


def response_body(
    id: str,
    model: str,
    created: int,
    output: list[dict[str, Any]],
    repeated: dict[str, Any],
    usage: dict[str, Any],
    *,
    is_cut: bool,
    is_stored: bool,
) -> dict[str, Any]:
    """`repeated`: the fields that repeat the request, without those that the request left out."""
    return {
        "id": id,
        "object": "response",
        "created_at": created,
        "status": "incomplete" if is_cut else "completed",
        "background": False,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "model": model,
        "output": output,
        "service_tier": "default",
        "store": is_stored,
        "truncation": "disabled",
        "usage": usage,
        **LEFT_OUT,
        **repeated,
    }


def repeated_fields(request: ResponsesRequest) -> dict[str, Any]:
    """The fields of a response that repeat its request and that the ledger does not have otherwise."""
    text = request.text.format if request.text else None
    return {
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": {"effort": request.reasoning.effort if request.reasoning else None, "summary": None},
        "text": {"format": text.model_dump(by_alias=True, exclude_unset=True) if text else {"type": "text"}},
        "tool_choice": request.tool_choice or "auto",
    }


#: The values of fields that a request left out.
LEFT_OUT = {"instructions": None, "tools": [], **repeated_fields(ResponsesRequest(input=""))}


def usage_body(prompt_tokens: int, cached_tokens: int, answer_tokens: int) -> dict[str, Any]:
    return {
        "input_tokens": prompt_tokens,
        "input_tokens_details": {"cached_tokens": cached_tokens, "cache_write_tokens": 0},
        "output_tokens": answer_tokens,
        # Which tokens were reasoning is not counted.
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt_tokens + answer_tokens,
    }
