"""One session of a simulated person with the assistant, through its API, as people have them."""

from collections.abc import Sequence
from dataclasses import dataclass

from openclaw_rl.evals.chat import MAX_TOKENS, Chat, Message
from openclaw_rl.evals.questions import EvalQuestion
from openclaw_rl.evals.users import User

#: How often somebody has one question answered before going on to the next.
PATIENCE = 2
#: The last message only says what the answer was like, and nobody reads what comes back.
LAST_REPLY_TOKENS = 1


@dataclass(frozen=True, slots=True)
class Exchange:
    """A question, its answer and what was said to that."""

    question: EvalQuestion
    message: str
    """The user's whole message that the answer replies to."""
    answer: str
    passed: bool
    failed_rules: tuple[str, ...]
    reaction: str


@dataclass(frozen=True, slots=True)
class Transcript:
    """What was said in one session."""

    session: str
    exchanges: tuple[Exchange, ...]

    @property
    def first_passed(self) -> bool:
        """Whether the first reply passed, before this session said anything about what is wanted."""
        return self.exchanges[0].passed


async def hold(
    chat: Chat,
    user: User,
    questions: Sequence[EvalQuestion],
    *,
    session: str,
    turns: int,
    max_tokens: int = MAX_TOKENS,
    temperature: float | None = None,
    seed: int | None = None,
) -> Transcript:
    """Let a user have `turns` answers, and say of each what it was like; fewer if the questions run out.

    A displeased user has the question answered again, `PATIENCE` times in all, and then asks the next one in the same
    breath. The session ends with a message that is only a reaction. Raises ChatFailed.
    """
    if turns < 1 or not questions:
        raise ValueError("A conversation needs a question and at least one turn.")
    place, tries = 0, 0
    message = user.opening(questions[0])
    history: list[Message] = []
    exchanges: list[Exchange] = []
    while True:
        history.append({"role": "user", "content": message})
        turn_seed = None if seed is None else seed + len(exchanges)
        reply = await chat.ask(history, max_tokens=max_tokens, temperature=temperature, seed=turn_seed, session=session)
        history.append({"role": "assistant", "content": reply.text})
        reaction = await user.react(reply.text)
        exchanges.append(
            Exchange(questions[place], message, reply.text, reaction.passed, reaction.failed_rules, reaction.text)
        )
        tries += 1
        if reaction.passed or tries == PATIENCE:
            place, tries = place + 1, 0
        if len(exchanges) == turns or place == len(questions):
            break
        message = user.go_on(reaction, questions[place])
    history.append({"role": "user", "content": reaction.text})
    await chat.ask(history, max_tokens=LAST_REPLY_TOKENS, temperature=temperature, seed=seed, session=session)
    return Transcript(session, tuple(exchanges))
