"""Constraints as grammars that llguidance reads."""

import json
import re
from collections.abc import Mapping
from dataclasses import replace

from openclaw_rl.types import Constraint, JsonForm, Thinking

#: llguidance's settings of how JSON is written.
Style = Mapping[str, str | bool]

#: JSON is written as chat templates write it: one space after a comma or colon, and no other whitespace. So a tool call
#: is rendered again exactly as it was sampled, and the model cannot go on with whitespace for ever.
JSON_STYLE: Style = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
ANY_STYLE: Style = {"whitespace_flexible": True}
#: Reasoning up to its closing tag, and the line breaks that models write after it.
THOUGHT = 'thought[lazy]: /(?s:.*)<\\/think>/\ngap: ("\\n" | "\\n\\n")?\n'
#: Characters that mean something in a regular expression.
SPECIAL_IN_REGEX = re.compile(r"[\\.^$|?*+(){}\[\]/]")


def grammar_of(constraint: Constraint, *, any_whitespace: bool = False) -> str:
    """The grammar of a constraint, in llguidance's dialect of Lark. `any_whitespace`: JSON need not have our style."""
    style = ANY_STYLE if any_whitespace else JSON_STYLE
    if constraint.trigger:
        return triggered_grammar(constraint, style)
    forms = [form for form in (constraint.content, *constraint.calls) if form is not None]
    names = [f"form{number}" for number in range(len(forms))]
    answers = [names.pop(0)] if constraint.content else []
    if names:
        answers.append("calls")
    lines = ["%llguidance {}", f"start: {start_of(constraint.thinking)} ({' | '.join(answers)})"]
    lines += [f"form{number}: {form_rule(form, style)}" for number, form in enumerate(forms)]
    if names:
        several = "" if constraint.separator is None else f" ({text(constraint.separator)} call)*"
        lines += [f"calls: call{several}", f"call: {' | '.join(names)}"]
    if constraint.thinking is not Thinking.NONE:
        lines.append(THOUGHT)
    return "\n".join(lines) + "\n"


def triggered_grammar(constraint: Constraint, style: Style) -> str:
    """Free text, in which whatever begins with the trigger is one of the calls.

    The first lexeme that may end does end. So text before a call must not begin like reasoning, where that is possible:
    a trigger in the reasoning would end it.
    """
    trigger = SPECIAL_IN_REGEX.sub(r"\\\g<0>", constraint.trigger)
    forms = [replace(form, before=form.before.removeprefix(constraint.trigger)) for form in constraint.calls]
    call = f"({' | '.join(f'form{number}' for number in range(len(forms)))})"
    more = f"(lead {call})" + ("?" if constraint.separator is None else "*")
    lines = ["%llguidance {}", f"lead[lazy]: /(?s:.*){trigger}/", f"REST: /(?s:.*)/ & ~/(?s:.*){trigger}(?s:.*)/"]
    match constraint.thinking:
        case Thinking.NONE:
            lines.append(f"start: {more} REST")
        case Thinking.BEGUN:
            lines += [f"start: thought gap {more} REST", THOUGHT]
        case Thinking.OPTIONAL:
            after_first = "" if constraint.separator is None else more
            lines += [f"start: whole_thought gap {more} REST | (first {call} {after_first})? REST", THOUGHT]
            lines += ["first[lazy]: FIRST", f"FIRST: /(?s:.*){trigger}/ & ~/<think>(?s:.*)/"]
            lines.append("whole_thought[lazy]: /<think>(?s:.*)<\\/think>/")
    lines += [f"form{number}: {form_rule(form, style)}" for number, form in enumerate(forms)]
    return "\n".join(lines) + "\n"


def start_of(thinking: Thinking) -> str:
    match thinking:
        case Thinking.NONE:
            return ""
        case Thinking.OPTIONAL:
            return '("<think>" thought gap)?'
        case Thinking.BEGUN:
            return "thought gap"


def form_rule(form: JsonForm, style: Style) -> str:
    schema = json.loads(form.schema)
    # `true` accepts every value, as an empty schema does. A client's own settings under this name are replaced.
    settings = {**style, "lenient": not form.strict, "coerce_one_of": not form.strict}
    body = {**({} if schema is True else schema), "x-guidance": settings}
    return " ".join(filter(None, (text(form.before), f"%json {json.dumps(body)}", text(form.after))))


def text(literal: str) -> str:
    """A literal text in a grammar; nothing for an empty one."""
    return json.dumps(literal) if literal else ""
