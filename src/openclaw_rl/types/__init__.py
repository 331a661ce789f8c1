"""The data types that the parts exchange. Data only: no behaviour, no imports from the rest of the package."""

# mypy: implicit-reexport
# ruff: noqa: F401

from openclaw_rl.types.episodes import (
    MAX_GROUP_SIZE,
    MAX_REWARD,
    MAX_USER_REWARD,
    EpisodeCounts,
    EpisodeMode,
    EpisodeResult,
    EpisodeState,
    EpisodeSummary,
    GroupProgress,
    Queue,
    TurnEpisode,
    TurnResult,
)
from openclaw_rl.types.notes import (
    ENDED_PRACTICE,
    ConversationNote,
    HeardWishes,
    Note,
    NoteOrigin,
    NoteOutcomes,
    NoteState,
    Practice,
    PracticedAnswer,
    PracticePrompt,
    PracticeState,
    Wish,
    scope_stems,
)
from openclaw_rl.types.pages import (
    EpisodePoint,
    GroupCard,
    PageChanges,
    PagePlace,
    PractisedFrom,
    SessionCard,
    TurnCard,
    UpdateBatch,
    UpdateCard,
)
from openclaw_rl.types.sampling import (
    BASE_VERSION,
    SHARED,
    Constraint,
    FinishReason,
    Ids,
    JsonForm,
    Numbers,
    Priority,
    SampledToken,
    SampleRequest,
    SamplingParams,
    ScoreRequest,
    Scores,
    Thinking,
    TopTokens,
)
from openclaw_rl.types.training import (
    MAX_LOG_RATIO,
    Alternatives,
    Batch,
    Claim,
    Lease,
    LeaseEnd,
    LineState,
    LossSettings,
    NextStep,
    OutsideSample,
    SampleKind,
    Span,
    StepOutcome,
    TrainingSequence,
    TrainingSettings,
    Update,
)
from openclaw_rl.types.turns import Continuation, Counts, SessionKey, SessionSummary, State, StoredTurn, Turn, TurnKind
from openclaw_rl.types.verdicts import (
    UNREAD,
    Feedback,
    Hint,
    Question,
    Sign,
    Source,
    Verdict,
    VerdictCounts,
    VerdictSummary,
    Vote,
)
