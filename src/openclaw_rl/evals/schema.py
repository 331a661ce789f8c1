"""Checks a JSON value against a JSON schema, for the keywords that descriptions of functions use."""

from collections.abc import Iterator, Mapping
from typing import Any

Schema = Mapping[str, Any]


def problems(value: Any, schema: Schema, place: str = "arguments") -> Iterator[str]:
    """One sentence for each violation; none if the value fits. Unknown keywords are ignored."""
    kind = schema.get("type", [])
    kinds = [kind] if isinstance(kind, str) else kind
    if kinds and not any(_is(value, one) for one in kinds):
        yield f"{place} should be of type {' or '.join(kinds)}."
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{place} should be one of {', '.join(map(str, schema['enum']))}."
    if isinstance(value, dict):
        yield from _object_problems(value, schema, place)
    elif isinstance(value, list):
        yield from _list_problems(value, schema, place)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        if value < schema.get("minimum", value):
            yield f"{place} should be at least {schema['minimum']}."
        if value > schema.get("maximum", value):
            yield f"{place} should be at most {schema['maximum']}."


def _object_problems(value: dict[str, Any], schema: Schema, place: str) -> Iterator[str]:
    properties = schema.get("properties", {})
    for name in schema.get("required", ()):
        if name not in value:
            yield f"{place} should have {name}."
    for name, member in value.items():
        if name in properties:
            yield from problems(member, properties[name], f"{place}.{name}")
        elif schema.get("additionalProperties") is False:
            yield f"{place} should not have {name}."


def _list_problems(value: list[Any], schema: Schema, place: str) -> Iterator[str]:
    if len(value) < schema.get("minItems", 0):
        yield f"{place} should have at least {schema['minItems']} items."
    if len(value) > schema.get("maxItems", len(value)):
        yield f"{place} should have at most {schema['maxItems']} items."
    for number, item in enumerate(value):
        yield from problems(item, schema.get("items", {}), f"{place}[{number}]")


def _is(value: Any, kind: str) -> bool:
    """Whether a value has a type. Every value has an unknown type; 2.0 is an integer, True is not a number."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return {
        "object": isinstance(value, dict),
        "array": isinstance(value, list),
        "string": isinstance(value, str),
        "boolean": isinstance(value, bool),
        "null": value is None,
        "number": number,
        "integer": number and value == value // 1,
    }.get(kind, True)
