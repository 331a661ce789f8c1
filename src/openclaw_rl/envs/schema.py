"""Checks values against the part of JSON Schema that tool definitions use.

- `check_schema` refuses a keyword that `mismatch` would not enforce, so no constraint is silently ignored.
- `mismatch` says in one sentence what is wrong with a value, in words that a model can act on.
"""

import json
import math
import re
from collections.abc import Mapping
from typing import Any

#: JSON's types and how Python sees them. A bool is an int in Python but not in JSON; `_has_type` treats it apart.
TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}
#: Keywords that describe and do not constrain.
ANNOTATIONS = {"title", "description", "default", "examples", "format", "$schema", "$comment", "deprecated"}
ENFORCED = {
    *("type", "enum", "const", "anyOf", "properties", "required", "additionalProperties", "items"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    *("minLength", "maxLength", "pattern", "minItems", "maxItems"),
}
#: How much of a wrong value is repeated in a message.
MAX_SHOWN = 60


def check_schema(schema: Any, place: str) -> None:
    """Raise ValueError, which names `place`, if a schema is malformed or has a keyword that is not enforced."""
    if not isinstance(schema, Mapping):
        raise ValueError(f"{place} is not a JSON schema object")
    if unknown := schema.keys() - ENFORCED - ANNOTATIONS:
        raise ValueError(f"{place} uses {sorted(unknown)[0]!r}, which is not supported")
    if unknown_types := [name for name in _types(schema) if name not in TYPES]:
        raise ValueError(f"{place} has the type {unknown_types[0]!r}, which JSON does not have")
    if not isinstance(schema.get("enum", []), list) or not isinstance(schema.get("required", []), list):
        raise ValueError(f"{place} needs a list for 'enum' and 'required'")
    if not isinstance(properties := schema.get("properties", {}), Mapping):
        raise ValueError(f"{place} needs an object for 'properties'")
    try:
        re.compile(schema.get("pattern", ""))
    except (re.error, TypeError) as error:
        raise ValueError(f"{place} has a pattern that cannot be read: {error}") from None
    factor = schema.get("multipleOf", 1)
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor < math.inf:
        raise ValueError(f"{place} needs a number above 0 for 'multipleOf'")
    for name, part in properties.items():
        check_schema(part, f"{place}.{name}")
    for keyword in ("items", "additionalProperties"):
        if not isinstance(schema.get(keyword, True), bool):
            check_schema(schema[keyword], f"{place}.{keyword}")
    for index, part in enumerate(schema.get("anyOf", [])):
        check_schema(part, f"{place}.anyOf[{index}]")


def mismatch(value: Any, schema: Mapping[str, Any], name: str = "the arguments") -> str:
    """What is wrong with a value, as a sentence without its full stop; empty if nothing is."""
    wanted = _types(schema)
    if wanted and not any(_has_type(value, kind) for kind in wanted):
        return f"{name} must be of type {' or '.join(wanted)}, not {show(value)}"
    if "enum" in schema and not any(same_json(value, allowed) for allowed in schema["enum"]):
        return f"{name} must be one of {', '.join(map(show, schema['enum']))}, not {show(value)}"
    if "const" in schema and not same_json(value, schema["const"]):
        return f"{name} must be {show(schema['const'])}, not {show(value)}"
    if "anyOf" in schema and all(mismatch(value, part, name) for part in schema["anyOf"]):
        return mismatch(value, schema["anyOf"][0], name)
    if isinstance(value, dict):
        return _object_mismatch(value, schema, name)
    if isinstance(value, list):
        return _list_mismatch(value, schema, name)
    if isinstance(value, str):
        return _text_mismatch(value, schema, name)
    return "" if isinstance(value, bool) or value is None else _number_mismatch(value, schema, name)


def same_json(one: Any, other: Any) -> bool:
    """Whether two values are equal as JSON: 2 equals 2.0, but not true or "2"."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same_json(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same_json, one, other))
    if isinstance(one, int | float) and isinstance(other, int | float):
        return one == other or _close(one, other)
    return type(one) is type(other) and bool(one == other)


def show(value: Any) -> str:
    """A value as JSON, cut to what fits into a sentence."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "…"


def _close(one: float, other: float) -> bool:
    """Whether two numbers differ by rounding only."""
    try:
        return math.isclose(one, other, rel_tol=1e-9)
    except OverflowError:  # a whole number that is too large for a float
        return False


def _is_multiple(value: float, factor: float) -> bool:
    if isinstance(value, int) and isinstance(factor, int):
        return value % factor == 0
    try:
        return _close(value, round(value / factor) * factor)
    except (OverflowError, ValueError):  # too large for a float, or not finite
        return False


def _types(schema: Mapping[str, Any]) -> list[str]:
    kinds = schema.get("type", [])
    return kinds if isinstance(kinds, list) else [kinds]


def _has_type(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, TYPES[kind])


def _object_mismatch(value: dict[str, Any], schema: Mapping[str, Any], name: str) -> str:
    properties = schema.get("properties", {})
    for key in schema.get("required", []):
        if key not in value:
            return f"{key!r} is missing in {name}"
    others = schema.get("additionalProperties", True)
    for key, item in value.items():
        if key not in properties and others is False:
            known = f"; it has {', '.join(map(repr, properties))}" if properties else ""
            return f"there is no {key!r} in {name}{known}"
        part = properties.get(key, others)
        if not isinstance(part, bool) and (problem := mismatch(item, part, f"{key!r}")):
            return problem
    return ""


def _list_mismatch(value: list[Any], schema: Mapping[str, Any], name: str) -> str:
    if len(value) < schema.get("minItems", 0):
        return f"{name} must have at least {schema['minItems']} items"
    if len(value) > schema.get("maxItems", math.inf):
        return f"{name} must have at most {schema['maxItems']} items"
    part = schema.get("items", True)
    if isinstance(part, bool):
        return ""
    problems = (mismatch(item, part, f"item {index} of {name}") for index, item in enumerate(value))
    return next(filter(None, problems), "")


def _text_mismatch(value: str, schema: Mapping[str, Any], name: str) -> str:
    if len(value) < schema.get("minLength", 0):
        return f"{name} must have at least {schema['minLength']} characters"
    if len(value) > schema.get("maxLength", math.inf):
        return f"{name} must have at most {schema['maxLength']} characters"
    if "pattern" in schema and not re.search(schema["pattern"], value):
        return f"{name} must match {schema['pattern']}, which {show(value)} does not"
    return ""


def _number_mismatch(value: float, schema: Mapping[str, Any], name: str) -> str:
    if "minimum" in schema and value < schema["minimum"]:
        return f"{name} must be at least {schema['minimum']}, not {show(value)}"
    if "maximum" in schema and value > schema["maximum"]:
        return f"{name} must be at most {schema['maximum']}, not {show(value)}"
    if "exclusiveMinimum" in schema and value <= schema["exclusiveMinimum"]:
        return f"{name} must be greater than {schema['exclusiveMinimum']}, not {show(value)}"
    if "exclusiveMaximum" in schema and value >= schema["exclusiveMaximum"]:
        return f"{name} must be less than {schema['exclusiveMaximum']}, not {show(value)}"
    if "multipleOf" in schema and not _is_multiple(value, schema["multipleOf"]):
        return f"{name} must be a multiple of {schema['multipleOf']}, not {show(value)}"
    return ""
