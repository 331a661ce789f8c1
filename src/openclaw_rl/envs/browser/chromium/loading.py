"""Whether a tab is loading, by the events of Chromium's DevTools protocol."""

import time
from collections.abc import Mapping
from typing import Any

#: A page that was asked for begins to load within this time, or it never does.
BEGIN_SECONDS = 1.5
#: The events that are read.
REQUESTED, STARTED, STOPPED = "Page.frameRequestedNavigation", "Page.frameStartedLoading", "Page.frameStoppedLoading"
DETACHED = "Page.frameDetached"
EVENTS = (REQUESTED, STARTED, STOPPED, DETACHED)


class LoadingState:
    """Which frames of a tab load or are about to.

    Chromium tells that a page was asked for before it answers a later command. So a tab that loads nothing after an
    action and one more command loads nothing because of that action.
    """

    def __init__(self) -> None:
        self._requested: dict[str, float] = {}
        self._loading: set[str] = set()

    def read(self, event: str, params: Mapping[str, Any]) -> None:
        frame = str(params.get("frameId", ""))
        if event == REQUESTED and params.get("disposition", "currentTab") == "currentTab":
            self._requested[frame] = time.monotonic()
        elif event == STARTED:
            self._requested.pop(frame, None)
            self._loading.add(frame)
        elif event in (STOPPED, DETACHED):
            self._requested.pop(frame, None)
            self._loading.discard(frame)

    @property
    def loads(self) -> bool:
        oldest = time.monotonic() - BEGIN_SECONDS
        return bool(self._loading) or any(since > oldest for since in self._requested.values())
