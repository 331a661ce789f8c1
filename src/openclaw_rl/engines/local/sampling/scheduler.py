"""Which tokens go through the model next: continuous batching over one page pool.

Sequences join and leave the running batch at token boundaries. Each step computes one token of every sequence
that is generating, plus a bounded share of the prompts that are still being read, so that a long prompt never
stops the others. When pages run out, the least urgent sequence gives its pages back and is resumed later.

A step may be planned before the tokens that the step before it draws are known (`plan_ahead`), so that the device need
not wait for the host.

Users do not wait for background work: it gives up its places and pages to them, and its prompts are read with the part
of a step that the users' prompts leave over.
"""

import random
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from openclaw_rl.engines.constraints import Automaton
from openclaw_rl.engines.local.model.language_model import LanguageModel
from openclaw_rl.engines.local.sampling.page_pool import PAGE_SIZE, Digest, PagePool, chain, chain_root, next_digest
from openclaw_rl.types import FinishReason, Priority, SamplingParams, ScoreRequest, Scores, TopTokens

#: Rows of logits held at a time: at a vocabulary of 150,000, about 150 MB in float32.
ROWS = 256
#: A priority below all others: that of a page which no sequence computes.
NEVER = max(Priority) + 1


class Scoring:
    """An unfinished scoring request. If its sequence is preempted, pieces come again and replace the earlier ones."""

    def __init__(self, request: ScoreRequest) -> None:
        self.request = request
        self.first = len(request.ids) - request.last_n - 1
        """The position whose logits are of the first scored token."""
        self._logprobs = np.zeros(request.last_n, np.float32)
        top = (request.last_n, request.top_k)
        self._top = TopTokens(np.zeros(top, np.int32), np.zeros(top, np.float32)) if request.top_k else None
        self._targets = None if request.targets is None else np.zeros(request.targets.shape, np.float32)

    @torch.inference_mode()
    def read(self, decoder: LanguageModel, start: int, hidden: Tensor) -> None:
        """Take the hidden states of positions `start` and after."""
        for offset in range(0, len(hidden), ROWS):
            self._read(start + offset, decoder.logits(hidden[offset : offset + ROWS]))

    def scores(self) -> Scores:
        return Scores(self._logprobs.tolist(), self._top, self._targets)

    def _read(self, start: int, logits: Tensor) -> None:
        request = self.request
        place = slice(start - self.first, start - self.first + len(logits))
        normaliser = logits.logsumexp(-1, keepdim=True)
        ids = torch.tensor(request.ids[start + 1 : start + 1 + len(logits)], device=logits.device)
        self._logprobs[place] = (logits.gather(1, ids[:, None]) - normaliser)[:, 0].cpu()
        if self._top is not None:
            values, tokens = logits.topk(request.top_k)
            self._top.ids[place] = tokens.cpu()
            self._top.logprobs[place] = (values - normaliser).cpu()
        if self._targets is not None and request.targets is not None:
            wanted = torch.from_numpy(request.targets[place]).long().to(logits.device)
            self._targets[place] = (logits.gather(1, wanted) - normaliser).cpu()


