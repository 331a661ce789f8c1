"""Checks values against JSON Schema, in words that a model can act on.

- `check_schema` refuses a keyword that `mismatch` would not enforce, so no constraint is silently ignored.
- `mismatch` says in one sentence what is wrong with a value.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from jsonschema import Draft202012Validator, ValidationError
from jsonschema.exceptions import best_match
from jsonschema.validators import extend

Sentence = Callable[[Any, Any], str]
#: Keywords that describe and do not constrain.
ANNOTATIONS = {"title", "description", "default", "examples", "format", "$schema", "$comment", "deprecated"}
#: References are not followed.
ENFORCED = {"then", "else", *Draft202012Validator.VALIDATORS} - {"$ref", "$dynamicRef", "format"}
#: Keywords that hold further schemas: one, a list, or one for each name.
ONE_SCHEMA = {"items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames"}
SCHEMA_LISTS = {"anyOf", "allOf", "oneOf", "prefixItems"}
NAMED_SCHEMAS = {"properties", "patternProperties", "dependentSchemas"}
TYPES = ("string", "integer", "number", "boolean", "array", "object", "null")
#: How much of a wrong value is repeated in a message.
MAX_SHOWN = 60


def check_schema(schema: Any, place: str) -> None:
    """Raise ValueError, which names `place`, if a schema is malformed or has a keyword that is not enforced."""
    check_keywords(schema, place)
    meta = Draft202012Validator(Draft202012Validator.META_SCHEMA, format_checker=Draft202012Validator.FORMAT_CHECKER)
    if error := best_match(meta.iter_errors(schema)):
        raise ValueError(f"{place} is not a JSON schema: {error.message} (at {error.json_path})")


def check_keywords(schema: Any, place: str) -> None:
    """Raise ValueError if a schema or one inside it has a keyword that is not enforced."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, Mapping):
        raise ValueError(f"{place} is not a JSON schema object")
    if unknown := schema.keys() - ENFORCED - ANNOTATIONS:
        raise ValueError(f"{place} uses {sorted(unknown)[0]!r}, which is not supported")
    for keyword, part in schema.items():
        if keyword in ONE_SCHEMA:
            check_keywords(part, f"{place}.{keyword}")
        elif keyword in SCHEMA_LISTS and isinstance(part, list):
            for index, one in enumerate(part):
                check_keywords(one, f"{place}.{keyword}[{index}]")
        elif keyword in NAMED_SCHEMAS and isinstance(part, Mapping):
            for name, one in part.items():
                check_keywords(one, f"{place}.{name}")


def mismatch(value: Any, schema: Mapping[str, Any], name: str = "the arguments") -> str:
    """What is wrong with a value, as a sentence without its full stop; empty if nothing is."""
    error = next(Validator(schema).iter_errors(value), None)
    return "" if error is None else sentence(error, name)


def sentence(error: ValidationError, name: str) -> str:
    """An error in words. `name` is what the whole value is called."""
    if error.validator == "anyOf" and error.context:
        return sentence(error.context[0], name)
    for key in error.absolute_path:
        name = f"item {key} of {name}" if isinstance(key, int) else repr(key)
    wanted, value = error.validator_value, error.instance
    if error.validator == "required":
        return f"{next(key for key in wanted if key not in value)!r} is missing in {name}"
    if error.validator == "additionalProperties":
        properties = error.schema.get("properties", {})
        known = f"; it has {', '.join(map(repr, properties))}" if properties else ""
        return f"there is no {next(key for key in value if key not in properties)!r} in {name}{known}"
    if error.validator not in SENTENCES:
        return f"{name} does not fit: {error.message}"
    return f"{name} must {SENTENCES[error.validator](wanted, value)}"


#: What each keyword demands of a value.
SENTENCES: dict[str, Sentence] = {
    "type": lambda wanted, value: f"be of type {' or '.join(as_list(wanted))}, not {show(value)}",
    "enum": lambda wanted, value: f"be one of {', '.join(map(show, wanted))}, not {show(value)}",
    "const": lambda wanted, value: f"be {show(wanted)}, not {show(value)}",
    "minimum": lambda wanted, value: f"be at least {wanted}, not {show(value)}",
    "maximum": lambda wanted, value: f"be at most {wanted}, not {show(value)}",
    "exclusiveMinimum": lambda wanted, value: f"be greater than {wanted}, not {show(value)}",
    "exclusiveMaximum": lambda wanted, value: f"be less than {wanted}, not {show(value)}",
    "multipleOf": lambda wanted, value: f"be a multiple of {wanted}, not {show(value)}",
    "minLength": lambda wanted, _: f"have at least {wanted} characters",
    "maxLength": lambda wanted, _: f"have at most {wanted} characters",
    "minItems": lambda wanted, _: f"have at least {wanted} items",
    "maxItems": lambda wanted, _: f"have at most {wanted} items",
    "pattern": lambda wanted, value: f"match {wanted}, which {show(value)} does not",
}


def same_json(one: Any, other: Any) -> bool:
    """Whether two values are equal as JSON: 2 equals 2.0, but not true or "2". Floats may differ by rounding."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same_json(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same_json, one, other))
    if isinstance(one, float) or isinstance(other, float):
        numbers = isinstance(one, float | int) and isinstance(other, float | int)
        return numbers and (one == other or _close(one, other, 1e-9))
    return type(one) is type(other) and bool(one == other)


def show(value: Any) -> str:
    """A value as JSON, cut to what fits into a sentence."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "…"


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _close(one: float, other: float, absolute: float = 0.0) -> bool:
    """Whether two numbers differ by rounding only, or by no more than `absolute`."""
    try:
        return math.isclose(one, other, rel_tol=1e-9, abs_tol=absolute)
    except OverflowError:  # a whole number that is too large for a float
        return False


def _is_multiple(value: float, factor: float) -> bool:
    if isinstance(value, int) and isinstance(factor, int):
        return value % factor == 0
    try:
        return _close(value, round(value / factor) * factor)
    except (OverflowError, ValueError):  # too large for a float, or not finite
        return False


def _check_type(validator: Any, wanted: Any, value: Any, _schema: Any) -> Iterator[ValidationError]:
    """Every value has a type that JSON does not have: data sets of others name such types."""
    kinds = as_list(wanted)
    if all(kind in TYPES and not validator.is_type(value, kind) for kind in kinds):
        yield ValidationError("the type is another")


def _check_multiple(validator: Any, factor: Any, value: Any, _schema: Any) -> Iterator[ValidationError]:
    """0.3 is a multiple of 0.1, up to rounding."""
    if validator.is_type(value, "number") and not _is_multiple(value, factor):
        yield ValidationError("not a multiple")


def _check_equal(wanted: Callable[[Any], list[Any]], _: Any, given: Any, value: Any, _schema: Any) -> Iterator[Any]:
    """Numbers are equal up to rounding."""
    if not any(same_json(value, one) for one in wanted(given)):
        yield ValidationError("another value")


Validator = extend(
    Draft202012Validator,
    {
        "type": _check_type,
        "multipleOf": _check_multiple,
        "enum": partial(_check_equal, list),
        "const": partial(_check_equal, lambda given: [given]),
    },
)
