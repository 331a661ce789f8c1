"""One session of a simulated person with the assistant, through the server's API."""

from collections.abc import Sequence
from dataclasses import dataclass

from openclaw_rl.evals.chat import MAX_TOKENS, Chat, Message
from openclaw_rl.evals.questions import EvalQuestion
from openclaw_rl.evals.users import User

#: How many answers to one question a user asks for before going on to the next question.
MAX_TRIES = 2
#: The last message is only a reaction, and the reply to it is not read.
LAST_REPLY_TOKENS = 1


@dataclass(frozen=True, slots=True)
class Exchange:
    """A question, its answer, and the user's reaction."""

    question: EvalQuestion
    message: str
    """The user's whole message that the answer replies to."""
    answer: str
    passed: bool
    failed_rules: tuple[str, ...]
    reaction: str


@dataclass(frozen=True, slots=True)
class Transcript:
    """Everything that was said in one session."""

    session: str
    exchanges: tuple[Exchange, ...]

    @property
    def first_passed(self) -> bool:
        """Whether the first reply passed, before the user said anything about their wishes in this session."""
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
    """Let a user ask for `turns` answers and react to each; for fewer if the questions run out.

    A displeased user asks again, `MAX_TRIES` times in all, and then asks the next question in the same message. The
    last message of the session is only a reaction. Raises ServerError.
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
        if reaction.passed or tries == MAX_TRIES:
            place, tries = place + 1, 0
        if len(exchanges) == turns or place == len(questions):
            break
        message = user.go_on(reaction, questions[place])
    history.append({"role": "user", "content": reaction.text})
    await chat.ask(history, max_tokens=LAST_REPLY_TOKENS, temperature=temperature, seed=seed, session=session)
    return Transcript(session, tuple(exchanges))
