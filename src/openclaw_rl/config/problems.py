"""What is wrong with a value, in plainer words than pydantic's own."""

from collections.abc import Mapping
from typing import Any

#: By the type of pydantic's error.
SENTENCES = {
    "int_parsing": "it must be a whole number",
    "int_type": "it must be a whole number",
    "int_from_float": "it must be a whole number",
    "float_parsing": "it must be a number",
    "float_type": "it must be a number",
    "finite_number": "it must be a finite number",
    "bool_parsing": "it must be true or false",
    "bool_type": "it must be true or false",
    "string_type": "it must be text",
    "list_type": "it must be a list",
    "dict_type": "it must be an object",
    "model_type": "it must be an object",
    "too_short": "it has too few items: at least {min_length}",
    "too_long": "it has too many items: at most {max_length}",
    "literal_error": "it must be {expected}",
    "greater_than": "it must be above {gt}",
    "greater_than_equal": "it must be at least {ge}",
    "less_than": "it must be below {lt}",
    "less_than_equal": "it must be at most {le}",
}


def plain_problem(error: Mapping[str, Any]) -> str:
    """The message of one of the errors in a ValidationError."""
    sentence = SENTENCES.get(error["type"])
    if sentence is None:
        return str(error["msg"]).removeprefix("Value error, ")
    bounds: Mapping[str, Any] = error.get("ctx", {})
    return sentence.format(**{name: plain_number(bound) for name, bound in bounds.items()})


def plain_number(bound: Any) -> Any:
    """A whole number without a decimal point or an exponent; anything else as it is."""
    return int(bound) if isinstance(bound, float) and bound.is_integer() else bound
