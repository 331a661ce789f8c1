"""Samples the completions of one request in pieces of a few tokens, each continuing from the exact ids before it.

The service returns only whole samples. Sampling in pieces makes streaming possible, and a completion that is dropped
(a stop string was seen, the client left) is not sampled to its end. The first piece of all completions is one call, so
that the prompt is read once.
"""

import asyncio
from collections.abc import Callable

from openclaw_rl.engines.base import EngineUnavailable
from openclaw_rl.engines.stream import TokenStream
from openclaw_rl.engines.tinker.errors import CallFailed
from openclaw_rl.engines.tinker.policy import Drawn, RemotePolicy
from openclaw_rl.types import FinishReason, SampledToken, SampleRequest


class Generation:
    """Feeds a stream until all its completions are finished or dropped."""

    def __init__(self, policy: RemotePolicy, request: SampleRequest, chunk: int, stream: TokenStream) -> None:
        """`chunk`: tokens per piece; 0: everything at once."""
        self.policy, self.request, self.stream = policy, request, stream
        self.chunk = chunk or request.params.max_tokens
        self._written: dict[int, list[int]] = {index: [] for index in range(request.n)}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self, done: Callable[[], None]) -> None:
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(self._ended)
        self._task.add_done_callback(lambda _task: done())

    def drop(self, index: int) -> None:
        self._written.pop(index, None)
        if index in self._tasks:
            self._tasks[index].cancel()
        if not self._written:
            self.cancel()

    def cancel(self) -> None:
        self._written.clear()
        if self._task is not None:
            self._task.cancel()

    def _ended(self, task: "asyncio.Task[None]") -> None:
        """If sampling failed, the stream must fail too: nothing will feed it."""
        if not task.cancelled() and (error := task.exception()):
            if not isinstance(error, EngineUnavailable):
                error = EngineUnavailable(f"The answer could not be sampled: {error!r}.")
            self.stream.fail(error)

    async def _run(self) -> None:
        try:
            drawn = await self._draw(list(self.request.prompt_ids), self.request.n, "first", 0)
            for index, piece in enumerate(drawn):
                self._take(index, piece)
            self._tasks = {index: asyncio.create_task(self._continue(index)) for index in self._written}
            if self._tasks:
                done, _ = await asyncio.wait(self._tasks.values(), return_when=asyncio.FIRST_EXCEPTION)
                for task in done:
                    # A completion that was dropped was cancelled; the others are not affected.
                    if not task.cancelled():
                        task.result()
        except CallFailed as error:
            self.stream.fail(error.as_unavailable())
        finally:
            for task in self._tasks.values():
                task.cancel()

    async def _continue(self, index: int) -> None:
        while index in self._written:
            ids = self._written[index]
            prompt = [*self.request.prompt_ids, *ids]
            (piece,) = await self._draw(prompt, 1, f"{index}.{len(ids)}", len(ids))
            self._take(index, piece)

    async def _draw(self, prompt: list[int], n: int, place: str, written: int) -> list[Drawn]:
        tokens = min(self.chunk, self.request.params.max_tokens - written)
        return await self.policy.draw(prompt, self.request.params, n, tokens, place)

    def _take(self, index: int, piece: Drawn) -> None:
        """Feed a piece to the stream; the last token of the last piece gets the finish."""
        if index not in self._written:
            return
        written = self._written[index]
        short = len(piece.ids) < min(self.chunk, self.request.params.max_tokens - len(written))
        written += piece.ids
        finish: FinishReason | None = None
        if piece.stopped:
            finish = FinishReason.STOP
        elif len(written) >= self.request.params.max_tokens or short:
            # A piece that is shorter than asked for and did not stop has reached the end of the service's context.
            finish = FinishReason.LENGTH
        if finish is not None:
            del self._written[index]
        last = len(piece.ids) - 1
        self.stream.feed(
            [
                SampledToken(
                    index,
                    id,
                    piece.logprobs[place],
                    piece.top[place] if piece.top else (),
                    finish if place == last else None,
                )
                for place, id in enumerate(piece.ids)
            ]
        )
