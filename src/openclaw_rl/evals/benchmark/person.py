"""A person who uses an endpoint as any client does: whole conversations with OpenAI's fields alone."""

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from openclaw_rl.client import ServerError
from openclaw_rl.evals.chat import MAX_TOKENS, Chat, Message, Reply
from openclaw_rl.evals.conversation import EvalQuestion, ModelUser, Reaction, ScriptedUser, User, hold
from openclaw_rl.evals.examination import MAX_CONCURRENT_QUESTIONS, ExamAnswer, examine
from openclaw_rl.evals.personas.persona import Persona
from openclaw_rl.evals.personas.rules import estimate_tokens
from openclaw_rl.evals.wishes.measurement import TEMPERATURE
from openclaw_rl.evals.wishes.wish import EvalWish
from openclaw_rl.lab.statistics import sessions_until_adherence
from openclaw_rl.sense import words_of

#: Settings of `Chat.ask` that only this package's servers know.
OWN_SETTINGS = ("session", "keep", "notes")
#: How often a person says which answer was wanted. After that they only complain.
SHOWN = 2
_WANTED = " It should say: "
#: A sentence of so many words is somebody's own. An answer that has it repeats what was said.
MIN_REPEATED_WORDS = 4
PARROT = "it repeats what the person said"
_SENTENCE = re.compile(r"[.!?:\n]+")
#: The most and the least characters of earlier conversations that are put before a new one.
MAX_PASTED, MIN_PASTED = 8000, 100
_PASTED = "These are your earlier conversations with this person. Keep to what they asked for.\n\n"


@dataclass(slots=True)
class Cost:
    """What was asked so far."""

    requests: int = 0
    prompt_tokens: int = 0
    answer_tokens: int = 0
    estimated: bool = False
    """Whether the endpoint did not say how many tokens it read and wrote, so that they are estimated from words."""

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.answer_tokens


@dataclass(frozen=True, slots=True)
class Held:
    """What it took from the first session until three first replies in a row were as wanted."""

    sessions: int
    seconds: float
    requests: int
    tokens: int


class OrdinaryChat(Chat):
    """Asks with OpenAI's fields alone, and keeps what was said and what it cost."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.cost = Cost()
        self.log: list[dict[str, Any]] = []
        self.said: set[str] = set()
        """The sentences of the person, in plain words."""
        self.longest = MAX_TOKENS
        """No answer may have more tokens."""

    async def ask(self, messages: Sequence[Message], **settings: Any) -> Reply:
        sent = self.prepared(messages)
        given = {name: value for name, value in settings.items() if name not in OWN_SETTINGS}
        given["max_tokens"] = min(settings.get("max_tokens", MAX_TOKENS), self.longest)
        asked = time.monotonic()
        try:
            reply = await super().ask(sent, **given)
        except ServerError as error:
            if not error.is_too_long or sent is messages:
                raise
            self.shorten()
            return await self.ask(messages, **settings)
        prompt, answer = reply.tokens or (sum(map(_estimated, sent)), estimate_tokens(reply.text))
        cost = self.cost
        cost.requests += 1
        cost.prompt_tokens += prompt
        cost.answer_tokens += answer
        cost.estimated |= reply.tokens is None
        self.log.append(
            {
                "turn": sum(message["role"] == "user" for message in messages),
                "said": messages[-1].get("content"),
                "answer": reply.text,
                **({"calls": [asdict(call) for call in reply.tool_calls]} if reply.tool_calls else {}),
                "seed": settings.get("seed"),
                "tokens": [prompt, answer],
                "seconds": round(time.monotonic() - asked, 2),
            }
        )
        self.remember(messages, reply)
        if messages[-1]["role"] == "user":
            self.said |= set(sentences(str(messages[-1]["content"]).partition(_WANTED)[0]))
        return reply

    def is_repeated(self, answer: str, question: str) -> bool:
        """Whether an answer has a whole sentence that the person said, other than the question itself."""
        text = f" {' '.join(words_of(answer))} "
        return any(f" {sentence} " in text for sentence in self.said.difference(sentences(question)))

    def prepared(self, messages: Sequence[Message]) -> Sequence[Message]:
        """The messages as they are sent."""
        return messages

    def shorten(self) -> None:
        """Add less to messages from now on, because a prompt was too long."""

    def remember(self, messages: Sequence[Message], reply: Reply) -> None:
        """Take note of an answer."""

    async def forget(self) -> None:
        """Forget what this client itself remembers."""


class PastingChat(OrdinaryChat):
    """Puts every earlier conversation in which the person reacted before a new one, as far as `MAX_PASTED` goes."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._talks: dict[str, str] = {}
        self._most = MAX_PASTED

    def prepared(self, messages: Sequence[Message]) -> Sequence[Message]:
        earlier = "\n\n".join(talk for first, talk in self._talks.items() if first != messages[0].get("content"))
        if not earlier or not self._most or messages[0]["role"] != "user":
            return messages
        return [{"role": "system", "content": _PASTED + earlier[-self._most :]}, *messages]

    def shorten(self) -> None:
        self._most = self._most // 2 if self._most > MIN_PASTED else 0

    def remember(self, messages: Sequence[Message], reply: Reply) -> None:
        if sum(message["role"] == "user" for message in messages) > 1:
            self._talks[str(messages[0]["content"])] = "\n".join(f"{one['role']}: {one['content']}" for one in messages)

    async def forget(self) -> None:
        self._talks.clear()