@dataclass(eq=False, slots=True)
class Sequence:
    """An unfinished completion: its tokens so far, and how many of them the cache holds."""

    request: int
    index: int
    tokens: list[int]
    params: SamplingParams
    version: int
    slot: int
    order: tuple[int, int]
    """(priority, arrival): smaller goes first."""
    scoring: Scoring | None = None
    """Set if given tokens are scored. Such a sequence is done when all of them have been read."""
    owner: str = ""
    automaton: Automaton | None = None
    """Set if the completion is constrained."""
    rng: random.Random = field(init=False)
    prompt_length: int = field(init=False)
    computed: int = 0
    cached: int = 0
    """How many prompt tokens were found in the cache."""
    pages: list[int] = field(default_factory=list)
    state: object = None
    """What Transformers keeps for the sequence, if it does."""
    digests: list[Digest] = field(default_factory=list)
    """One for each page that is full and published."""
    _prompt_digests: list[Digest] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(f"{self.params.seed}:{self.index}")
        self.prompt_length = len(self.tokens)

    @property
    def drawn_by_device(self) -> bool:
        """Whether the host is not needed to draw: it knows what a constraint allows."""
        return self.automaton is None and self.scoring is None

    @property
    def priority(self) -> int:
        return self.order[0]

    @property
    def root(self) -> Digest:
        return chain_root(self.version, self.owner)

    def prompt_digests(self) -> list[Digest]:
        """One for each full page of the tokens that the cache may replace.

        Tokens whose logits are needed are left out: they always go through the model. Computed once, because the queue
        is searched often.
        """
        if len(self._prompt_digests) != self.first_logits // PAGE_SIZE:
            self._prompt_digests = list(chain(self.root, self.tokens[: self.first_logits]))
        return self._prompt_digests

    @property
    def first_logits(self) -> int:
        """The first position whose logits are needed. To draw, it is the last position."""
        return self.scoring.first if self.scoring else len(self.tokens) - 1

    @property
    def remaining(self) -> int:
        """Tokens that must go through the model before the next one can be drawn."""
        return len(self.tokens) - self.computed

    @property
    def last(self) -> bool:
        """Whether the next token is the last one in any case."""
        return len(self.tokens) + 1 - self.prompt_length >= self.params.max_tokens

    def append(self, token: int) -> FinishReason | None:
        """Add a drawn token. Returns why the sequence ends with it, or None."""
        self.tokens.append(token)
        if token in self.params.stop_token_ids:
            return FinishReason.STOP
        if len(self.tokens) - self.prompt_length >= self.params.max_tokens:
            return FinishReason.LENGTH
        if self.automaton is not None:
            self.automaton.accept(token)
        return None


@dataclass(frozen=True, slots=True)
class Work:
    """`count` tokens of a sequence, from `start` on, to run in this step."""

    sequence: Sequence
    start: int
    count: int
    drawn_by: int = -1
    """Of a token that was not known when the step was planned: the row of the step before that draws it. Else -1."""

    @property
    def stop(self) -> int:
        return self.start + self.count

    @property
    def ends(self) -> bool:
        """Whether all of the sequence's tokens have been read after this step."""
        return self.drawn_by >= 0 or self.stop == len(self.sequence.tokens)

    @property
    def draws(self) -> bool:
        """Whether the sequence's next token is drawn after this step."""
        return self.ends and self.sequence.scoring is None

    @property
    def scored(self) -> int:
        """How many of the tokens, at the end, have logits that are scored."""
        return min(self.count, max(0, self.stop - self.sequence.first_logits)) if self.sequence.scoring else 0


