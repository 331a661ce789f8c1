"""Distillation of notes: the policy learns to answer without notes as it was accepted with them.

A sample is an answer that was accepted under notes, after the prompt without the notes. Each of its tokens gets the
score as its advantage. The ratio of the loss starts from the policy's own log-probs after that prompt, which the judge
has recorded. An answer that was rejected is not imitated.
"""

from dataclasses import replace

from openclaw_rl.methods.base import Baseline, Lesson, Method, NoSignal
from openclaw_rl.methods.combine import Combine
from openclaw_rl.methods.topk_select import TopkSelect
from openclaw_rl.types import Question, SampleKind, StoredTurn, TurnEpisode, Verdict


class Notes(Method):
    """Learns what users accept under their notes, and nothing else."""

    name = "notes"
    learns_from = "answers that were accepted under notes"
    distils_notes = True

    @property
    def questions(self) -> frozenset[Question]:
        return super().questions | {Question.SCORE}

    def sample_kind(self, verdict: Verdict, episode: TurnEpisode | None = None) -> tuple[SampleKind | None, str]:
        if verdict.plain_logprobs:
            return SampleKind.NOTES, ""
        return super().sample_kind(verdict, episode)

    def prepared(self, turn: StoredTurn) -> StoredTurn:
        """A sample without notes has the prompt without them, and what the policy that answered thinks of it there."""
        if turn.sample is not SampleKind.NOTES:
            return turn
        if turn.plain_ids is None or turn.verdict is None:
            raise NoSignal("its prompt without notes was not recorded")
        return replace(turn, prompt_ids=turn.plain_ids, logprobs=list(turn.verdict.plain_logprobs), top=None)

    def signals(self, turn: StoredTurn, baseline: Baseline) -> Lesson:
        if turn.sample is not SampleKind.NOTES:
            return super().signals(turn, baseline)
        score = turn.verdict.score if turn.verdict else None
        if not score:
            raise NoSignal("it has no score")
        # Not measured from a mean: an answer is imitated because it was accepted, however many others were.
        return Lesson([self.options.w_notes * score] * len(turn.response_ids))

    def _why_nothing(self, verdict: Verdict) -> str:
        if verdict.plain_problem:
            return f"not distilled: {verdict.plain_problem}"
        if verdict.score is None or self.w_rl or self.w_opd:
            return super()._why_nothing(verdict)
        return "answered without notes" if verdict.score > 0 else "it was not accepted"


class NotesCombine(Notes, Combine):
    """Learns from notes, and from scores and hints where an answer was not accepted under notes."""

    name = "notes+combine"
    learns_from = f"{Notes.learns_from}, {Combine.learns_from}"


class NotesTopkSelect(Notes, TopkSelect):
    """Learns from notes, and as topk-select does where an answer was not accepted under notes."""

    name = "notes+topk-select"
    learns_from = f"{Notes.learns_from}, {TopkSelect.learns_from}"
