"""A turn on a page: its messages and state in words, its verdict, and its tokens."""

import codecs
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer

from openclaw_rl.ledger.episodes import describe_step
from openclaw_rl.ledger.sessions import ALREADY_USED
from openclaw_rl.methods.base import Method, NoSignal, teacher_logprobs
from openclaw_rl.methods.distillation import distil
from openclaw_rl.methods.options import TopK
from openclaw_rl.methods.practice import PracticeMethod
from openclaw_rl.rendering.chat import content_text
from openclaw_rl.rendering.tokenizer import token_bytes
from openclaw_rl.types import Question, SampleKind, Source, State, StoredTurn, TopTokens, TurnCard, TurnKind, Vote

#: What a turn's state is called on a page.
STATES = {
    State.CAPTURED: "to be scored",
    State.AWAITING: "waiting for what comes next",
    State.READY: "to be judged",
    State.JUDGED: "judged",
    State.BATCHED: "in training",
    State.APPLIED: "learned from",
    State.DROPPED: "not trained on",
}
#: What a judged turn teaches with.
SAMPLES = {
    SampleKind.OPD_RL: "teaches with score and hint",
    SampleKind.OPD: "teaches with a hint",
    SampleKind.RL: "teaches with its score",
    SampleKind.NOTES: "teaches what the notes ask for",
    SampleKind.PRACTICE: "is practised",
}
#: Tokens of a response that are shown.
MAX_TOKENS = 600
#: Shades of a colour; the strongest still leaves text readable.
SHADES = 6
#: Likeliest tokens that are listed for a token.
MAX_LIKELIEST = 5
_NEWLINE = "↵"
ROLES = {"user": "user", "assistant": "assistant", "system": "system", "tool": "tool", "developer": "system"}


def spoken(message: Mapping[str, Any]) -> str:
    """A message in words, with its tool calls."""
    lines = [f"calls {call.get('name')} {call.get('arguments')}" for call in calls_of(message)]
    return "\n".join(filter(None, [text_of(message), *lines]))


