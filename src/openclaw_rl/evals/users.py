"""People who use the assistant: they ask, and say in words what they think of the answer.

The system sees only those words. Whether an answer passed is decided by the persona's rules and the guard of
`quality`, for the evaluation alone, whoever chooses the words.
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

#: The name, beside those of the rules, under which an answer fails that is none.
NO_ANSWER = "answers the question"
#: A person reacts in a sentence or two.
REACTION_TOKENS = 80
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
    """What a person says to an answer, and what the rules say."""

    text: str
    passed: bool
    failed_rules: tuple[str, ...]


class User(Protocol):
    """Somebody who asks and reacts, one question after the other."""

    persona: Persona

    def opening(self, question: EvalQuestion) -> str:
        """The message that asks a first question."""
        ...

    async def react(self, answer: str) -> Reaction:
        """What is said to an answer to the question asked last."""
        ...

    def go_on(self, reaction: Reaction, question: EvalQuestion) -> str:
        """The whole next message: the reaction, and then the next question, or what makes the last one be redone."""
        ...


class ScriptedUser:
    """Says what the persona's file has; the seed decides which of its phrases."""

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
        """The reaction in the words of the persona's file. Of several faults one is named, as people do."""
        persona, question = self.persona, self._question
        if question is None:
            raise ValueError("Nothing was asked yet: call opening first.")
        # Somebody who sees no answer does not speak of its form.
        if not check(answer, question.text, question.reference).ok:
            return Reaction(persona.no_answer.choose(persona.languages, self._dice), False, (NO_ANSWER,))
        failed = persona.failed(answer, self.count)
        said = self._dice.choice(failed).displeased if failed else persona.pleased
        return Reaction(said.choose(persona.languages, self._dice), not failed, tuple(rule.name for rule in failed))

    def go_on(self, reaction: Reaction, question: EvalQuestion) -> str:
        same, self._question = question == self._question, question
        persona = self.persona
        if same and not persona.repeats_question:
            return reaction.text
        asking = persona.asks_again if same else persona.next_question
        # Not `format`: braces in a question are its own.
        asked = asking.choose(persona.languages, self._dice).replace("{question}", question.text)
        return f"{reaction.text} {asked}"


class ModelUser:
    """Lets a model play the persona, told only its description: the words are the model's, the score is the rules'.

    What the model says may be wrong about the answer, as people are. Where it says nothing, the persona's file speaks.
    Raises ChatFailed where the model cannot be asked.
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
            max_tokens=REACTION_TOKENS,
            temperature=REACTION_TEMPERATURE,
            seed=self.seed + self._reactions,
            keep=False,
        )
        said = _THOUGHTS.sub("", reply.text).strip().strip('"“”').strip()
        return Reaction(said or reaction.text, reaction.passed, reaction.failed_rules)

    def go_on(self, reaction: Reaction, question: EvalQuestion) -> str:
        self._asked = self._scripted.go_on(reaction, question)
        return self._asked
