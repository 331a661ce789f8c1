"""Simulated users, and the conversations that they hold."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from openclaw_rl.client import ServerError
from openclaw_rl.evals.chat import Chat, Message, Reply
from openclaw_rl.evals.conversation import (
    LAST_REPLY_TOKENS,
    MAX_TRIES,
    NO_ANSWER,
    EvalQuestion,
    ModelUser,
    ScriptedUser,
    hold,
    questions,
)
from openclaw_rl.evals.personas.persona import Persona, load

BRIEF = load("brief")
QUESTION, NEXT, THIRD = questions("brief", "train", seed=3)[:3]
LONG = " ".join([QUESTION.reference, NEXT.reference, THIRD.reference])


class ScriptedChat:
    """Implements `Chat`: replies what a function makes of the messages, and remembers what it was asked."""

    def __init__(self, reply: Callable[[Sequence[Message]], str]) -> None:
        self.reply = reply
        self.asked: list[dict[str, Any]] = []

    async def ask(self, messages: Sequence[Message], **wishes: Any) -> Reply:
        self.asked.append({"messages": [dict(message) for message in messages], **wishes})
        return Reply(self.reply(messages))


def answering(*answers: str) -> ScriptedChat:
    """One answer after the other, the last one for ever."""
    left = list(answers)
    return ScriptedChat(lambda _messages: left.pop(0) if len(left) > 1 else left[0])


def short(question: EvalQuestion) -> str:
    return question.reference.split(",")[0].rstrip(".") + "."


def said_by_user(chat: ScriptedChat) -> list[str]:
    return [message["content"] for message in chat.asked[-1]["messages"] if message["role"] == "user"]


async def test_pleased_and_displeased_in_the_personas_words() -> None:
    user = ScriptedUser(BRIEF, seed=1)
    assert user.opening(QUESTION) == QUESTION.text
    good = await user.react(short(QUESTION))
    assert (good.passed, good.failed_rules) == (True, ())
    assert good.text in BRIEF.pleased.by_language["en"]
    bad = await user.react(LONG)
    assert (bad.passed, bad.failed_rules) == (False, ("one short sentence",))
    assert bad.text in BRIEF.rules[0].displeased.by_language["en"]


@pytest.mark.parametrize("answer", ["", "...", "short short short short short short", "My cat likes milk."])
async def test_what_is_no_answer_pleases_nobody(answer: str) -> None:
    user = ScriptedUser(BRIEF, seed=1)
    user.opening(QUESTION)
    reaction = await user.react(answer)
    assert (reaction.passed, reaction.failed_rules) == (False, (NO_ANSWER,))
    assert reaction.text in BRIEF.no_answer.by_language["en"]


async def test_all_faults_are_scored_and_one_is_named() -> None:
    persona = load("student")
    question = questions("student", "train")[0]
    answer = f"**{question.reference}**\n\n1. One\n2. Two\n\n\\boxed{{2}}"
    user = ScriptedUser(persona, seed=0)
    user.opening(question)
    reactions = [await user.react(answer) for _ in range(40)]
    assert {reaction.failed_rules for reaction in reactions} == {tuple(rule.name for rule in persona.rules)}
    for rule in persona.rules:
        assert any(reaction.text in rule.displeased.by_language["en"] for reaction in reactions)


async def test_the_seed_decides_the_words_and_nothing_else() -> None:
    async def words(seed: int) -> list[str]:
        user = ScriptedUser(BRIEF, seed)
        user.opening(QUESTION)
        return [(await user.react(LONG)).text for _ in range(8)]

    assert await words(5) == await words(5)
    assert await words(5) != await words(6)


async def test_the_callers_count_of_tokens_is_used() -> None:
    persona = load("teaching-assistant")
    answer = f"For example: {QUESTION.reference}"
    for count, failed in ((lambda _text: 99, ("detailed",)), (lambda _text: 100, ())):
        user = ScriptedUser(persona, seed=0, count=count)
        user.opening(QUESTION)
        assert (await user.react(answer)).failed_rules == failed


async def test_nobody_reacts_before_asking() -> None:
    with pytest.raises(ValueError, match="opening"):
        await ScriptedUser(BRIEF, seed=1).react("Well.")


async def test_a_session_of_one_turn_ends_with_the_reaction_alone() -> None:
    chat = answering(short(QUESTION))
    held = await hold(chat, ScriptedUser(BRIEF, seed=2), [QUESTION, NEXT], session="s1", turns=1)
    (exchange,) = held.exchanges
    assert held.first_passed
    assert (exchange.question, exchange.message, exchange.answer) == (QUESTION, QUESTION.text, short(QUESTION))
    assert said_by_user(chat) == [QUESTION.text, exchange.reaction]
    assert [asked["session"] for asked in chat.asked] == ["s1", "s1"]
    assert chat.asked[-1]["max_tokens"] == LAST_REPLY_TOKENS
    assert all(asked.get("keep", True) for asked in chat.asked)


async def test_every_request_goes_on_from_the_one_before() -> None:
    chat = answering(short(QUESTION), LONG, short(NEXT))
    held = await hold(chat, ScriptedUser(BRIEF, seed=2), [QUESTION, NEXT, THIRD], session="s", turns=3, seed=10)
    for before, after in zip(chat.asked, chat.asked[1:], strict=False):
        assert after["messages"][: len(before["messages"])] == before["messages"]
        assert [message["role"] for message in after["messages"][len(before["messages"]) :]] == ["assistant", "user"]
    assert [asked["seed"] for asked in chat.asked[:-1]] == [10, 11, 12]
    assert [exchange.passed for exchange in held.exchanges] == [True, False, True]


async def test_a_pleased_user_asks_the_next_question_in_the_same_message() -> None:
    chat = answering(short(QUESTION), short(NEXT))
    held = await hold(chat, ScriptedUser(BRIEF, seed=2), [QUESTION, NEXT], session="s", turns=5)
    first, second = held.exchanges
    assert second.question == NEXT
    assert second.message.startswith(first.reaction)
    assert second.message.endswith(NEXT.text)


@pytest.mark.parametrize("repeats", [False, True])
async def test_a_displeased_user_wants_the_same_again_and_then_gives_up(repeats: bool) -> None:
    persona: Persona = BRIEF.model_copy(update={"repeats_question": repeats})
    held = await hold(
        answering(LONG), ScriptedUser(persona, seed=2), [QUESTION, NEXT], session="s", turns=MAX_TRIES + 1
    )
    assert [exchange.question for exchange in held.exchanges] == [QUESTION] * MAX_TRIES + [NEXT]
    again = held.exchanges[1].message
    assert again.startswith(held.exchanges[0].reaction)
    assert (QUESTION.text in again) is repeats
    assert NEXT.text in held.exchanges[-1].message
    assert not held.first_passed


async def test_braces_in_a_question_are_its_own() -> None:
    braces = replace(NEXT, text="What does {question} or {0} mean in a text?")
    held = await hold(answering(short(QUESTION)), ScriptedUser(BRIEF, 1), [QUESTION, braces], session="s", turns=2)
    assert held.exchanges[1].message.endswith(braces.text)


async def test_a_conversation_needs_questions_and_turns() -> None:
    for asked, turns in (([], 1), ([QUESTION], 0)):
        with pytest.raises(ValueError, match="needs a question"):
            await hold(answering("x"), ScriptedUser(BRIEF, 1), asked, session="s", turns=turns)


async def test_a_model_finds_the_words_and_the_rules_score() -> None:
    player = answering('<think>He was long.</think>\n"I\'m on a bus. Please, one sentence!"')
    user = ModelUser(BRIEF, player, seed=4)
    user.opening(QUESTION)
    reaction = await user.react(LONG)
    assert reaction.text == "I'm on a bus. Please, one sentence!"
    assert (reaction.passed, reaction.failed_rules) == (False, ("one short sentence",))
    (asked,) = player.asked
    role, seen = (message["content"] for message in asked["messages"])
    assert BRIEF.description in role
    assert QUESTION.text in seen
    assert LONG in seen
    assert asked["keep"] is False
    # It is told who it is, and not what the rules found.
    assert "one short sentence" not in seen


async def test_a_model_that_says_nothing_speaks_with_the_personas_words() -> None:
    user = ModelUser(BRIEF, answering("<think>Hm, how to say"), seed=4)
    user.opening(QUESTION)
    assert (await user.react(LONG)).text in BRIEF.rules[0].displeased.by_language["en"]


async def test_a_model_user_holds_a_conversation() -> None:
    chat, player = answering(LONG, short(QUESTION), short(NEXT)), answering("Shorter!", "Fine.", "Fine again.")
    held = await hold(chat, ModelUser(BRIEF, player, seed=1), [QUESTION, NEXT], session="s", turns=3)
    assert [exchange.reaction for exchange in held.exchanges] == ["Shorter!", "Fine.", "Fine again."]
    assert [exchange.passed for exchange in held.exchanges] == [False, True, True]
    assert held.exchanges[1].message == "Shorter!"
    assert held.exchanges[2].message.startswith("Fine. ")
    # What the player is shown is what it said last itself.
    assert "Shorter!" in player.asked[1]["messages"][1]["content"]


async def test_a_chat_that_fails_ends_the_conversation() -> None:
    def fail(_messages: Sequence[Message]) -> str:
        raise ServerError("no reply")

    chat: Chat = ScriptedChat(fail)
    with pytest.raises(ServerError):
        await hold(chat, ScriptedUser(BRIEF, 1), [QUESTION], session="s", turns=1)
