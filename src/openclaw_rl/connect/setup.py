"""What the client modules share: the facts about a server that clients need, and what is set up in a client."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from openclaw_rl.connect.edits import Edit

#: The key of a server that needs none: most clients refuse to send no key.
NO_KEY = "none"
#: With a shorter context, agents with many tools have no room for a conversation.
ROOMY_CONTEXT = 32_768
#: The bounds of the longest answer that a client is told to ask for.
MIN_ANSWER_TOKENS, MAX_ANSWER_TOKENS = 256, 8192


@dataclass(frozen=True)
class ServerFacts:
    """A server, as its clients see it."""

    url: str
    """Without /v1."""
    model: str
    context_tokens: int
    key: str = ""

    @property
    def api(self) -> str:
        return f"{self.url}/v1"

    @property
    def sent_key(self) -> str:
        return self.key or NO_KEY

    @property
    def is_roomy(self) -> bool:
        return self.context_tokens >= ROOMY_CONTEXT

    @property
    def answer_tokens(self) -> int:
        """The longest answer that leaves room for a conversation."""
        return max(MIN_ANSWER_TOKENS, min(MAX_ANSWER_TOKENS, self.context_tokens // 8))


#: Facts for undoing: with them a client's setup has every setting that it can have.
NO_SERVER = ServerFacts("", "", 0)


@dataclass(frozen=True)
class Setup:
    """What connects a client to a server."""

    then: str
    """What the user does next."""
    path: Path | None = None
    edit: Edit | None = None
    """The change to the file at `path`. Without it, there is only `text` to read."""
    text: str = ""

    @property
    def shown(self) -> str:
        return self.text or (self.edit.snippet() if self.edit else "")


#: Gives the setup of a client for a server.
ClientSetup = Callable[[ServerFacts], Setup]
