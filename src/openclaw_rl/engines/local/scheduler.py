"""Which tokens go through the model next: continuous batching over one page pool.

Sequences join and leave the running batch at token boundaries. Each step computes one token of every sequence
that is generating, plus a bounded share of the prompts that are still being read, so that a long prompt never
stops the others. When pages run out, the least urgent sequence gives its pages back and is resumed later.
"""

import random
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from openclaw_rl.engines.local.pages import PAGE_SIZE, Digest, PagePool, chain, next_digest
from openclaw_rl.engines.local.scoring import Scoring
from openclaw_rl.types import FinishReason, SamplingParams


@dataclass(eq=False, slots=True)
class Sequence:
    """One completion on its way: its tokens so far, and how many of them the cache holds."""

    request: int
    index: int
    tokens: list[int]
    params: SamplingParams
    version: int
    slot: int
    order: tuple[int, int]
    """(priority, arrival): smaller goes first."""
    scoring: Scoring | None = None
    """Set where tokens are given and scored; such a sequence is done when all of them have been read."""
    rng: random.Random = field(init=False)
    prompt_length: int = field(init=False)
    computed: int = 0
    cached: int = 0
    """How many prompt tokens were found in the cache."""
    pages: list[int] = field(default_factory=list)
    digests: list[Digest] = field(default_factory=list)
    """One for each page that is full and published."""
    _prompt_digests: list[Digest] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(f"{self.params.seed}:{self.index}")
        self.prompt_length = len(self.tokens)

    @property
    def root(self) -> Digest:
        """Keys and values depend on the adapter, so only sequences of one version share pages."""
        return self.version.to_bytes(8, "big")

    def prompt_digests(self) -> list[Digest]:
        """One for each full page of the tokens that the cache may stand in for; computed once, as a queue is looked
        through often.

        Tokens whose logits are needed are left out: they always go through the model.
        """
        if len(self._prompt_digests) != self.first_logits // PAGE_SIZE:
            self._prompt_digests = list(chain(self.root, self.tokens[: self.first_logits]))
        return self._prompt_digests

    @property
    def first_logits(self) -> int:
        """The first position whose logits are needed: the last one's are drawn from."""
        return self.scoring.first if self.scoring else len(self.tokens) - 1

    @property
    def remaining(self) -> int:
        """Tokens that must go through the model before the next one can be drawn."""
        return len(self.tokens) - self.computed

    def append(self, token: int) -> FinishReason | None:
        """Add a drawn token; says whether the sequence ends with it."""
        self.tokens.append(token)
        if token in self.params.stop_token_ids:
            return FinishReason.STOP
        if len(self.tokens) - self.prompt_length >= self.params.max_tokens:
            return FinishReason.LENGTH
        return None


