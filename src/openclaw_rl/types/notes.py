"""A wish about how to answer, as it is read from what a user says."""

from dataclasses import dataclass

#: Separates the general part of a topic from the special one: "format/lists".
TOPIC_SEPARATOR = "/"


@dataclass(frozen=True, slots=True)
class Wish:
    """What somebody wants of answers."""

    instruction: str
    """One plain sentence to the assistant in the user's language: "Talk like a pirate."."""
    topic: str
    """What it is about: "length", "language", "address", "units", "tone", "format/lists", or content words."""
    lasting: bool
    """False for a wish about one answer only: "in French this time"."""

    def replaces(self, older: "Wish") -> bool:
        """Whether it makes an older wish of the same user void.

        Wishes of one topic do. So do a general and a special one: "format" and "format/lists", but not "format/lists"
        and "format/bold".
        """
        one, other = self.topic.split(TOPIC_SEPARATOR), older.topic.split(TOPIC_SEPARATOR)
        shared = min(len(one), len(other))
        return one[:shared] == other[:shared] or self.instruction == older.instruction
