"""The fields with which a request demands something of its answer: `tool_choice` and `response_format`."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Demand(BaseModel):
    """Base of these fields."""

    model_config = ConfigDict(extra="ignore")


class ToolName(Demand):
    name: str


class NamedTool(Demand):
    """A value of `tool_choice`: the answer must call this function."""

    type: Literal["function"]
    function: ToolName


class PlainFormat(Demand):
    type: Literal["text", "json_object"]


class NamedSchema(Demand):
    name: str = ""
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class JsonSchemaFormat(Demand):
    """A value of `response_format`: the answer is JSON that fits this schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema
