"""What an engine declares about itself, so that a combination that cannot work is refused at the start."""

from dataclasses import dataclass

from openclaw_rl.engines.errors import EngineUnavailable
from openclaw_rl.engines.policy_ref import PolicyRef, WeightForm


@dataclass(frozen=True, slots=True)
class SamplerCapabilities:
    """What a sampler can load, record and score."""

    loads: frozenset[WeightForm]
    max_top_logprobs: int | None = None
    """Most likeliest tokens that it records with a sample; None: as many as asked for."""
    scores_targets: bool = True
    """Whether `score` returns the log-probs of chosen tokens (`ScoreRequest.targets`)."""
    raw_logprobs: bool = True
    """Whether log-probs are those of the raw distribution, before temperature, top-p and top-k."""
    candidates: bool = True
    """Whether a candidate can be sampled from while the newest version serves."""
    keeps_base: bool = True
    """Whether the base model can be asked while a policy serves."""
    constrains: bool = False
    """Whether it can restrict completions (`SampleRequest.constraint`)."""
    advice: str = ""
    """How to get more from this sampler, if that is possible."""

    def check_loads(self, policy: PolicyRef) -> None:
        """Raise EngineUnavailable for a policy in a form that the sampler cannot load."""
        if policy.form not in self.loads:
            raise EngineUnavailable(
                f"{policy.folder} holds {policy.form}, and this sampler loads {' or '.join(sorted(self.loads))}. "
                "Give the --lora-rank and the --backend that it was trained with, or another --resume-from-ckpt; "
                "none starts from the base model."
            )


@dataclass(frozen=True, slots=True)
class LearnerCapabilities:
    """What a learner writes, and whether it can take a step back."""

    writes: frozenset[WeightForm]
    undo: bool = True
    alternatives: bool = True
    """Whether it trains on tokens that were not sampled (`Lesson.alternatives`)."""
