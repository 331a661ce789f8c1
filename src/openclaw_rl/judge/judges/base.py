"""What a judge is: what it is shown of a turn, the opinion it gives, and how it fails.

And several judges as one, and those that read feedback: explicit scores, and what came next as the rules read it.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Protocol, TypeVar

from openclaw_rl.errors import UserError
from openclaw_rl.judge.rules import ReplyKind, instruct, read_reply, ready
from openclaw_rl.judge.rules.phrases import QUOTATION, shorten, without_code
from openclaw_rl.judge.rules.wishes import is_unsafe, without_material
from openclaw_rl.rendering.chat import content_text, spell_out_message, template_message
from openclaw_rl.rendering.clients import is_passing, message_words
from openclaw_rl.types import UNREAD, Feedback, HeardWishes, Hint, Note, Question, Source, StoredTurn, Verdict, Vote

Questions = frozenset[Question]
WISHES_ALONE = frozenset([Question.WISHES])
#: The reason when a judge that did not answer in time gave no other.
TIMED_OUT = "the judge does not answer in time"
#: A hint needs more characters than this.
MIN_HINT = 10
#: Known wishes that a judge is shown: those that were said last.
MAX_NOTES_SHOWN = 20
#: Characters at the beginning and the end of a long message in which wishes are looked for.
HEAD, TAIL = 2000, 1000
#: Results of tools that a wish is compared with.
MAX_RESULTS = 20
#: Failures in a row after which a judge counts as down.
FAILURES = 3
#: Seconds of the first and the longest pause. Each pause is twice as long as the one before.
FIRST_PAUSE = 1.0
LONGEST_PAUSE = 60.0
#: A longer text of an environment is cut in the middle, because the beginning and the end say most.
MAX_HINT_CHARACTERS = 2000
#: The score of the response before each kind of reply. A rejection does not say what would be better.
READINGS: dict[ReplyKind, float] = {
    ReplyKind.ACKNOWLEDGEMENT: 1.0,
    ReplyKind.MOVING_ON: 1.0,
    ReplyKind.TOOL_SUCCESS: 1.0,
    ReplyKind.CORRECTION: -1.0,
    ReplyKind.CHANGE_REQUEST: -1.0,
    ReplyKind.REJECTION: -1.0,
    ReplyKind.REPETITION: -1.0,
    ReplyKind.TOOL_ERROR: -1.0,
}
#: Replies whose hints may be wishes about form. A tool's message may sound like a wish but is none.
ABOUT_FORM = (ReplyKind.CHANGE_REQUEST, ReplyKind.CORRECTION)

T = TypeVar("T")


#: No judge is left alone for longer, whatever it asks for.
MAX_RETRY_AFTER = 600.0


class JudgeError(Exception):
    """There is no verdict this time; the message says why."""


class JudgeDown(JudgeError):
    """The judge cannot be asked at the moment. The turn waits.

    `suspect`: the judge failed while it worked on this turn. If it answers other turns meanwhile, the turn is blamed.
    """

    def __init__(self, reason: str, retry_after: float = 0.0, *, suspect: bool = False) -> None:
        super().__init__(reason)
        self.retry_after, self.suspect = min(retry_after, MAX_RETRY_AFTER), suspect


class JudgeFailed(JudgeError):
    """The judge cannot judge this turn. After some trials the turn gets no verdict."""


@dataclass(frozen=True, slots=True)
class Said:
    """Words of a user in which wishes are looked for."""

    text: str
    own: str
    """The text without code, quoted lines and material that it brings along."""
    when: float
    opening: bool = False
    """Whether they began the conversation. Others came after the response."""


@dataclass(frozen=True, slots=True)
class UserWords:
    """What a judge that reads wishes is shown of the user."""

    said: tuple[Said, ...]
    """In the order in which it was said."""
    notes: tuple[Note, ...] = ()
    """The user's notes, those that were said last at the end."""
    others: str = ""
    """What is not the user's own: results of tools, and what the user quotes and pastes."""


