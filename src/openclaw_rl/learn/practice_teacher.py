"""The answers that are practised: what the base model says with a note, its examples and all other notes.

An answer is kept if it ended, makes sense, keeps to the note as far as that can be checked, and shows what the examples
have in common (`answer_traits`). Kept answers become further examples, so that later ones keep to the note more often.
The policy's own answers are checked in the same way. Some answers have code in them, so that the policy does not
unlearn to write it.
"""

import json
import math
import random
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.resources import files
from statistics import fmean
from typing import Any, Protocol, TypeVar

from openclaw_rl.aio import gather_or_cancel
from openclaw_rl.engines.base import EngineError, Sampler
from openclaw_rl.learn.answer_traits import AnswerTraits, confirmed, find_traits, words
from openclaw_rl.ledger import examples, notes
from openclaw_rl.ledger.examples import WRITTEN_BY_OWNER
from openclaw_rl.ledger.practices import LEARNED, questions
from openclaw_rl.ledger.store import Ledger
from openclaw_rl.rendering.chat import ChatError, ChatRenderer, Message
from openclaw_rl.rendering.context import applies, with_examples, with_notes
from openclaw_rl.sense import check, lacks_code, stems
from openclaw_rl.types import (
    BASE_VERSION,
    FinishReason,
    Note,
    NoteState,
    PracticedAnswer,
    PracticePrompt,
    Priority,
    SampleRequest,
    SamplingParams,
    ScoreRequest,
    Scores,
    scope_stems,
)

T = TypeVar("T")
#: Whether an answer keeps to a note's text; None if nothing shows it.
Keeps = Callable[[str, str], bool | None]


