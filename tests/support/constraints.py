"""Structural tags as constraints, and the log-probs under them, for the doubles of servers that take them."""

import json
from dataclasses import replace
from typing import Any

from openclaw_rl.types import Constraint, JsonForm, SampledToken, SampleRequest, Thinking


def after_the_mask(token: SampledToken, request: SampleRequest) -> SampledToken:
    """A token as a server reports it: log-probs are larger where its grammar has ruled other tokens out."""
    constraint = request.constraint
    if constraint is None or (constraint.trigger and not token.forced):
        return token
    return replace(token, logprob=token.logprob / 2, top=tuple((id, logprob / 2) for id, logprob in token.top))


def constraint_of(text: str | None) -> Constraint | None:
    """What a structural tag asks for; None without one. Fails for a tag of another shape than the servers know."""
    if text is None:
        return None
    wrapper = json.loads(text)
    assert wrapper["type"] == "structural_tag"
    body, thinking = wrapper["format"], Thinking.NONE
    if body["type"] == "sequence":
        thinking = Thinking.BEGUN
    elif body["type"] == "or" and body["elements"][0]["type"] == "sequence":
        body, thinking = body["elements"][0], Thinking.OPTIONAL
    if thinking is not Thinking.NONE:
        thought, gap, body = body["elements"]
        assert (thought["end"], gap["type"]) == ("</think>", "regex")
    if body["type"] == "triggered_tags":
        assert not body["at_least_one"]
        (trigger,) = body["triggers"]
        separator = None if body["stop_after_first"] else "\n"
        return Constraint(None, tuple(map(form_of, body["tags"])), separator, thinking, trigger)
    content, calls, separator = None, [], None
    for part in alternatives(body):
        if part["type"] == "tags_with_separator":
            assert part["at_least_one"]
            calls, separator = [form_of(tag) for tag in part["tags"]], part["separator"]
        elif part["begin"].startswith(("<tool_call>", "{")):
            calls.append(form_of(part))
        else:
            content = form_of(part)
    return Constraint(content, tuple(calls), separator, thinking)


def alternatives(body: dict[str, Any]) -> list[dict[str, Any]]:
    if body["type"] != "or":
        return [body]
    return [part for element in body["elements"] for part in alternatives(element)]


def form_of(tag: dict[str, Any]) -> JsonForm:
    assert (tag["type"], tag["content"]["type"]) == ("tag", "json_schema")
    return JsonForm(json.dumps(tag["content"]["json_schema"]), tag["begin"], tag["end"])
