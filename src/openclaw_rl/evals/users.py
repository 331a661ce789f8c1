"""Simulated users: they ask questions and react to the answers in words.

The server sees only these words. The persona's rules and the quality guard decide whether an answer passes, for the
evaluation alone.
"""

import random
import re
from dataclasses import dataclass
from typing import Protocol

from openclaw_rl.evals.chat import Chat
from openclaw_rl.evals.personas.persona import Persona
from openclaw_rl.evals.personas.rules import Count, estimate_tokens
from openclaw_rl.evals.quality import check
from openclaw_rl.evals.questions import EvalQuestion

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
        if not check(answer, question.text, question.reference).ok:
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
