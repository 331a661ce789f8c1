"""Stop strings: where the client wants the text to end, wherever the tokens' borders are."""

from collections.abc import Sequence


class StopMatcher:
    """Passes text on until one of the stop strings appears; the stop string itself is not passed on.

    Held back is only what may be the beginning of a stop string. The result does not depend on how the text
    was cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """Take the next piece; return what is certainly before any stop string."""
        if self.stopped:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        # The one that is complete first: a longer one around it may never be.
        found = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)[1]]
        certain = len(text) - max(begun(text, stop) for stop in self._stops)
        self._held = text[certain:]
        return text[:certain]

    def flush(self) -> str:
        """End of the text: what was held back was no stop string."""
        held, self._held = self._held, ""
        return held


def begun(text: str, stop: str) -> int:
    """How many characters at the end of `text` are the beginning of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)
