"""A response token by token: its probability under policy and teacher, and its advantage as a colour."""

import codecs
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from openclaw_rl.dashboard.views.words import calls_of, text_of
from openclaw_rl.methods.base import Method, NoSignal, teacher_logprobs
from openclaw_rl.methods.distillation import distil
from openclaw_rl.methods.options import TopK
from openclaw_rl.rendering.detokenize import token_bytes
from openclaw_rl.types import StoredTurn, TopTokens

#: Tokens of a response that are shown.
MAX_TOKENS = 600
#: Shades of a colour; the strongest still leaves text readable.
SHADES = 6
#: Likeliest tokens that are listed for a token.
MAX_LIKELIEST = 5
_NEWLINE = "↵"


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


def token_view(tokenizer: Tokenizer, turn: StoredTurn, method: Method) -> TokenView:
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
