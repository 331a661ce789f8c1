"""Stop strings, which end a text also if they begin or end in the middle of a token."""

from collections.abc import Sequence


class StopMatcher:
    """Passes text on until one of the stop strings appears; the stop string itself is not passed on.

    - The result does not depend on how the text was cut into pieces.
    - Only text that may be the beginning of a stop string is held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.found: str | None = None

    @property
    def stopped(self) -> bool:
        """Whether a stop string has appeared; `found` is the one."""
        return self.found is not None

    def push(self, text: str) -> str:
        """Add the next piece; return the text that is certainly before any stop string."""
        if self.stopped:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        # The stop string that is complete first wins, even if a longer one begins earlier.
        matches = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if matches:
            _end, start, self.found = min(matches)
            self._held = ""
            return text[:start]
        certain = len(text) - max(prefix_at_end(text, stop) for stop in self._stops)
        self._held = text[certain:]
        return text[:certain]

    def flush(self) -> str:
        """End of the text: return what was held back."""
        held, self._held = self._held, ""
        return held


def prefix_at_end(text: str, stop: str) -> int:
    """The length of the longest end of `text` that is a beginning of `stop`, but not all of it."""
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)
