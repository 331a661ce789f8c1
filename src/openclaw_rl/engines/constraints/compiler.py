"""Compiles constraints in a thread, each once."""

import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from openclaw_rl.engines.constraints.automaton import Automaton, Vocabulary
from openclaw_rl.engines.errors import ConstraintRefused
from openclaw_rl.types import Constraint

#: The longest that a request waits for its constraint, behind others too.
COMPILE_SECONDS = 10.0
#: Constraints that are kept, by the size of their schemas. What is compiled has some hundred times that size.
MAX_CACHED_BYTES = 500_000
#: Constraints that are kept, however small they are.
MAX_CACHED = 128


class Compiler:
    """Compiles constraints for one model.

    * The caller never waits: `compiled` is false until the result is there, and `woken` is called then.
    * A constraint that is compiled already is there at once, as long as it is in the cache.
    * Constraints are compiled one at a time, and a request waits at most `COMPILE_SECONDS`.
    """

    def __init__(
        self,
        folder: Path,
        size: int | None = None,
        woken: Callable[[], None] = lambda: None,
        *,
        any_whitespace: bool = False,
    ) -> None:
        """`any_whitespace`: for completions of engines that write JSON with whitespace as they like."""
        self._folder, self._size, self._woken = folder, size, woken
        self._any_whitespace = any_whitespace
        self._vocabulary: Vocabulary | None = None
        self._results: OrderedDict[Constraint, tuple[Future[Automaton], float]] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="compile")

    def prepare(self) -> None:
        """Read the vocabulary now, which takes a second, rather than when the first constraint comes."""
        if self._vocabulary is None:
            self._vocabulary = Vocabulary(self._folder, self._size)

    def compiled(self, constraint: Constraint) -> bool:
        """Whether `automaton` has a result. Begins to compile it if it is new."""
        result, deadline = self._result(constraint)
        return result.done() or time.monotonic() > deadline

    def automaton(self, constraint: Constraint) -> Automaton:
        """The compiled constraint. Raises ConstraintRefused if it cannot be compiled, or not in time."""
        result, _deadline = self._result(constraint)
        if not result.done():
            raise ConstraintRefused(f"The schema was not compiled within {COMPILE_SECONDS:.0f} seconds.")
        return result.result()

    def future(self, constraint: Constraint) -> "Future[Automaton]":
        """The result, for callers that can wait."""
        return self._result(constraint)[0]

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _result(self, constraint: Constraint) -> "tuple[Future[Automaton], float]":
        if constraint in self._results:
            self._results.move_to_end(constraint)
        else:
            self._make_room(size_of(constraint))
            result = self._thread.submit(self._compile, constraint)
            result.add_done_callback(lambda _result: self._woken())
            self._results[constraint] = result, time.monotonic() + COMPILE_SECONDS
        return self._results[constraint]

    def _compile(self, constraint: Constraint) -> Automaton:
        self.prepare()
        assert self._vocabulary is not None
        return Automaton.compile(self._vocabulary, constraint, any_whitespace=self._any_whitespace)

    def _make_room(self, size: int) -> None:
        """Forget the constraints that were not used for longest. Those that are being compiled stay."""
        kept = sum(map(size_of, self._results))
        for constraint, (result, _deadline) in list(self._results.items()):
            if kept + size <= MAX_CACHED_BYTES and len(self._results) < MAX_CACHED:
                return
            if result.done():
                del self._results[constraint]
                kept -= size_of(constraint)


def size_of(constraint: Constraint) -> int:
    """The size of a constraint's schemas."""
    return sum(len(form.schema) for form in (constraint.content, *constraint.calls) if form is not None)
