"""Simulated people: what they ask, how they react to answers, and their conversations with a model."""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, Protocol

from openclaw_rl.evals.chat import Chat, Message
from openclaw_rl.evals.personas.persona import Persona
from openclaw_rl.evals.personas.rules import Count, estimate_tokens
from openclaw_rl.evals.scores import data_lines
from openclaw_rl.sense import check

Split = Literal["train", "held-out"]
#: Listed among the failed rules if the quality guard rejects an answer.
NO_ANSWER = "answers the question"
#: Longest reaction in tokens: one or two sentences.
MAX_REACTION_TOKENS = 80
REACTION_TEMPERATURE = 0.8
_THOUGHTS = re.compile(r"\A.*</think>|\A\s*<think>.*\Z", re.DOTALL)
_INSTRUCTIONS = """\
You play a person who uses a chat assistant. This is who you are:

{description}

The assistant has just replied to you. Write your next message to it: one or two short sentences, in your own words,
in this language: {language}. If the reply is as you like it, say that you are content. If not, say what bothers you
and what you want instead. Do not ask anything new, do not answer in the assistant's place, and write nothing but the
message."""
#: How many answers to one question a user asks for before going on to the next question.
MAX_TRIES = 2
#: The last message is only a reaction, and the reply to it is not read.
LAST_REPLY_TOKENS = 1


@dataclass(frozen=True, slots=True)
class EvalQuestion:
    """A question and its reference answer."""

    text: str
    topic: str
    reference: str
    """An answer of one or two sentences. It shows the content of a good answer, not its form."""
    split: Split
    personas: tuple[str, ...]
    """The built-in personas that would ask it."""


def questions(persona: str | None = None, split: Split | None = None, seed: int = 0) -> list[EvalQuestion]:
    """The questions of a persona, of one split or both, shuffled by the seed.

    A persona that no question names, such as one from a user's file, asks all of them.
    """
    known = persona is not None and any(persona in question.personas for question in all_questions())
    chosen = [
        question
        for question in all_questions()
        if (split is None or question.split == split) and (not known or persona in question.personas)
    ]
    random.Random(seed).shuffle(chosen)
    return chosen


def cycled(pool: Sequence[EvalQuestion], start: int, count: int) -> list[EvalQuestion]:
    """`count` questions from `start` on, beginning again at the end of the pool."""
    return [pool[i % len(pool)] for i in range(start, start + count)]


@cache
def all_questions() -> tuple[EvalQuestion, ...]:
    """Every question, in the order of the file."""
    return tuple(EvalQuestion(**line | {"personas": tuple(line["personas"])}) for line in data_lines("questions.jsonl"))


@dataclass(frozen=True, slots=True)
class Reaction:
    """What a user says to an answer, and the result of the checks."""

    text: str
    passed: bool
    failed_rules: tuple[str, ...]


class User(Protocol):
    """A user who asks questions one after another and reacts to the answers."""

    persona: Persona

    def opening(self, question: EvalQuestion) -> str:
        """The message that asks a first question."""
        ...

    async def react(self, answer: str) -> Reaction:
        """The reaction to an answer to the last question."""
        ...

    def go_on(self, reaction: Reaction, question: EvalQuestion) -> str:
        """The complete next message: the reaction, then the next question or a repetition of the last one."""
        ...


class ScriptedUser:
    """Uses the phrases of the persona's file; the seed chooses among them."""

    def __init__(self, persona: Persona, seed: int, *, count: Count = estimate_tokens) -> None:
        self.persona, self.count = persona, count
        self._dice = random.Random(f"{persona.name} {seed}")
        self._question: EvalQuestion | None = None

    def opening(self, question: EvalQuestion) -> str:
        self._question = question
        return question.text

    async def react(self, answer: str) -> Reaction:
        return self.scripted(answer)

    def scripted(self, answer: str) -> Reaction:
        """The reaction in the words of the persona's file. If several rules failed, it names one, as people do."""
        persona, question = self.persona, self._question
        if question is None:
            raise ValueError("No question was asked yet: call opening first.")
        # A person who gets no real answer does not comment on its form.
        if not check(answer, question.text, question.reference, translated=persona.translated).ok:
            return Reaction(persona.no_answer.choose(persona.languages, self._dice), False, (NO_ANSWER,))
        failed = persona.failed(answer, self.count)
        phrases = self._dice.choice(failed).displeased if failed else persona.pleased
        return Reaction(phrases.choose(persona.languages, self._dice), not failed, tuple(rule.name for rule in failed))

    def go_on(self, reaction: Reaction, question: EvalQuestion) -> str:
        same, self._question = question == self._question, question
        persona = self.persona
        if same and not persona.repeats_question:
            return reaction.text
        asking = persona.asks_again if same else persona.next_question
        # Not `format`, because a question may contain braces.
        asked = asking.choose(persona.languages, self._dice).replace("{question}", question.text)
        return f"{reaction.text} {asked}"