def sentences(text: str) -> list[str]:
    """The sentences of a text that are long enough to be somebody's own, in plain words."""
    found = (words_of(part) for part in _SENTENCE.split(text))
    return [" ".join(words) for words in found if len(words) >= MIN_REPEATED_WORDS]


def _estimated(message: Message) -> int:
    return estimate_tokens(str(message.get("content") or ""))


class ShowingUser(ScriptedUser):
    """Also says which answer was wanted, in words, to so many answers that displease."""

    def __init__(self, persona: Persona, seed: int, corrections: Mapping[str, str], shown: int) -> None:
        super().__init__(persona, seed)
        self.corrections, self.left = corrections, shown

    async def react(self, answer: str) -> Reaction:
        reaction = self.scripted(answer)
        wanted = self.corrections.get(self._question.text) if self._question else None
        if reaction.passed or wanted is None or not self.left:
            return reaction
        self.left -= 1
        return replace(reaction, text=f"{reaction.text}{_WANTED}{wanted}")


@dataclass(slots=True)
class Teaching:
    """The sessions of one person with one wish, or with the rules of a persona."""

    chat: OrdinaryChat
    persona: Persona
    seed: int
    corrections: Mapping[str, str] = field(default_factory=dict)
    player: Chat | None = None
    """A model that plays the person; without it they follow a script."""
    feedback: bool = False
    """Whether the wanted answer is also sent as a correction, which this package's servers take."""
    first_replies: list[bool] = field(default_factory=list)
    shown: int = 0
    held: Held | None = None
    _began: tuple[float, int, int] = (0.0, 0, 0)
    """When the first session began, with the requests and tokens before it."""

    @classmethod
    def of(cls, chat: OrdinaryChat, wish: EvalWish, seed: int, **settings: Any) -> "Teaching":
        return cls(chat, wish.persona, seed, wish.corrections, **settings)

    async def session(self, asked: Sequence[EvalQuestion], turns: int = 1) -> None:
        """A conversation of its own. Raises ServerError."""
        number, cost = len(self.first_replies), self.chat.cost
        if not number:
            self._began = (time.monotonic(), cost.requests, cost.tokens)
        seed = 1_000_000 * self.seed + 100 * number
        user = self._user(seed)
        held = await hold(
            self.chat,
            user,
            asked,
            turns=turns,
            temperature=TEMPERATURE,
            seed=seed,
        )
        first = held.exchanges[0]
        self.first_replies.append(held.first_passed and not self.chat.is_repeated(first.answer, first.message))
        if self.feedback and not held.first_passed and (wanted := self.corrections.get(first.question.text)):
            await self.chat.correct(first.answer_id, wanted)
        if isinstance(user, ShowingUser):
            self.shown = SHOWN - user.left
        sessions = sessions_until_adherence(self.first_replies)
        if sessions and not self.held:
            began, requests, tokens = self._began
            seconds = round(time.monotonic() - began, 1)
            self.held = Held(sessions, seconds, cost.requests - requests, cost.tokens - tokens)

    def _user(self, seed: int) -> User:
        if self.player:
            return ModelUser(self.persona, self.player, seed)
        return ShowingUser(self.persona, seed, self.corrections, SHOWN - self.shown)


async def questioned(
    chat: OrdinaryChat,
    persona: Persona,
    asked: Sequence[EvalQuestion],
    seed: int,
    headers: Mapping[str, str] | None = None,
) -> list[ExamAnswer]:
    """The answers to questions, each in a conversation of its own to which nobody reacts. Raises ServerError."""
    answers = await examine(
        chat,
        persona,
        asked,
        seed=seed,
        temperature=TEMPERATURE,
        at_once=MAX_CONCURRENT_QUESTIONS,
        headers=headers,
    )
    return [
        replace(one, faults=(*one.faults, PARROT)) if chat.is_repeated(one.answer, one.question.text) else one
        for one in answers
    ]