@dataclass(frozen=True, slots=True)
class Work:
    """`count` tokens of a sequence, from `start` on, to run in this step."""

    sequence: Sequence
    start: int
    count: int

    @property
    def stop(self) -> int:
        return self.start + self.count

    @property
    def ends(self) -> bool:
        """Whether all of the sequence's tokens have been read after this step."""
        return self.stop == len(self.sequence.tokens)

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

    def __init__(self, pool: PagePool, max_sequences: int, prefill_tokens: int, prefill_share: int = PAGE_SIZE) -> None:
        self.pool = pool
        self.max_sequences = max_sequences
        self.prefill_tokens, self.prefill_share = prefill_tokens, prefill_share
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

        def meant(sequence: Sequence) -> bool:
            return sequence.request == request and index in (None, sequence.index)

        self.waiting = deque(s for s in self.waiting if not meant(s))
        for sequence in [s for s in self.running if meant(s)]:
            self.finish(sequence)

    def finish(self, sequence: Sequence) -> None:
        """The sequence leaves the batch; its pages stay known until their room is needed."""
        self.running.remove(sequence)
        self.pool.release(sequence.pages)
        sequence.pages = []

    def plan(self) -> list[Work]:
        """The next step: rows of one token first (by slot, so that adapters run in few spans), then prompts."""
        self._admit()
        generating = sorted((s for s in self.running if s.remaining == 1), key=lambda s: s.slot)
        reading = [s for s in self.running if s.remaining > 1]
        work = [Work(s, s.computed, 1) for s in generating if self._make_room(s, 1)]
        # Prompts share the budget, so that a short one behind a long one is read soon; what is left over goes to
        # the most urgent.
        shares = fair_shares([s.remaining for s in reading], self.prefill_tokens, self.prefill_share)
        for sequence, count in zip(reading, shares, strict=True):
            if count and self._make_room(sequence, count):
                work.append(Work(sequence, sequence.computed, count))
        # Making room for one sequence may have sent another, planned before it, back to the queue.
        work = [item for item in work if item.sequence in self.running]
        return sorted(work, key=lambda item: item.count > 1)

    def commit(self, work: list[Work]) -> None:
        """The step ran: its tokens are in the cache, and the pages that they filled may be shared."""
        for item in work:
            sequence = item.sequence
            sequence.computed = item.stop
            while (len(sequence.digests) + 1) * PAGE_SIZE <= sequence.computed:
                self._publish_next(sequence)

    def _publish_next(self, sequence: Sequence) -> None:
        number = len(sequence.digests)
        parent = sequence.digests[-1] if sequence.digests else sequence.root
        page = sequence.tokens[number * PAGE_SIZE : (number + 1) * PAGE_SIZE]
        sequence.digests.append(next_digest(parent, page))
        self.pool.publish(sequence.pages[number], sequence.digests[-1])

    def _admit(self) -> None:
        """Move waiting sequences into the batch while there is room for them."""
        if self.waiting:
            self._make_place()
        coming = set(self._pages_being_computed()) if self.waiting else set()
        later: list[Sequence] = []
        while self.waiting and len(self.running) < self.max_sequences:
            sequence = self.waiting.popleft()
            digests = sequence.prompt_digests()
            known = self.pool.known(digests)
            if known < len(digests) and digests[known] in coming:
                # Another sequence is computing the very pages this one needs next: wait for them.
                later.append(sequence)
                continue
            if not self._fits(sequence, digests, known):
                later.append(sequence)
                break
            self._start(sequence, self.pool.match(digests), digests[:known])
            coming.update(digests[known:])
        self.waiting.extendleft(reversed(later))

    def _make_place(self) -> None:
        """Users do not wait for background work: if that fills the batch, its newest sequence steps back."""
        least = max(self.running, key=lambda s: s.order, default=None)
        if least and len(self.running) >= self.max_sequences and self.waiting[0].order[0] < least.order[0]:
            self._preempt()

    def _start(self, sequence: Sequence, pages: list[int], digests: list[Digest]) -> None:
        sequence.pages, sequence.digests = pages, digests
        sequence.computed = len(pages) * PAGE_SIZE
        sequence.cached = min(sequence.computed, sequence.prompt_length)
        self.running.append(sequence)
        self.running.sort(key=lambda s: s.order)

    def _pages_being_computed(self) -> Iterator[Digest]:
        for sequence in self.running:
            if sequence.remaining > 1:
                yield from sequence.prompt_digests()

    def _fits(self, sequence: Sequence, digests: list[Digest], known: int) -> bool:
        """Whether its prompt fits beside what runs, counting what the others' prompts will still take."""
        pending = sum(pages_for(len(s.tokens) + 1) - len(s.pages) for s in self.running)
        new = pages_for(len(sequence.tokens) + 1) - known
        return new + max(pending, 0) <= self.pool.available_beside(digests[:known])

    def _make_room(self, sequence: Sequence, count: int) -> bool:
        """Pages for the sequence's next `count` tokens; takes them from less urgent sequences if it must."""
        while sequence in self.running:
            if len(sequence.pages) >= pages_for(sequence.computed + count):
                return True
            page = self.pool.allocate(sequence.pages[-1] if sequence.pages else None)
            if page is None:
                self._preempt()
            else:
                sequence.pages.append(page)
        return False

    def _preempt(self) -> None:
        """Send the least urgent sequence back to the queue; its tokens will be computed again."""
        victim = max(self.running, key=lambda s: s.order)
        self.finish(victim)
        self.waiting.append(victim)
        self._sort_waiting()

    def _sort_waiting(self) -> None:
        self.waiting = deque(sorted(self.waiting, key=lambda s: s.order))


def fair_shares(wanted: list[int], budget: int, least: int) -> list[int]:
    """How many tokens each gets, the most urgent first: equal shares, and what some do not need for the others.

    A share is no smaller than `least`, so some may have to wait.
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
