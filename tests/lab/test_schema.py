"""The part of JSON Schema that tools use."""

import math
from typing import Any

import pytest

from openclaw_rl.lab.schema import check_schema, mismatch


@pytest.mark.parametrize(
    ("schema", "right", "wrong", "sentence"),
    [
        ({"type": "string"}, "a", 1, "x must be of type string, not 1"),
        ({"type": "integer"}, 2.0, 2.5, "x must be of type integer, not 2.5"),
        ({"type": "integer"}, 2, True, "x must be of type integer, not true"),
        ({"type": "number"}, 10**400, "1", 'x must be of type number, not "1"'),
        ({"type": ["string", "null"]}, None, [], "x must be of type string or null, not []"),
        ({"enum": ["a", 2]}, 2.0, "2", 'x must be one of "a", 2, not "2"'),
        ({"enum": [1]}, 1, True, "x must be one of 1, not true"),
        ({"enum": [0.5]}, 0.5, 10**400, "x must be one of 0.5, not 1000"),
        ({"const": {"a": [1]}}, {"a": [1.0]}, {"a": [2]}, 'x must be {"a": [1]}, not {"a": [2]}'),
        ({"anyOf": [{"type": "string"}, {"minimum": 3}]}, 3, 2, "x must be of type string, not 2"),
        ({"oneOf": [{"type": "string"}, {"const": 2}]}, 2, 3, "x does not fit: 3 is not valid under any of the given"),
        ({"required": ["a"]}, {"a": 1}, {}, "'a' is missing in x"),
        ({"properties": {"a": {"type": "string"}}}, {"a": "1"}, {"a": 1}, "'a' must be of type string, not 1"),
        ({"additionalProperties": False}, {}, {"b": 1}, "there is no 'b' in x"),
        ({"additionalProperties": {"minimum": 2}}, {"b": 2}, {"b": 1}, "'b' must be at least 2, not 1"),
        ({"items": {"type": "string"}}, ["a"], ["a", 1], "item 1 of x must be of type string, not 1"),
        ({"minItems": 1, "maxItems": 2}, [1], [], "x must have at least 1 items"),
        ({"minItems": 1, "maxItems": 2}, [1, 2], [1, 2, 3], "x must have at most 2 items"),
        ({"minLength": 2, "maxLength": 3}, "ab", "a", "x must have at least 2 characters"),
        ({"minLength": 2, "maxLength": 3}, "abc", "abcd", "x must have at most 3 characters"),
        ({"pattern": "^[a-z]+$"}, "ab", "a1", 'x must match ^[a-z]+$, which "a1" does not'),
        ({"minimum": 1, "maximum": 2}, 1, 0, "x must be at least 1, not 0"),
        ({"minimum": 1, "maximum": 2}, 2, 3, "x must be at most 2, not 3"),
        ({"exclusiveMinimum": 1}, 1.5, 1, "x must be greater than 1, not 1"),
        ({"exclusiveMaximum": 1}, 0, 1, "x must be less than 1, not 1"),
        ({"multipleOf": 0.1}, 0.3, 0.35, "x must be a multiple of 0.1, not 0.35"),
        ({"multipleOf": 0.1}, 0, 10**400, "x must be a multiple of 0.1, not 1000"),
        ({"multipleOf": 2}, 10**400, 10**400 + 1, "x must be a multiple of 2, not 1000"),
        ({"multipleOf": 2}, 4, math.inf, "x must be a multiple of 2, not Infinity"),
        ({"exclusiveMinimum": 1}, math.inf, -math.inf, "x must be greater than 1, not -Infinity"),
        ({"type": "number"}, math.inf, None, "x must be of type number, not null"),
    ],
)
def test_values_are_held_to_their_schema(schema: dict[str, Any], right: Any, wrong: Any, sentence: str) -> None:
    check_schema(schema, "x")
    assert mismatch(right, schema, "x") == ""
    assert mismatch(wrong, schema, "x").startswith(sentence)


@pytest.mark.parametrize(
    ("schema", "sentence"),
    [
        ({"properties": {"a": {"$ref": "#/b"}}}, r"x\.a uses '\$ref', which is not supported"),
        ({"type": "text"}, r"x is not a JSON schema: .*text.* \(at \$\.type\)"),
        ({"type": 3}, r"x is not a JSON schema: .* \(at \$\.type\)"),
        ({"properties": []}, r"x is not a JSON schema: .*object.* \(at \$\.properties\)"),
        ({"required": "a"}, r"x is not a JSON schema: .*array.* \(at \$\.required\)"),
        ({"enum": "a"}, r"x is not a JSON schema: .*array.* \(at \$\.enum\)"),
        ({"multipleOf": 0}, r"x is not a JSON schema: .* \(at \$\.multipleOf\)"),
        ({"pattern": "("}, r"x is not a JSON schema: .*regex.* \(at \$\.pattern\)"),
        ({"items": 3}, r"x\.items is not a JSON schema object"),
        ({"anyOf": [{"oneof": []}]}, r"x\.anyOf\[0\] uses 'oneof'"),
        ("string", "x is not a JSON schema object"),
    ],
)
def test_schemas_that_cannot_be_enforced_are_refused(schema: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        check_schema(schema, "x")
