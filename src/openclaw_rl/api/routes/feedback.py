"""How good answers were: feedback on one, the reward of an episode, and the end of a session."""

from typing import Annotated, Any, Literal, Self

from fastapi import APIRouter, Request
from pydantic import Field, model_validator

from openclaw_rl.api.capture.classify import check_name, without_counter
from openclaw_rl.api.errors import ApiError, refusals_of_ledger
from openclaw_rl.api.service import body_of, server_of
from openclaw_rl.api.wire import MAX_CHOICES, MAX_NAME_CHARACTERS, ListOf, WireModel, body_schema
from openclaw_rl.ledger import episodes, sessions
from openclaw_rl.ledger.errors import TooLate, UnknownSession
from openclaw_rl.ledger.examples import MAX_EXAMPLE_CHARACTERS
from openclaw_rl.ledger.turns import add_feedback
from openclaw_rl.types import (
    MAX_GROUP_SIZE,
    MAX_REWARD,
    MAX_USER_REWARD,
    EpisodeResult,
    Feedback,
    SessionKey,
    Source,
    TurnResult,
)

router = APIRouter()

GROUP_IS_CLOSED = "The group of this episode takes no further attempts: it is complete or has timed out."

#: The most turns that one reward can name; only a mistake would name more.
MAX_STEPS = 4096
#: A finite number that stays finite in the learner's arithmetic.
Reward = Annotated[float, Field(ge=-MAX_REWARD, le=MAX_REWARD, allow_inf_nan=False, strict=True)]


class FeedbackRequest(WireModel):
    """The body of POST /v1/feedback: a score from -1 to 1, a thumb, or the answer that was wanted."""

    id: str
    choice: Annotated[int, Field(ge=0, lt=MAX_CHOICES)] = 0
    score: Annotated[float, Field(ge=-1, le=1)] | None = None
    thumb: Literal["up", "down"] | None = None
    text: str = ""
    correction: Annotated[str, Field(max_length=MAX_EXAMPLE_CHARACTERS)] | None = None
    """The answer that was wanted. It counts as -1 unless it is what was said or there is a score."""
    source: Literal["explicit", "environment"] = "explicit"
    """Who gives the feedback: a person, or an environment (its reward)."""

    def feedback(self) -> Feedback:
        score = self.score if self.score is not None else 1.0 if self.thumb == "up" else -1.0
        return Feedback(score, self.text, Source(self.source), (self.correction or "").strip())


class StepReward(WireModel):
    """What a reward says about one turn, which is named by its index in the episode or by its completion's id."""

    index: Annotated[int, Field(ge=0, strict=True)] | None = None
    id: str | None = None
    reward: Reward | None = None
    text: str = ""

    @model_validator(mode="after")
    def _is_named_once(self) -> Self:
        if (self.index is None) == (self.id is None):
            raise ValueError("give either the turn's index or its completion's id")
        return self


class RewardRequest(WireModel):
    """The body of POST /v1/sessions/{id}/reward: an episode's reward, or the error because of which it has none."""

    reward: Reward | None = None
    error: str | None = None
    task: Annotated[str, Field(max_length=MAX_NAME_CHARACTERS)] = ""
    group: Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARACTERS)] | None = None
    group_size: Annotated[int, Field(ge=2, le=MAX_GROUP_SIZE, strict=True)] | None = None
    solved: bool | None = None
    steps: ListOf[StepReward] = Field([], max_length=MAX_STEPS)
    text: str = ""

    @model_validator(mode="after")
    def _has_one_end(self) -> Self:
        if (self.reward is None) == (self.error is None):
            raise ValueError("give either reward, a number, or error, the reason why there is none")
        return self

    def largest(self) -> float:
        """The size of its largest number."""
        return max(abs(reward or 0.0) for reward in (self.reward, *(step.reward for step in self.steps)))

    def result(self) -> EpisodeResult:
        steps = tuple(TurnResult(step.index, step.id, step.reward, step.text) for step in self.steps)
        values = self.model_dump(exclude={"steps"})
        return EpisodeResult(**values, steps=steps)


@router.post("/v1/feedback", openapi_extra=body_schema(FeedbackRequest))
async def feedback(request: Request) -> dict[str, Any]:
    """Rate an answer: the id of its completion, and a score, a thumb or the answer that you wanted.

    After a correction, `example` says whether your next conversations are shown it.
    """
    server = server_of(request)
    owner = server.keys.owner(request)
    body = await body_of(request, FeedbackRequest)
    check_feedback(body)
    with refusals_of_ledger("Feedback cannot be stored"):
        is_example = await server.ledger().write(add_feedback, owner, body.id, body.choice, body.feedback())
    shown = {} if body.correction is None else {"example": is_example and server.service.uses_notes}
    return {"id": body.id, "status": "recorded", **shown}


@router.post("/v1/sessions/{name:path}/close")
async def close_session(name: str, request: Request) -> dict[str, str]:
    """End a session: its last turn will not get a next state."""
    server = server_of(request)
    owner = server.keys.owner(request)
    with refusals_of_ledger("The session cannot be closed"):
        if not await server.ledger().write(sessions.close_session, SessionKey(owner, name)):
            raise unknown_session(name)
    return {"id": name, "status": "closed"}


@router.post("/v1/sessions/{name:path}/reward", openapi_extra=body_schema(RewardRequest))
async def reward_session(name: str, request: Request) -> dict[str, str]:
    """End an episode with its reward, or with the error because of which it has none."""
    server = server_of(request)
    owner = server.keys.owner(request)
    body = await body_of(request, RewardRequest)
    check_name(name, "path")
    if body.largest() > MAX_USER_REWARD and not server.keys.may_operate(owner):
        raise ApiError(
            400,
            "This key may give rewards from -1 to 1, because its users share the policy: scale them, or use the admin "
            "key (--admin-key, else the first of --api-key).",
            param="reward",
        )
    ledger = server.ledger()
    with refusals_of_ledger("The reward cannot be stored"):
        try:
            late = await ledger.write(episodes.end, SessionKey(owner, name), body.result(), ledger.group_size)
        except UnknownSession:
            raise unknown_session(name) from None
        if late:
            # Raised only here: that the attempt came too late is recorded.
            raise TooLate(GROUP_IS_CLOSED)
    return {"id": name, "status": "recorded"}


def unknown_session(name: str) -> ApiError:
    """The error for a name that no session has. Only the user knows whether a number at its end is a counter."""
    chat = without_counter(name)
    advice = "" if chat == name else f" A chat is named without OpenClaw's counter: {chat!r}."
    return ApiError(404, f"You have no session {name!r}.{advice}", code="unknown_session")


def check_feedback(request: FeedbackRequest) -> None:
    """Raise 400 unless the feedback says one thing."""
    if request.correction is not None and not request.correction.strip():
        raise ApiError(400, "The correction is empty: write the answer that you wanted.", param="correction")
    given = (request.score is not None) + (request.thumb is not None)
    if given > 1 or (not given and request.correction is None):
        raise ApiError(400, "Give either score (from -1 to 1) or thumb (up or down), or a correction.", param="score")
