"""Request bodies for `/openapi.json`: routes read their bodies themselves, so FastAPI cannot infer them."""

from typing import Any

from pydantic import BaseModel


def body_schema(model: type[BaseModel]) -> dict[str, Any]:
    """What `openapi_extra` of a route says about its request body."""
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    definitions = schema.pop("$defs", {})
    content = {"application/json": {"schema": inline(schema, definitions)}}
    return {"requestBody": {"required": True, "content": content}}


def inline(schema: Any, definitions: dict[str, Any]) -> Any:
    """A JSON schema without references."""
    if isinstance(schema, list):
        return [inline(item, definitions) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return inline(definitions[schema["$ref"].rsplit("/", 1)[-1]], definitions)
    # A discriminator names its alternatives by reference.
    return {key: inline(value, definitions) for key, value in schema.items() if key != "discriminator"}
