"""Constraints as structural tags, which vLLM and SGLang both take."""

import json
from typing import Any

from openclaw_rl.types import Constraint, JsonForm, Thinking

#: The line breaks that models write after their reasoning.
GAP = {"type": "regex", "pattern": "\\n?\\n?"}
#: Without a bound, a small model may write whitespace until its answer is cut off. Old versions ignore the bound.
MAX_WHITESPACE = 1


def structural_tag(constraint: Constraint) -> str:
    """A constraint as JSON."""
    answers = [] if constraint.content is None else [tag(constraint.content)]
    if constraint.calls:
        answers.append(triggered(constraint) if constraint.trigger else calls(constraint))
    body = either(answers)
    match constraint.thinking:
        case Thinking.NONE:
            whole = body
        case Thinking.BEGUN:
            whole = after_thought("", body)
        case Thinking.OPTIONAL:
            whole = either([after_thought("<think>", body), body])
    return json.dumps({"type": "structural_tag", "format": whole})


def calls(constraint: Constraint) -> dict[str, Any]:
    """One call, or several."""
    tags = [tag(form) for form in constraint.calls]
    if constraint.separator is None:
        return either(tags)
    return {"type": "tags_with_separator", "tags": tags, "separator": constraint.separator, "at_least_one": True}


def triggered(constraint: Constraint) -> dict[str, Any]:
    """Free text with calls in it."""
    return {
        "type": "triggered_tags",
        "triggers": [constraint.trigger],
        "tags": [tag(form) for form in constraint.calls],
        "at_least_one": False,
        "stop_after_first": constraint.separator is None,
    }


def tag(form: JsonForm) -> dict[str, Any]:
    schema = {"type": "json_schema", "json_schema": json.loads(form.schema), "max_whitespace_cnt": MAX_WHITESPACE}
    return {"type": "tag", "begin": form.before, "content": schema, "end": form.after}


def after_thought(opening: str, body: dict[str, Any]) -> dict[str, Any]:
    thought = {"type": "tag", "begin": opening, "content": {"type": "any_text"}, "end": "</think>"}
    return {"type": "sequence", "elements": [thought, GAP, body]}


def either(elements: list[dict[str, Any]]) -> dict[str, Any]:
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": elements}