@dataclass(frozen=True, slots=True)
class Case:
    """What a judge is shown of a turn."""

    turn: int
    request: str
    """The user's words and the tools' results since the response before."""
    response: str
    """The response as text, with its tool calls written out."""
    next_state: Sequence[Mapping[str, Any]]
    feedback: Sequence[Feedback]
    in_episode: bool = False
    """Whether the turn is part of an episode, which its environment has rewarded."""
    user: UserWords | None = None
    """None if no wishes are to be read."""

    @property
    def outcome(self) -> str:
        """What came next, as text."""
        return "\n".join(content_text(message.get("content")) for message in self.next_state)

    @classmethod
    def of(cls, turn: StoredTurn) -> "Case":
        return cls(
            turn.number,
            last_request(turn.messages),
            as_text(turn.message),
            turn.next_state or (),
            turn.feedback,
            turn.episode is not None,
        )


@dataclass(frozen=True, slots=True)
class Opinion:
    """One judge's answers to the questions it was asked. None means that it cannot say."""

    score: float | None = None
    hints: tuple[str, ...] | None = None
    """Empty: nothing would have been better."""
    votes: tuple[Vote, ...] = ()
    reason: str = ""
    source: Source | None = None
    """Set where it differs from the judge's own source."""
    wishes: HeardWishes | None = None

    def answers(self, question: Question) -> bool:
        answers = {Question.SCORE: self.score, Question.HINT: self.hints, Question.WISHES: self.wishes}
        return answers[question] is not None


class Judge(Protocol):
    """Answers questions about a case, or abstains with a reason."""

    @property
    def source(self) -> Source: ...

    @property
    def down(self) -> str | None:
        """Why the judge cannot be asked at the moment; None if it can."""

    @property
    def answered(self) -> int:
        """How many calls it has answered; 0 for a judge that is never down."""

    async def judge(self, case: Case, wanted: Questions) -> Opinion:
        """Raises JudgeError or TimeoutError if the judge gives no opinion."""


def last_request(messages: Sequence[dict[str, Any]]) -> str:
    """Everything that the user and tools said since the last response."""
    responses = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    new = [m for m in messages[responses[-1] + 1 if responses else 0 :] if m["role"] in ("user", "tool")]
    words = [message_words(message) for message in new]
    if new and all(message["role"] == "tool" for message in new):
        # A tool's result alone does not say what the user wanted.
        words.insert(0, last_user_words(messages))
    return "\n".join(filter(None, words))


def last_user_words(messages: Sequence[dict[str, Any]]) -> str:
    texts = (message_words(message) for message in reversed(messages) if message["role"] == "user")
    return next(filter(None, texts), "")


def as_text(message: dict[str, Any]) -> str:
    """An assistant's message as text, including its tool calls."""
    return content_text(spell_out_message(template_message(message))["content"])


def said_after(turn: StoredTurn) -> list[tuple[str, float]]:
    """What the user said after a turn and in explicit feedback on it, and when, in this order."""
    came = turn.next_at or turn.created
    said = [
        (content_text(message.get("content")), came)
        for message in turn.next_state or ()
        if message.get("role") == "user"
    ]
    said += [(word.text, word.created) for word in turn.feedback if word.source is Source.EXPLICIT and word.text]
    return sorted(said, key=lambda pair: pair[1])


def words_around(turn: StoredTurn, notes: Sequence[Note]) -> UserWords | None:
    """What a judge is shown of the user around a turn; None if nobody said anything in which there may be wishes."""
    if turn.episode is not None:
        return None
    began = [] if any(message["role"] == "assistant" for message in turn.messages) else turn.messages
    openings = [message_words(message) for message in began if message["role"] == "user" and not is_passing(message)]
    said = [Said(text, own_words(text), turn.created, opening=True) for text in openings]
    said += [Said(text, own_words(text), when) for text, when in said_after(turn)]
    known = sorted((note for note in notes if not note.question), key=attrgetter("said"))[-MAX_NOTES_SHOWN:]
    heard = tuple(one for one in said if one.own)
    return UserWords(heard, tuple(known), words_of_others(turn, heard)) if heard else None


def own_words(text: str) -> str:
    """A user's message without code, quoted lines and material; empty if it tries to change whom the model obeys."""
    return "" if is_unsafe(text) else without_material(without_code(shorten(text, HEAD, TAIL))).strip()


