"""One request being answered: pieces of a few tokens, each continuing from the exact ids before it.

The service gives whole samples; asked for a piece at a time they are a stream, and what nobody reads any more (a stop
string was seen, a client left) is not sampled to its end. Completions share the first piece's reading of the prompt.
"""

import asyncio
from collections.abc import Callable

from openclaw_rl.engines.base import EngineUnavailable
from openclaw_rl.engines.stream import TokenStream
from openclaw_rl.engines.tinker.errors import CallFailed
from openclaw_rl.engines.tinker.policy import Drawn, Policy
from openclaw_rl.types import FinishReason, SampledToken, SampleRequest


class Generation:
    """Feeds a stream until all its completions are finished or dropped."""

    def __init__(self, policy: Policy, request: SampleRequest, chunk: int, stream: TokenStream) -> None:
        """`chunk` tokens a piece; 0: everything at once."""
        self.policy, self.request, self.stream = policy, request, stream
        self.chunk = chunk or request.params.max_tokens
        self._written: dict[int, list[int]] = {index: [] for index in range(request.n)}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._whole: asyncio.Task[None] | None = None

    def start(self, done: Callable[[], None]) -> None:
        self._whole = asyncio.create_task(self._run())
        self._whole.add_done_callback(self._ended)
        self._whole.add_done_callback(lambda _task: done())

    def drop(self, index: int) -> None:
        self._written.pop(index, None)
        if index in self._tasks:
            self._tasks[index].cancel()
        if not self._written:
            self.cancel()

    def cancel(self) -> None:
        self._written.clear()
        if self._whole is not None:
            self._whole.cancel()

    def _ended(self, task: "asyncio.Task[None]") -> None:
        """Nobody may wait for a stream that nothing feeds."""
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
                    # One that was dropped was cancelled, and says nothing of the others.
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
        """Pass a piece on; the last token of the last piece says how it ended."""
        if index not in self._written:
            return
        written = self._written[index]
        short = len(piece.ids) < min(self.chunk, self.request.params.max_tokens - len(written))
        written += piece.ids
        finish: FinishReason | None = None
        if piece.stopped:
            finish = FinishReason.STOP
        elif len(written) >= self.request.params.max_tokens or short:
            # A piece that is shorter than asked and did not stop has come to the end of the service's context.
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