class ModelUser:
    """Lets a model play the persona from its description. The words are the model's; the checks are the same.

    The model may misjudge an answer, as people do. If it says nothing, a phrase of the persona's file is used. Raises
    ServerError if the model does not reply.
    """

    def __init__(self, persona: Persona, chat: Chat, seed: int, *, count: Count = estimate_tokens) -> None:
        self.persona, self.chat, self.seed = persona, chat, seed
        self._scripted = ScriptedUser(persona, seed, count=count)
        self._asked = ""
        self._reactions = 0

    def opening(self, question: EvalQuestion) -> str:
        self._asked = self._scripted.opening(question)
        return self._asked

    async def react(self, answer: str) -> Reaction:
        reaction = self._scripted.scripted(answer)
        self._reactions += 1
        language = " or ".join(self.persona.languages)
        reply = await self.chat.ask(
            [
                {
                    "role": "system",
                    "content": _INSTRUCTIONS.format(description=self.persona.description, language=language),
                },
                {
                    "role": "user",
                    "content": f"You wrote:\n{self._asked}\n\nThe assistant replied:\n{answer or '(nothing)'}",
                },
            ],
            max_tokens=MAX_REACTION_TOKENS,
            temperature=REACTION_TEMPERATURE,
            seed=self.seed + self._reactions,
            keep=False,
        )
        words = _THOUGHTS.sub("", reply.text).strip().strip('"“”').strip()
        return Reaction(words or reaction.text, reaction.passed, reaction.failed_rules)

    def go_on(self, reaction: Reaction, question: EvalQuestion) -> str:
        self._asked = self._scripted.go_on(reaction, question)
        return self._asked


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
    answer_id: str = ""
    """The id of the answer's completion."""


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
    session: str | None = None,
    turns: int,
    temperature: float | None = None,
    seed: int | None = None,
) -> Transcript:
    """Let a user ask for `turns` answers and react to each; for fewer if the questions run out.

    A displeased user asks again, `MAX_TRIES` times in all, and then asks the next question in the same message. The
    last message of the session is only a reaction. Answers are as long as the persona reads. Raises ServerError.
    """
    if turns < 1 or not questions:
        raise ValueError("A conversation needs a question and at least one turn.")
    place, tries = 0, 0
    settings: dict[str, Any] = {"temperature": temperature, "session": session}
    message = user.opening(questions[0])
    history: list[Message] = []
    exchanges: list[Exchange] = []
    while True:
        history.append({"role": "user", "content": message})
        turn_seed = None if seed is None else seed + len(exchanges)
        reply = await chat.ask(history, max_tokens=user.persona.longest_answer, seed=turn_seed, **settings)
        history.append({"role": "assistant", "content": reply.text})
        reaction = await user.react(reply.text)
        exchanges.append(
            Exchange(
                questions[place], message, reply.text, reaction.passed, reaction.failed_rules, reaction.text, reply.id
            )
        )
        tries += 1
        if reaction.passed or tries == MAX_TRIES:
            place, tries = place + 1, 0
        if len(exchanges) == turns or place == len(questions):
            break
        message = user.go_on(reaction, questions[place])
    history.append({"role": "user", "content": reaction.text})
    await chat.ask(history, max_tokens=LAST_REPLY_TOKENS, seed=seed, **settings)
    return Transcript(session or "", tuple(exchanges))