class WhenIdle(Protocol):
    """Does a short piece of work, which it begins while nobody else needs the sampler."""

    async def __call__(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T: ...


#: As answers are sampled for people. Colder ones repeat themselves, and so does a policy that imitates them.
TEMPERATURE = 0.7
MAX_ANSWER_TOKENS = 160
#: Examples of the note in a prompt: what its owner wrote or accepted, and answers that were kept.
OWN_EXAMPLES, KEPT_EXAMPLES = 2, 2
#: Examples of other notes that were learned for good, so that they are not unlearned.
OTHER_EXAMPLES = 2
#: Own answers of the base model that show what it usually does, and how long they are at most.
USUAL_ANSWERS, USUAL_TOKENS = 16, 64
#: Requests for code that are answered too, so that a policy that learns a form of words still writes code.
CODE_ANSWERS = 16
#: Prompts that are not practised with, so that the policy can be tried with them.
TRIAL_PROMPTS = 16
#: One prompt in this many of those that a note with a scope is for is kept for the trial.
TRIAL_SHARE = 4
#: An answer with a larger share of an example's content words, and with at least so many of them, is a copy of it.
MAX_COPIED, MIN_COPIED = 0.5, 3
#: The share of the policy's answers that must show whether they keep to the note. Some notes are only ever seen to be
#: kept ("Call me Sam."), and the few answers that show it say nothing about the others.
MIN_SHOWN = 0.5
#: An answer with fewer characters than this share of the shortest example is too short. Otherwise a policy learns that
#: the least text is the surest way to keep to a note.
MIN_LENGTH = 0.5
#: Where a note is about length ("One brief sentence."): how many times the words of the longest example an answer may
#: have.
MAX_LONGER = 1.25
_SENTENCE = "This is a sentence. "
#: Answers that are sampled at the same time.
MAX_CONCURRENT = 16


def shipped_prompts(name: str = "practice_prompts.jsonl") -> list[PracticePrompt]:
    """The first messages that come with the program, in a file of this name."""
    text = (files(__package__) / name).read_text("utf-8")
    return [PracticePrompt(json.loads(line)["prompt"]) for line in text.splitlines()]


@dataclass(frozen=True, slots=True)
class PromptSets:
    """The first messages of a practice."""

    practised: list[PracticePrompt]
    trial: list[PracticePrompt]
    others: list[PracticePrompt]
    """Those that the note is not for."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """An answer as it was sampled."""

    prompt: PracticePrompt
    ids: tuple[int, ...]
    text: str
    ended: bool
    logprob: float
    """The mean of its tokens' log-probs."""


class PracticeTeacher:
    """Makes the answers of one practice, each `when_idle`. Every call may raise EngineError or LedgerError."""

    def __init__(
        self,
        ledger: Ledger,
        sampler: Sampler,
        renderer: ChatRenderer,
        note: Note,
        keeps: Keeps,
        when_idle: WhenIdle,
        seed: int,
    ) -> None:
        self.sampler = sampler
        self.when_idle = when_idle
        self.renderer = renderer
        self.note = note
        self.keeps = keeps
        self.open_requests = 0
        """Requests of its own that the sampler works on."""
        self.sampled = self.accepted = 0
        """Answers with the note so far, and how many of them keep to it."""
        self.kept: list[tuple[str, str]] = []
        """Questions and answers that keep to it, also those from before a restart."""
        self.traits = AnswerTraits()
        self._learned_traits: dict[Note, AnswerTraits] = {}
        self._most_words = math.inf
        self._usual: list[str] = []
        self._code: deque[Sampled] = deque()
        """Answers with code, if the note is for every request. Each is taken in turn."""
        self._dice = random.Random(seed)
        self._draws = seed << 20
        in_use = ledger.read(notes.for_new_conversation, note.owner)
        self._notes = [one for one in in_use if not one.question]
        self._sort_examples(in_use, ledger.read(examples.shown, note.owner))
        self.prompts = self._choose_prompts(ledger.read(questions, note.owner))
        self._order: list[PracticePrompt] = []
        self._ready: list[Sampled] = []
        """Kept answers that no step has taken yet."""
        self._shown: list[tuple[str, str]] = []
        """The examples of the next prompts. Those of one call share them, and so the beginning of their prompts."""

    def _sort_examples(self, in_use: Sequence[Note], shown: Mapping[int, set[int]]) -> None:
        """Find the examples of the note, the best last, and one of each note that was learned for good before."""
        learned = {one.number for one in self._notes if one.state is NoteState.RETIRED and one.reason == LEARNED}
        ranked = sorted(
            (one for one in in_use if one.question), key=lambda one: (one.origin in WRITTEN_BY_OWNER, one.number)
        )
        # One that shows no known note comes before those that show this one.
        fitting = [one for one in ranked if self.note.number in shown.get(one.number, {self.note.number})]
        fitting.sort(key=lambda one: one.number in shown)
        # Two corrections may be the same text, and what a text has in common with itself means nothing.
        different = {one.text: (one.question, one.text) for one in fitting}
        self._examples = list(different.values())[-OWN_EXAMPLES:]
        self._learned = {
            other: [(one.question, one.text) for one in ranked if other.number in shown.get(one.number, set())]
            for other in self._notes
            if other.number in learned - {self.note.number}
        }
        """The notes that were learned for good before, with their examples."""
        self._others = [given[-1] for given in self._learned.values() if given][-OTHER_EXAMPLES:]
        self._least_characters = MIN_LENGTH * min((len(answer) for _, answer in self._examples), default=0)
        self._free_words = bool(self._examples) and not any(
            check(answer, question, "").ok for question, answer in self._examples
        )

    def _choose_prompts(self, own: Sequence[PracticePrompt]) -> PromptSets:
        """The owner's own messages first, as far as the note is for them, then those that come with the program."""
        shown = {question for question, _ in self._examples}
        shipped = shipped_prompts()
        self._dice.shuffle(shipped)
        known = [prompt for prompt in (*own, *shipped) if prompt.text not in shown]
        fitting = [prompt for prompt in known if concerns(self.note, prompt.text)]
        count = min(TRIAL_PROMPTS, len(fitting) // TRIAL_SHARE)
        others = [prompt for prompt in known if not concerns(self.note, prompt.text)]
        return PromptSets(fitting[: len(fitting) - count], fitting[len(fitting) - count :], others)

    async def prepare(self) -> None:
        """Learn from the base model's usual answers what the examples have in common."""
        prompts = self.prompts.practised[-USUAL_ANSWERS:]
        usual = await self._ask(prompts, self._without_context, BASE_VERSION, USUAL_TOKENS)
        self._usual = [one.text for one in usual]
        wanted = [answer for _, answer in self._examples]
        self.traits = find_traits(wanted, self._usual)
        self._learned_traits = {
            note: find_traits([answer for _, answer in given], self._usual) for note, given in self._learned.items()
        }
        if wanted and self._is_about_length():
            self._most_words = MAX_LONGER * max(len(words(answer)) for answer in wanted)
        if not self.note.scope:
            self._code.extend(await self._answers_with_code())

    async def _answers_with_code(self) -> list[Sampled]:
        """What the base model answers with the note where it then still writes code, and else without it."""
        prompts = self._dice.sample(shipped_prompts("code_prompts.jsonl"), CODE_ANSWERS)
        self._shown = [*self._others, *self._examples]
        noted = [one for one in await self._ask(prompts, self._with_context, BASE_VERSION) if self._is_fit(one)]
        kept = [one for one in noted if self.shows_note(one.text) is not False]
        left = [prompt for prompt in prompts if all(one.prompt != prompt for one in kept)]
        usual = await self._ask(left, self._without_context, BASE_VERSION)
        return [*kept, *(one for one in usual if one.ended and is_sensible(one))]

    def _is_about_length(self) -> bool:
        """Whether a short text keeps to the note, and a long one of the same sentences does not."""
        return self.keeps(self.note.text, _SENTENCE) is True and self.keeps(self.note.text, _SENTENCE * 60) is False

    @property
    def ready(self) -> int:
        """How many kept answers no step has taken yet."""
        return len(self._ready)

    async def sample(self, count: int) -> None:
        """Sample `count` answers with the note, and keep those that keep to it."""
        # Of those that were kept so far, others each time, so that none is copied.
        more = self._dice.sample(self.kept, KEPT_EXAMPLES) if len(self.kept) > KEPT_EXAMPLES else []
        self._shown = [*self._others, *self._dice.sample([*self._examples, *more], len(self._examples) + len(more))]
        prompts = [self._next_prompt() for _ in range(count)]
        asked = await self._ask(prompts, self._with_context, BASE_VERSION)
        sensible = [one for one in asked if self._is_fit(one)]
        if not self.sampled:
            wanted = [answer for _, answer in self._examples]
            self.traits = confirmed(self.traits, wanted, [one.text for one in sensible], self._usual)
        kept = [one for one in sensible if self.shows_note(one.text) is not False]
        self.sampled += count
        self.accepted += len(kept)
        self.kept += [(one.prompt.text, one.text) for one in kept]
        self._ready += kept

    async def take(self, count: int) -> list[PracticedAnswer]:
        """Kept answers, ready to be trained on."""
        answers = await self._to_train(self._ready[:count])
        del self._ready[:count]
        return answers

    async def scored_answers(self, count: int) -> list[PracticedAnswer]:
        """Sample answers of the policy without the note, and score those that show whether they keep to it; none if
        few do."""
        sampled, version = await self._own(count)
        scored = [(one, score) for one in sampled if (score := self._score_of(one)) is not None]
        if len(scored) < MIN_SHOWN * len(sampled):
            return []
        ready = await self._to_train([one for one, _ in scored], version)
        return [replace(one, score=score) for one, (_, score) in zip(ready, scored, strict=True)]

    def _score_of(self, own: Sampled) -> float | None:
        kept = self.shows_note(own.text)
        return None if kept is None else 1.0 if kept and self.makes_sense(own) and self.keeps_learned(own) else -1.0

    async def distilled_answers(self, count: int) -> list[PracticedAnswer]:
        """Sample answers of the policy without the note, with what the base model thinks of them with the note."""
        sampled, version = await self._own(count)
        self.sampled += count
        ready = await self._to_train([one for one in sampled if one.ended], version)
        return [
            replace(one, teacher_logprobs=await self._score(self._with_context(one.prompt), one.response_ids, 0))
            for one in ready
        ]

    async def _own(self, count: int) -> tuple[list[Sampled], int]:
        """Answers of the policy without the note, and its version."""
        version = self.sampler.newest_version
        self._shown = [*self._others, *self._examples]
        prompts = [self._next_prompt() for _ in range(count)]
        return await self._ask(prompts, self._without_context, version), version

    async def anchors(self, count: int) -> list[PracticedAnswer]:
        """The base model's own answers where the note is not wished; where it is wished everywhere, those with code."""
        if self.prompts.others:
            prompts = self._dice.choices(self.prompts.others, k=count)
            asked = await self._ask(prompts, self._with_other_notes, BASE_VERSION)
            chosen = [one for one in asked if self._is_fit(one)]
        else:
            chosen = [self._code[number] for number in range(min(count, len(self._code)))]
            self._code.rotate(-count)
        return [replace(one, is_anchor=True) for one in await self._to_train(chosen)]

    def _is_fit(self, one: Sampled) -> bool:
        """Whether an answer of the base model may be imitated, apart from the note."""
        return one.ended and self.makes_sense(one) and self.keeps_learned(one)

    async def try_policy(self) -> tuple[int, int]:
        """How many answers of the policy without the note keep to it, of how many that show it; of 0 if few do."""
        self._shown = [*self._others, *self._examples]
        asked = await self._ask(self.prompts.trial, self._without_context, self.sampler.newest_version)
        shown = [(self.shows_note(one.text), self.makes_sense(one)) for one in asked]
        checked = [bool(kept) and sensible for kept, sensible in shown if kept is not None]
        return (sum(checked), len(checked)) if len(checked) >= MIN_SHOWN * len(asked) else (0, 0)

    def makes_sense(self, sampled: Sampled) -> bool:
        """Whether an answer is none of the examples again, not much shorter, and the check of sense accepts it.

        It need not share words with its question where a note is checked to be kept ("Answer in French.") or where the
        owner's own examples do not.
        """
        free = self._free_words or self.keeps(self.note.text, sampled.text) is True
        if len(sampled.text) < self._least_characters or not is_sensible(sampled, free=free):
            return False
        return not any(is_copy(sampled.text, answer) for _, answer in self._shown)

    def keeps_learned(self, sampled: Sampled) -> bool:
        """Whether an answer breaks none of the notes that were learned before, as far as that can be checked."""
        return all(
            self.keeps(note.text, sampled.text) is not False and traits.shown_by(sampled.text, with_words=False)
            for note, traits in self._learned_traits.items()
            if concerns(note, sampled.prompt.text)
        )

    def shows_note(self, text: str) -> bool | None:
        """Whether an answer keeps to the note; None if nothing shows it."""
        said = self.keeps(self.note.text, text)
        if len(words(text)) > self._most_words:
            return False
        if said is False or not self.traits:
            return said
        # Words that the examples share may be there by chance: they do not matter where the note itself can be checked.
        return self.traits.shown_by(text, with_words=said is None)

    def _next_prompt(self) -> PracticePrompt:
        """Each prompt once, the owner's own before others and else in the order of the seed, then again."""
        if not self._order:
            shuffled = self._dice.sample(self.prompts.practised, len(self.prompts.practised))
            self._order = sorted(shuffled, key=lambda prompt: prompt.turn is not None)
        return self._order.pop()

    def _without_context(self, prompt: PracticePrompt) -> list[int]:
        return self._ids([{"role": "user", "content": prompt.text}])

    def _with_context(self, prompt: PracticePrompt) -> list[int]:
        return self._noted(prompt, [shown for shown in self._shown if shown[0] != prompt.text])

    def _with_other_notes(self, prompt: PracticePrompt) -> list[int]:
        return self._noted(prompt, self._others)

    def _noted(self, prompt: PracticePrompt, given: Sequence[tuple[str, str]]) -> list[int]:
        """A prompt with the notes that are for it, and examples; with fewer examples if they fill the context."""
        texts = [note.text for note in self._notes if concerns(note, prompt.text)]
        messages = with_notes([{"role": "user", "content": prompt.text}], texts, self.renderer.default_system)
        room = self.sampler.limits.max_context_tokens - MAX_ANSWER_TOKENS
        for first in range(len(given) + 1):
            ids = self._ids(with_examples(messages, given[first:]))
            if len(ids) <= room:
                return ids
        return self._without_context(prompt)

    def _ids(self, messages: list[Message]) -> list[int]:
        try:
            return list(self.renderer.prompt(self.renderer.text(messages)).ids)
        except ChatError as error:
            raise EngineError(f"The model's template does not accept a conversation with notes: {error}") from error

    async def _ask(
        self,
        prompts: Sequence[PracticePrompt],
        write: Callable[[PracticePrompt], list[int]],
        version: int,
        max_tokens: int = MAX_ANSWER_TOKENS,
    ) -> list[Sampled]:
        """Sample an answer to each prompt as background work, each when nobody needs the sampler."""
        waiting = iter(prompts)

        async def answer_all() -> list[Sampled]:
            return [
                await self.when_idle(partial(self._sample, prompt, write(prompt), version, max_tokens))
                for prompt in waiting
            ]

        workers = min(MAX_CONCURRENT, self.sampler.limits.max_sequences, len(prompts))
        return [one for done in await gather_or_cancel([answer_all() for _ in range(workers)]) for one in done]

    async def _sample(self, prompt: PracticePrompt, ids: Sequence[int], version: int, max_tokens: int) -> Sampled:
        self._draws += 1
        params = SamplingParams(
            min(max_tokens, self.sampler.limits.max_context_tokens - len(ids)),
            temperature=TEMPERATURE,
            seed=self._draws,
            stop_token_ids=self.renderer.tokenizer.eos_ids,
        )
        request = SampleRequest(ids, params, version=version, priority=Priority.IDLE, owner=self.note.owner)
        self.open_requests += 1
        stream = self.sampler.sample(request)
        try:
            tokens = [token async for some in stream for token in some]
        finally:
            stream.close()
            self.open_requests -= 1
        response = tuple(token.token_id for token in tokens)
        text = str(self.renderer.tokenizer.backend.decode(list(response), skip_special_tokens=True)).strip()
        ended = tokens[-1].finish is FinishReason.STOP
        return Sampled(prompt, response, text, ended, fmean(token.logprob for token in tokens))

    async def _to_train(self, sampled: Sequence[Sampled], version: int | None = None) -> list[PracticedAnswer]:
        """Answers with the log-probs that the policy gives them without the note."""
        version = self.sampler.newest_version if version is None else version

        async def scored(one: Sampled) -> PracticedAnswer:
            ids = tuple(self._without_context(one.prompt))
            logprobs = await self._score(ids, one.ids, version)
            return PracticedAnswer(
                one.prompt, one.text, ids, one.ids, logprobs, version, taught_logprob=one.logprob, ended=one.ended
            )

        return await gather_or_cancel([scored(one) for one in sampled])

    async def _score(self, prompt: Sequence[int], response: Sequence[int], version: int) -> tuple[float, ...]:
        ids = [*prompt, *response]
        request = ScoreRequest(ids, len(response), version=version, owner=self.note.owner, priority=Priority.IDLE)

        async def score() -> Scores:
            self.open_requests += 1
            try:
                return await self.sampler.score(request)
            finally:
                self.open_requests -= 1

        return tuple((await self.when_idle(score)).logprobs)


def is_sensible(sampled: Sampled, *, free: bool = False) -> bool:
    """Whether an answer makes sense apart from the note. It may be `free` of words of its question."""
    answer, question = sampled.text, sampled.prompt.text
    return check(answer, question, "", translated=free).ok and not lacks_code(answer, question)


def concerns(note: Note, request: str) -> bool:
    """Whether a note is for a request."""
    said = request.casefold()
    return not note.scope or applies(scope_stems(note.scope), said, scope_stems(said))


def is_copy(text: str, example: str) -> bool:
    """Whether an answer says what an example says, to whatever it was asked."""
    said, shown = stems(text), stems(example)
    return len(said & shown) > MAX_COPIED * len(said) and len(said & shown) >= MIN_COPIED
