"""Routes without FastAPI's dependencies, for the paths that answer with tokens."""

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from openclaw_rl.api.errors import ApiError
from openclaw_rl.api.schema import body_schema

Endpoint = Callable[[Request], Awaitable[Response]]


class PlainRoute(APIRoute):
    """Gives the request to its endpoint and sends the response.

    FastAPI's own routes resolve dependencies and open three exit stacks for each request, which takes as long as
    parsing a short one.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.app = self._answer

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = await self.endpoint(Request(scope, receive, send))
        except ApiError as error:
            response = error.response(scope)
        await response(scope, receive, send)


def post(router: APIRouter, path: str, body: type[BaseModel]) -> Callable[[Endpoint], Endpoint]:
    """Add an endpoint that reads its body itself; `body` describes it in the schema."""

    def add(endpoint: Endpoint) -> Endpoint:
        router.add_api_route(
            path, endpoint, methods=["POST"], openapi_extra=body_schema(body), route_class_override=PlainRoute
        )
        return endpoint

    return add