def words_of_others(turn: StoredTurn, heard: Sequence[Said]) -> str:
    """The results of tools, and what the user quotes or pastes."""
    messages = [*turn.messages, *(turn.next_state or ())]
    results = [content_text(one.get("content")) for one in messages if one.get("role") in ("tool", "function")]
    pasted = [said.text.replace(said.own, " ") for said in heard]
    quoted = [quotation for said in heard for quotation in QUOTATION.findall(said.own)]
    return "\n".join(shorten(text, HEAD, TAIL) for text in [*results[-MAX_RESULTS:], *pasted, *quoted])


def agreement(votes: Sequence[Vote]) -> float | None:
    """The winner's share of the valid votes."""
    values = [vote.value for vote in votes if vote.value is not None]
    return Counter(values).most_common(1)[0][1] / len(values) if values else None


class Breaker:
    """A circuit breaker.

    - Closed: every call passes.
    - Open: every call is refused until the pause is over. Then one trial call passes, and its result decides.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        *,
        first_pause: float = FIRST_PAUSE,
        longest_pause: float = LONGEST_PAUSE,
    ) -> None:
        self._clock = clock
        self._first_pause = first_pause
        self._longest_pause = longest_pause
        self._failures = 0
        self._pause = first_pause
        self._until = 0.0
        self._trying = False
        self.reason: str | None = None
        """Why it is open; None while it is closed."""
        self.answered = 0
        """How many calls the judge has answered."""

    @property
    def wait(self) -> float:
        """Seconds until the next trial call."""
        return max(0.0, self._until - self._clock())

    async def call(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Ask, unless the breaker is open: then raise JudgeDown. Also raises what `ask` raises."""
        trial = self.reason is not None
        if self.reason is not None and (self._trying or self.wait):
            raise JudgeDown(self.reason, self.wait)
        self._trying = trial
        try:
            result = await ask()
        except JudgeDown as error:
            self._failed(str(error), error.retry_after, trial)
            raise
        except TimeoutError as error:
            self._failed(str(error) or TIMED_OUT, 0.0, trial)
            raise
        except JudgeFailed:
            self._answered()  # the judge works, only not on this turn
            raise
        finally:
            if trial:
                self._trying = False
        self._answered()
        return result

    def _answered(self) -> None:
        self._failures = 0
        self._pause = self._first_pause
        self.reason = None
        self.answered += 1

    def _failed(self, reason: str, retry_after: float, trial: bool) -> None:
        self._failures += 1
        if self.reason is not None and not trial:
            # This call began before the breaker opened. It may only make the pause longer.
            self._until = max(self._until, self._clock() + retry_after)
        elif self._failures >= FAILURES or retry_after:
            self.reason = reason
            self._until = self._clock() + max(self._pause, retry_after)
            self._pause = min(self._longest_pause, 2 * self._pause)


class BreakableJudge:
    """A judge that may be down, behind a circuit breaker."""

    def __init__(self) -> None:
        self.breaker = Breaker()

    @property
    def down(self) -> str | None:
        return self.breaker.reason

    @property
    def answered(self) -> int:
        return self.breaker.answered


#: How long a judge may be unreachable before judging again gives up, and how often it is tried meanwhile.
MAX_SECONDS_DOWN = 20.0
PAUSE_SECONDS = 1.0


class JudgePanel:
    """Asks judges one after the other, each only the questions that those before it left open.

    Wishes alone are asked for only after a complaint or a text of feedback, and no score waits for them.
    """

    def __init__(self, judges: Sequence[Judge]) -> None:
        self.judges = judges

    @property
    def down(self) -> str | None:
        """Why a judge cannot be asked at the moment; None if all can."""
        return next((judge.down for judge in self.judges if judge.down), None)

    @property
    def answered(self) -> int:
        """How many calls the judges that can be down have answered."""
        return sum(judge.answered for judge in self.judges)

    def without_feedback(self) -> "JudgePanel":
        """The same judges, except the one that repeats explicit feedback and rewards."""
        return JudgePanel([judge for judge in self.judges if judge.source is not Source.EXPLICIT])

    async def verdict(self, case: Case, wanted: Questions) -> Verdict:
        started = time.monotonic()
        opinions: dict[Question, tuple[Opinion, Source]] = {}
        votes: list[Vote] = []
        reasons: list[str] = []
        for judge in self.judges:
            still_open = frozenset(question for question in wanted if question not in opinions)
            if not still_open or (still_open == WISHES_ALONE and is_content(case, opinions.values())):
                break
            opinion = await self._ask(judge, case, still_open)
            votes += opinion.votes
            if opinion.reason:
                reasons.append(f"{judge.source}: {opinion.reason}")
            for question in still_open:
                if opinion.answers(question):
                    opinions[question] = (opinion, opinion.source or judge.source)
        score, score_source = opinions.get(Question.SCORE, (Opinion(), None))
        hints, hint_source = opinions.get(Question.HINT, (Opinion(), None))
        wishes, _ = opinions.get(Question.WISHES, (Opinion(), None))
        return Verdict(
            score=score.score,
            source=score_source or hint_source,
            hints=tuple(Hint(text) for text in hints.hints or ()),
            votes=tuple(votes),
            reason="; ".join(reasons),
            seconds=time.monotonic() - started,
            wishes=wishes.wishes,
        )

    async def _ask(self, judge: Judge, case: Case, questions: Questions) -> Opinion:
        try:
            return await judge.judge(case, questions)
        except (JudgeError, TimeoutError) as error:
            if questions != WISHES_ALONE:
                raise
            return Opinion(reason=f"no wishes were read: {str(error) or TIMED_OUT}")


