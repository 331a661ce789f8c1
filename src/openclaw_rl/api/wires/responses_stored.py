"""A recorded answer as a response of the Responses API."""

from typing import Any

from openclaw_rl.api.wires.blocks import Block, BlockReader
from openclaw_rl.api.wires.responses_events import ItemWriter
from openclaw_rl.rendering.response import Delta, ReasoningText
from openclaw_rl.rendering.tool_calls import ParsedToolCall
from openclaw_rl.types import StoredTurn

#: How the ids of responses begin, and of those whose request had instructions.
RESPONSE, INSTRUCTED = "resp_", "resp_i_"


def stored_response(turn: StoredTurn, model: str) -> dict[str, Any]:
    """What the ledger knows of a response. Metadata and the choice of tools are not recorded."""
    is_cut = turn.finish_reason == "length"
    prompt, answer = len(turn.prompt_ids), len(turn.response_ids)
    writer = ItemWriter(turn.completion.removeprefix(INSTRUCTED).removeprefix(RESPONSE), is_encrypted=False)
    tools: list[Any] = next((message["tools"] for message in turn.messages if message["role"] == "tools"), [])
    is_instructed = turn.completion.startswith(INSTRUCTED)
    system = next((message["content"] for message in turn.messages if message["role"] == "system"), None)
    return {
        "id": turn.completion,
        "object": "response",
        "created_at": int(turn.created),
        "status": "incomplete" if is_cut else "completed",
        "background": False,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "instructions": system if is_instructed else None,
        "max_output_tokens": turn.sampling.get("max_tokens"),
        "metadata": {},
        "model": model,
        "output": [writer.item(block) for block in blocks(turn.message, is_cut)],
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "store": True,
        "temperature": turn.sampling.get("temperature"),
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [{"type": "function", "strict": False, **tool["function"]} for tool in tools],
        "top_p": turn.sampling.get("top_p"),
        "truncation": "disabled",
        "usage": {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": answer,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + answer,
        },
    }


def blocks(message: dict[str, Any], is_cut: bool) -> list[Block]:
    """An answer's reasoning, text and calls, in this order."""
    deltas: list[Delta] = []
    if thoughts := message.get("reasoning_content"):
        deltas.append(ReasoningText(thoughts))
    if content := message.get("content"):
        deltas.append(content)
    for call in message.get("tool_calls") or ():
        function = call["function"]
        deltas.append(ParsedToolCall(call["id"], function["name"], function["arguments"]))
    reader = BlockReader()
    for _event in (*reader.push(deltas), *reader.close(is_cut)):
        pass
    return reader.blocks
