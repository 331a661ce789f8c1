"""The options of a method."""

from dataclasses import dataclass
from typing import Literal

from pydantic import field_validator

from openclaw_rl.config.options import Section, option

#: The built-in methods: name, module and class. To add a method, write its file and add a line here.
BUILT_IN = {
    "rl": "openclaw_rl.methods.rl:Rl",
    "opd": "openclaw_rl.methods.opd:Opd",
    "combine": "openclaw_rl.methods.combine:Combine",
    "topk-select": "openclaw_rl.methods.topk_select:TopkSelect",
    "notes": "openclaw_rl.methods.notes:Notes",
    "notes+combine": "openclaw_rl.methods.notes:NotesCombine",
    "notes+topk-select": "openclaw_rl.methods.notes:NotesTopkSelect",
}


@dataclass(frozen=True, slots=True)
class TopK:
    """How to distil the likeliest tokens; the --topk options explain each field."""

    k: int = 4
    candidates: int = 3
    selection: str = "sequence_optimal"
    subset: str = "student"
    clip: float = 1.0
    """Largest gap that counts, positive or negative; 0 or less: no limit."""


class MethodOptions(Section):
    """The learning method, and the weight of each signal."""

    heading = "Method"
    method: str = option(
        "combine",
        "Learning method: rl learns from scores, opd from hindsight hints, combine from both; topk-select distils the "
        "likeliest tokens under the best of several hints; notes teaches the policy to answer without notes as it was "
        "accepted with them, alone or beside another method; path/file.py:Name is your own method.",
        choices=tuple(BUILT_IN),
    )
    w_opd: float = option(
        1.0, "Weight of the distillation advantage.", env=("OPENCLAW_COMBINE_W_OPD", "OPENCLAW_TOPK_W_OPD"), ge=0
    )
    baseline: Literal["none", "batch", "group"] = option(
        "none",
        "What is subtracted from scores and distillation advantages: nothing, or their mean over the step's batch; "
        "with group, an episode's reward is measured from the mean of its group, and nothing else is changed.",
        env="OPENCLAW_BASELINE",
        shown="none: nothing is subtracted",
    )
    step_reward_coef: float = option(
        0.0,
        "With --baseline group: weight of a step's own reward, measured from the mean of the same step in the group.",
        ge=0,
    )
    opd_clip: float = option(
        0.0, "Limit on the size of a token's distillation advantage; 0: no limit.", env="OPENCLAW_OPD_CLIP", ge=0
    )
    w_rl: float = option(
        1.0, "Weight of the reward advantage.", env=("OPENCLAW_COMBINE_W_RL", "OPENCLAW_TOPK_W_RL"), ge=0
    )
    max_advantage: float = option(
        10.0,
        "Largest advantage of a sample, so that none outweighs all others of its batch: a larger score counts as this "
        "much, and a sample whose tokens exceed it on average is scaled down to it; 0: no limit.",
        ge=0,
    )
    w_notes: float = option(1.0, "With notes: weight of answers that were accepted under notes.", gt=0)
    topk_k: int = option(
        4,
        "With topk-select: number of likeliest tokens to learn from at each position.",
        env="OPENCLAW_TOPK_K",
        ge=1,
        le=20,
    )
    topk_max_cand: int = option(
        3,
        "With topk-select: most hints per turn that the teacher reads, shortest first.",
        env="OPENCLAW_TOPK_MAX_CAND",
        ge=1,
    )
    topk_hint_selection: Literal["sequence_optimal", "token_optimal", "shortest"] = option(
        "sequence_optimal",
        "With topk-select: how a hint is chosen: by the overlap of teacher and policy over the whole response, by the "
        "overlap at each token, or the shortest.",
        env="OPENCLAW_TOPK_HINT_SELECTION",
    )
    topk_subset_mode: Literal["student", "teacher", "overlap"] = option(
        "student",
        "With topk-select: whose likeliest tokens to learn from: the policy's, the teacher's, or those of both.",
        env="OPENCLAW_TOPK_SUBSET_MODE",
    )
    topk_adv_diff_clip: float = option(
        1.0,
        "With topk-select: limit on the log-prob gap between teacher and policy; 0 or less: no limit.",
        env="OPENCLAW_TOPK_ADV_DIFF_CLIP",
    )
    record: bool = option(
        False,
        "With topk-select: write the hints, overlaps, choices and gaps of each sample into the run directory.",
        env="OPENCLAW_RECORD_ENABLED",
    )
    train_epochs: int = option(1, "Optimiser passes over each batch (combine typically uses 2).", ge=1)
    at_least_one: bool = option(True, "With rl: if a session ends without a good turn, its best turn counts as +1.")
    eval_mode: bool = option(False, "With opd: also score turns, for monitoring.")

    @field_validator("method")
    @classmethod
    def _can_be_a_method(cls, name: str) -> str:
        if name not in BUILT_IN and not name.endswith(".py") and ":" not in name:
            raise ValueError(f"use one of {', '.join(BUILT_IN)}, or path/file.py:Name for your own")
        return name