class Scheduler:
    """Decides each step's work. Owns the waiting and the running sequences and their pages."""

    def __init__(
        self,
        pool: PagePool,
        max_sequences: int,
        prefill_tokens: int,
        prefill_share: int = PAGE_SIZE,
        background_tokens: int | None = None,
        *,
        apart: bool = False,
    ) -> None:
        """`prefill_tokens` and `background_tokens`: prompt tokens of a step, in all and of background work.

        `apart`: sequences share no pages, which then only count tokens, and a step reads the whole of a prompt.
        """
        self.pool = pool
        self.max_sequences = max_sequences
        self.prefill_tokens = prefill_tokens
        self.prefill_share = prefill_share
        self.background_tokens = prefill_tokens if background_tokens is None else background_tokens
        self.apart = apart
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    def add(self, sequences: Iterable[Sequence]) -> None:
        self.waiting.extend(sequences)
        self._sort_waiting()

    def cancel(self, request: int, index: int | None = None) -> None:
        """Forget a request's sequences (or one of them), wherever they are."""

        def matches(sequence: Sequence) -> bool:
            return sequence.request == request and index in (None, sequence.index)

        self.waiting = deque(s for s in self.waiting if not matches(s))
        for sequence in [s for s in self.running if matches(s)]:
            self.finish(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Remove a sequence from the batch; its pages stay cached until their room is needed."""
        self.running.remove(sequence)
        self.pool.release(sequence.pages)
        sequence.pages = []
        sequence.state = None

    def plan(self) -> list[Work]:
        """The next step: rows of one token first (by slot, so that adapters run in few spans), then prompts."""
        self._admit()
        admitted = len(self.running)
        working = self._working()
        generating = sorted((s for s in working if s.remaining == 1), key=lambda s: s.slot)
        reading = [s for s in working if s.remaining > 1]
        work = [Work(s, s.computed, 1) for s in generating if self._make_room(s, 1)]
        for sequence, count in self._shares(reading):
            if count and self._make_room(sequence, count):
                work.append(Work(sequence, sequence.computed, count))
        if len(self.running) < admitted:
            # Making room for one sequence has sent another back to the queue, perhaps one planned before it.
            work = [item for item in work if item.sequence in self.running]
        return sorted(work, key=lambda item: item.count > 1)

    def plan_ahead(self, work: list[Work]) -> list[Work]:
        """The step after `work`, whose own tokens are still being drawn; none if it may depend on what they are.

        `work` has been committed. A sequence that turns out to have ended has a row all the same, which is to be
        dropped. Nobody is preempted for such a step. Nobody waits for its end who could join the batch now.
        """
        rows = {item.sequence: row for row, item in enumerate(item for item in work if item.draws)}
        working = self._working()
        if not all(s.drawn_by_device and s in rows for s in working):
            return []
        going = [s for s in working if not s.last]
        if self.waiting and (len(going) < len(working) or self._may_join(self.waiting[0])):
            return []
        if sum(pages_for(s.computed + 1) > len(s.pages) for s in going) > self.pool.available:
            return []
        for sequence in going:
            self._make_room(sequence, 1)
        return [Work(s, s.computed, 1, drawn_by=rows[s]) for s in sorted(going, key=lambda s: s.slot)]

    def _working(self) -> list[Sequence]:
        """The running sequences that take part in a step: work for idle times rests while there is other work."""
        urgent = [s for s in self.running if s.priority < Priority.IDLE]
        return urgent or self.running

    def still_running(self, work: list[Work]) -> list[Work]:
        """The part of a step that is about sequences which have not ended since it was planned."""
        running = set(self.running)
        return [item for item in work if item.sequence in running]

    def _shares(self, reading: list[Sequence]) -> list[tuple[Sequence, int]]:
        """How much of each prompt is read in this step: users' prompts first, then background work.

        Prompts of one priority share, so that a short one behind a long one is read soon. The rest goes to the most
        urgent of them.
        """
        if self.apart:
            return [(s, s.remaining) for s in reading[:1]]
        shares: list[tuple[Sequence, int]] = []
        budget = self.prefill_tokens
        for priority, equals in groupby(reading, key=lambda s: s.priority):
            prompts = list(equals)
            if priority >= Priority.BACKGROUND:
                budget = min(budget, self.background_tokens)
            counts = fair_shares([s.remaining for s in prompts], budget, self.prefill_share)
            budget -= sum(counts)
            shares += zip(prompts, counts, strict=True)
        return shares

    def commit(self, work: list[Work]) -> None:
        """The step ran: its tokens are in the cache, and the pages that they filled may be shared."""
        for item in work:
            sequence = item.sequence
            sequence.computed = item.stop
            while not self.apart and (len(sequence.digests) + 1) * PAGE_SIZE <= sequence.computed:
                self._publish_next(sequence)

    def _publish_next(self, sequence: Sequence) -> None:
        number = len(sequence.digests)
        parent = sequence.digests[-1] if sequence.digests else sequence.root
        page = sequence.tokens[number * PAGE_SIZE : (number + 1) * PAGE_SIZE]
        sequence.digests.append(next_digest(parent, page))
        self.pool.publish(sequence.pages[number], sequence.digests[-1])

    def _admit(self) -> None:
        """Move waiting sequences into the batch while there is room for them."""
        coming = self._pages_being_computed() if self.waiting and not self.apart else {}
        later: list[Sequence] = []
        while self.waiting and self._may_join(self.waiting[0]):
            sequence = self.waiting.popleft()
            digests = [] if self.apart else sequence.prompt_digests()
            known = self.pool.known(digests)
            if known < len(digests) and coming.get(digests[known], NEVER) <= sequence.priority:
                # Another sequence, no less urgent, is computing the pages that this one needs next: wait for them.
                later.append(sequence)
                continue
            if not self._make_place(sequence, digests, known):
                later.append(sequence)
                break
            self._start(sequence, self.pool.match(digests), digests[:known])
            coming.update(dict.fromkeys(digests[known:], sequence.priority))
        self.waiting.extendleft(reversed(later))

    def _may_join(self, sequence: Sequence) -> bool:
        """Whether the batch is not full, or holds a less urgent sequence."""
        return len(self.running) < self.max_sequences or self.running[-1].priority > sequence.priority

    def _make_place(self, sequence: Sequence, digests: list[Digest], known: int) -> bool:
        """Preempt less urgent sequences, the newest first, until this one fits; none if that would not suffice."""
        less_urgent = sum(s.priority > sequence.priority for s in self.running)
        if not self._fits(sequence, digests, known, without=less_urgent):
            return False
        while not self._fits(sequence, digests, known):
            self._preempt()
        return True

    def _start(self, sequence: Sequence, pages: list[int], digests: list[Digest]) -> None:
        sequence.pages = pages
        sequence.digests = digests
        sequence.computed = len(pages) * PAGE_SIZE
        sequence.cached = min(sequence.computed, sequence.prompt_length)
        self.running.append(sequence)
        self.running.sort(key=lambda s: s.order)

    def _pages_being_computed(self) -> dict[Digest, int]:
        """Each with the priority of the most urgent sequence that computes it."""
        coming: dict[Digest, int] = {}
        for sequence in self.running:
            if sequence.remaining > 1:
                for digest in sequence.prompt_digests():
                    coming.setdefault(digest, sequence.priority)
        return coming

    def _fits(self, sequence: Sequence, digests: list[Digest], known: int, without: int = 0) -> bool:
        """Whether its prompt fits in with the running sequences, counting the pages that their prompts still need.

        `without`: how many running sequences, the least urgent ones, are counted as gone.
        """
        stay = len(self.running) - without
        staying = self.running[:stay]
        gone = self.running[stay:]
        pending = sum(pages_for(len(s.tokens) + 1) - len(s.pages) for s in staying)
        new = pages_for(len(sequence.tokens) + 1) - known
        given_back = [page for s in gone for page in s.pages]
        room = self.pool.available_beside(digests[:known], given_back)
        return stay < self.max_sequences and new + max(pending, 0) <= room

    def _make_room(self, sequence: Sequence, count: int) -> bool:
        """Get pages for the sequence's next `count` tokens, from less urgent sequences if necessary."""
        needed = pages_for(sequence.computed + count)
        # A sequence that was sent back to the queue has no pages.
        while len(sequence.pages) < needed:
            if sequence not in self.running:
                return False
            page = self.pool.allocate(sequence.pages[-1] if sequence.pages else None)
            if page is None:
                self._preempt()
            else:
                sequence.pages.append(page)
        return True

    def _preempt(self) -> None:
        """Send the least urgent sequence back to the queue; its tokens will be computed again."""
        victim = max(self.running, key=lambda s: s.order)
        self.finish(victim)
        self.waiting.append(victim)
        self._sort_waiting()

    def _sort_waiting(self) -> None:
        self.waiting = deque(sorted(self.waiting, key=lambda s: s.order))


def fair_shares(wanted: list[int], budget: int, least: int) -> list[int]:
    """How many tokens each prompt gets, the most urgent first: equal shares; the others get what some do not need.

    A share is no smaller than `least`, so some prompts may get none.
    """
    shares = [0] * len(wanted)
    for pass_over in range(2):
        for i, want in enumerate(wanted):
            share = max(least, budget // (len(wanted) - i)) if pass_over == 0 else budget
            more = min(want - shares[i], share, budget)
            shares[i] += more
            budget -= more
    return shares


def pages_for(tokens: int) -> int:
    """How many pages hold that many tokens."""
    return -(-tokens // PAGE_SIZE)