def is_content(case: Case, opinions: Iterable[tuple[Opinion, Source]]) -> bool:
    """Whether the user is content and wrote no text of feedback."""
    pleased = any(opinion.score is not None and opinion.score > 0 for opinion, _ in opinions)
    return pleased and not any(said.text for said in case.feedback)


@dataclass(frozen=True, slots=True)
class TwoScores:
    """A turn that was judged twice; None is an abstention."""

    turn: int
    stored: float | None
    new: float | None


async def rejudge(panel: JudgePanel, turn: StoredTurn) -> TwoScores:
    """Score a turn without the people's own feedback on it, which the judge is measured by.

    Raises UserError if the judge stays unreachable: its abstentions would say nothing about it.
    """
    stored = turn.verdict.score if turn.verdict else None
    patience = MAX_SECONDS_DOWN
    while True:
        try:
            verdict = await panel.verdict(replace(Case.of(turn), feedback=()), frozenset([Question.SCORE]))
            return TwoScores(turn.number, stored, verdict.score)
        except JudgeDown as error:
            if patience <= 0:
                raise UserError(f"The judge cannot be asked: {error}.") from None
            pause = max(PAUSE_SECONDS, error.retry_after)
            patience -= pause
            await asyncio.sleep(pause)
        except (JudgeError, TimeoutError):
            return TwoScores(turn.number, stored, None)


class Explicit:
    """Gives the last feedback that somebody sent about this turn. It is never down.

    In an episode that is the reward, and the environment's text about the turn is the hint. Nobody else is asked.
    """

    source = Source.EXPLICIT
    down = None
    answered = 0

    async def judge(self, case: Case, wanted: Questions) -> Opinion:
        if not case.feedback:
            return Opinion()
        last = case.feedback[-1]
        if case.in_episode:
            return Opinion(last.score, environment_hints(last.text), source=last.source)
        hints: tuple[str, ...] | None = () if last.score > 0 else None
        if hints is None and last.source is Source.EXPLICIT and last.text:
            await ready()
            hint = instruct(" ".join(last.text.split()), case.response)
            hints = (hint,) if len(hint) > MIN_HINT else None
        return Opinion(last.score, hints, source=last.source)


def environment_hints(text: str) -> tuple[str, ...]:
    hint = " ".join(text.split())
    if len(hint) > MAX_HINT_CHARACTERS:
        half = MAX_HINT_CHARACTERS // 2
        hint = f"{hint[:half]} … {hint[-half:]}"
    return (hint,) if len(hint) > MIN_HINT else ()


class FeedbackReader:
    """Reads what came next by rules. It is never down."""

    source = Source.FEEDBACK
    down = None
    answered = 0

    async def judge(self, case: Case, wanted: Questions) -> Opinion:
        if not case.next_state:
            return Opinion(reason="nothing came next")
        await ready()
        reading = read_reply(case.request, case.response, case.next_state)
        score = READINGS.get(reading.kind)
        if score is None:
            return Opinion(reason=UNREAD)
        hint = instruct(reading.hint, case.response) if reading.kind in ABOUT_FORM else reading.hint
        hints = (hint,) if len(hint) > MIN_HINT else () if score > 0 else None
        return Opinion(score, hints, reason=str(reading.kind))