def calls_of(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [call["function"] for call in message.get("tool_calls") or ()]


def text_of(message: Mapping[str, Any]) -> str:
    try:
        return content_text(message.get("content"))
    except (KeyError, TypeError):
        return json.dumps(message.get("content"), ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class Piece:
    """One token, or several that only together make a character."""

    text: str
    tip: str
    """What is known of its tokens, in lines."""
    advantage: float
    """The mean of its tokens' advantages."""
    shade: int
    """Of its colour: 0 is none, `SHADES` the strongest."""
    tokens: int = 1


@dataclass(frozen=True, slots=True)
class TokenView:
    """A response in pieces, or why it cannot be shown so."""

    pieces: tuple[Piece, ...] = ()
    note: str = ""
    """Why there are no pieces, or why they have no colour."""
    left_out: int = 0
    """Tokens that are not shown."""


def token_view(tokenizer: Tokenizer | None, turn: StoredTurn, method: Method) -> TokenView:
    """The tokens of a turn with what they learn: by the run's method, unless the answer is practised."""
    if turn.is_text or tokenizer is None:
        return TokenView(note="It has no tokens here: it was recorded as text, and the weights are elsewhere.")
    if turn.sample is SampleKind.PRACTICE:
        method = PracticeMethod(method.options)
    if not fits(tokenizer, turn):
        return TokenView(note="Its tokens are not shown: another model wrote them; name it with --model-name.")
    try:
        values = method.token_values(turn)
        note = ""
    except NoSignal as error:
        values = []
        note = f"Its tokens have no colour: {error}."
    return TokenView(tuple(pieces(tokenizer, turn, values)), note, left_out=max(0, len(turn.response_ids) - MAX_TOKENS))


def fits(tokenizer: Tokenizer, turn: StoredTurn) -> bool:
    """Whether the tokens spell the answer; if not, they are those of another model."""
    try:
        spelled = tokenizer.decode(turn.response_ids, skip_special_tokens=True)
    except OverflowError:
        return False
    words = [text_of(turn.message).strip(), *(str(call.get("name")) for call in calls_of(turn.message))]
    return all(word in spelled for word in words)


def pieces(tokenizer: Tokenizer, turn: StoredTurn, advantages: Sequence[float]) -> list[Piece]:
    """The first `MAX_TOKENS` of a response in pieces. `advantages` has one number per token, or is empty."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    largest = max(map(abs, advantages), default=0.0)
    made: list[Piece] = []
    text = ""
    group = list[int]()
    last = min(len(turn.response_ids), MAX_TOKENS) - 1
    tips = describe(tokenizer, turn, advantages)
    for place, token in enumerate(turn.response_ids[: last + 1]):
        text += decoder.decode(token_bytes(tokenizer, token), final=place == last)
        group.append(place)
        # Bytes of an unfinished character wait for the next token.
        if not decoder.getstate()[0]:
            worth = sum(advantages[i] for i in group) / len(group) if advantages else 0.0
            tip = "\n".join(tips[i] for i in group)
            made.append(Piece(visible(text), tip, worth, shade(worth, largest), len(group)))
            text = ""
            group = []
    return made


def visible(text: str) -> str:
    """A line break would show no colour: it gets a visible sign."""
    return text if text.strip("\n") else text.replace("\n", f"{_NEWLINE}\n")


def shade(advantage: float, largest: float) -> int:
    """From 0 to `SHADES`. The square root, so that one outlier does not make all others pale."""
    return math.ceil(SHADES * (abs(advantage) / largest) ** 0.5) if largest else 0


def describe(tokenizer: Tokenizer, turn: StoredTurn, advantages: Sequence[float]) -> list[str]:
    """For each token: its text, its probability under policy and teacher, its advantage, and the likeliest tokens."""
    count = min(len(turn.response_ids), MAX_TOKENS)
    try:
        teacher = teacher_logprobs(turn)
    except NoSignal:
        teacher = []
    lines = []
    for place, token in enumerate(turn.response_ids[:count]):
        parts = [f"{spell(tokenizer, token)} ({token})"]
        for name, values in (("policy", turn.logprobs), ("teacher", teacher)):
            if place < len(values):
                parts.append(f"{name} {percent(values[place])} (log-prob {values[place]:+.3f})")
        if place < len(advantages):
            parts.append(f"advantage {advantages[place]:+.3f}")
        lines.append(" · ".join(parts) + top_tokens(tokenizer, turn.top, place))
    return lines


def top_tokens(tokenizer: Tokenizer, top: TopTokens | None, place: int) -> str:
    """A line with the likeliest tokens at a place; empty if they were not recorded."""
    if top is None or place >= len(top.ids):
        return ""
    rows = zip(top.ids[place][:MAX_LIKELIEST], top.logprobs[place][:MAX_LIKELIEST], strict=True)
    return "\nlikeliest: " + ", ".join(f"{spell(tokenizer, int(id))} {percent(float(value))}" for id, value in rows)


def spell(tokenizer: Tokenizer, token: int) -> str:
    return repr(token_bytes(tokenizer, token).decode("utf-8", "backslashreplace"))


def percent(logprob: float) -> str:
    """A probability; small ones keep two digits that matter."""
    share = 100 * math.exp(min(logprob, 0.0))
    return f"{share:.0f} %" if share >= 10 else f"{share:.2g} %"


def compare_hints(turn: StoredTurn, settings: TopK | None) -> Mapping[str, str]:
    """What teacher and policy have in common under each hint, and how much it taught; empty without top-k log-probs."""
    if turn.top is None:
        return {}
    try:
        distilled = distil(turn, settings or TopK(turn.top.ids.shape[1]))
    except NoSignal:
        return {}
    k = distilled.ids.shape[1]
    rows = zip(distilled.hints, distilled.overlaps, distilled.chosen_shares(), strict=True)
    return {
        text: f"{overlap.mean():.1f} of the {k} likeliest tokens in common"
        + (f", taught {share:.0%} of the response" if settings else "")
        for text, overlap, share in rows
    }


@dataclass(frozen=True, slots=True)
class Utterance:
    """Something that somebody or something said."""

    who: str
    text: str

    @property
    def role(self) -> str:
        """A known role, for the style sheet."""
        return ROLES.get(self.who, "other")


@dataclass(frozen=True, slots=True)
class TurnView:
    """A turn, ready to be shown."""

    card: TurnCard
    asked: tuple[Utterance, ...]
    came_next: tuple[Utterance, ...]
    title: str = ""
    tokens: TokenView | None = None
    overlaps: Mapping[str, str] = field(default_factory=dict)
    """For each hint that was compared: what teacher and policy have in common under it."""

    @property
    def answer(self) -> str:
        return spoken(self.card.message)

    @property
    def is_side(self) -> bool:
        return self.card.kind is TurnKind.SIDE

    @property
    def reason(self) -> str:
        """Why it is not trained on."""
        return self.card.kind_reason if self.is_side else self.card.reason

    @property
    def can_correct(self) -> bool:
        return not self.is_side and self.card.episode is None

    @property
    def can_rate(self) -> bool:
        return self.can_correct and self.card.state not in ALREADY_USED

    @property
    def episode_line(self) -> str:
        """The turn's step in its episode, in one line."""
        return describe_step(self.card.episode, None) if self.card.episode else ""

    @property
    def state_words(self) -> str:
        return STATES[self.card.state]

    @property
    def sample_words(self) -> str:
        return SAMPLES[self.card.sample] if self.card.sample else ""

    @property
    def thumb(self) -> int:
        """The sign of the last explicit feedback; 0 without any."""
        scores = [given.score for given in self.card.feedback if given.source is Source.EXPLICIT]
        return 0 if not scores else 1 if scores[-1] > 0 else -1 if scores[-1] < 0 else 0

    @property
    def score_votes(self) -> tuple[Vote, ...]:
        votes = self.card.verdict.votes if self.card.verdict else ()
        return tuple(vote for vote in votes if vote.question is Question.SCORE)


def from_card(card: TurnCard, *, with_next: bool = False) -> TurnView:
    """`with_next`: also the messages that followed, which the next turn of a conversation shows anyway."""
    return TurnView(card, utterances(card.asked), utterances(card.came_next) if with_next else ())


def from_turn(turn: StoredTurn, title: str, tokens: TokenView | None, overlaps: Mapping[str, str]) -> TurnView:
    """A whole turn with its tokens, for the report."""
    asked = [message for message in turn.messages if message.get("role") in ("user", "tool")]
    card = TurnCard(
        number=turn.number,
        session=None,
        completion=turn.completion,
        choice=turn.choice,
        kind=turn.kind,
        kind_reason=turn.kind_reason,
        state=turn.state,
        reason=turn.reason,
        created=turn.created,
        version=turn.version,
        tokens=len(turn.response_ids),
        asked=tuple(asked[-1:]),
        message=turn.message,
        came_next=tuple(turn.next_state or ()),
        feedback=tuple(turn.feedback),
        verdict=turn.verdict,
        sample=turn.sample,
        episode=turn.episode,
        notes=tuple(turn.notes),
    )
    return TurnView(card, utterances(card.asked), utterances(card.came_next), title, tokens, overlaps)


def utterances(messages: Sequence[Mapping[str, Any]]) -> tuple[Utterance, ...]:
    return tuple(Utterance(str(message.get("role", "")), spoken(message)) for message in messages)
