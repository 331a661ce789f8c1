"""The options of learning."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from openclaw_rl.config.options import Section, option
from openclaw_rl.types import LossSettings, TrainingSettings

Fraction = Annotated[float, Field(ge=0, le=1)]
#: The default learning rates.
ADAPTER_RATE, FULL_WEIGHTS_RATE = 1e-4, 1e-6


class TrainingOptions(Section):
    """How the policy is trained, checked, saved and reported on."""

    heading = "Training"
    learning_rate: float | None = option(
        None, "Learning rate of AdamW.", shown="1e-4, or 1e-6 with --lora-rank 0", gt=0
    )
    batch_size: int = option(4, "Samples per training step.", ge=1)
    max_steps: int = option(1000, "Stop training at this step; 0: do not train.", ge=0)
    loss_fn: Literal["ppo", "importance_sampling", "cispo"] = option("ppo", "Policy loss for the sampled tokens.")
    kl_loss_coef: float = option(0.0, "Weight of the KL penalty that keeps the policy near the base model.", ge=0)
    save_interval: int = option(20, "Steps between checkpoints that are kept.", ge=1)
    resume_from_ckpt: str = option(
        "auto", "Checkpoint to start from: a folder, auto (where the run stopped), or none (start over)."
    )
    continue_from: Path | None = option(
        None,
        "Run directory, such as one of --sampler upstream, whose notes, accepted answers and corrections this run "
        "takes over to imitate.",
        shown="no other run",
    )
    eps_clip: float = option(0.2, "How far a token's ratio may fall below 1.", gt=0, lt=1)
    eps_clip_high: float = option(0.28, "How far a token's ratio may rise above 1.", gt=0)
    weight_decay: float = option(0.0, "Weight decay of AdamW.", ge=0)
    adam_beta1: float = option(0.9, "Decay rate of AdamW's first moment.", ge=0, lt=1)
    adam_beta2: float = option(0.95, "Decay rate of AdamW's second moment.", ge=0, lt=1)
    max_grad_norm: float = option(1.0, "Gradients with a larger norm are scaled down to it.", gt=0)
    max_kl: float = option(
        0.5, "How far one step may move the policy, as KL per token; a step that moves it further is undone.", gt=0
    )
    max_staleness: int = option(8, "Drop a sample if its policy is more than this many versions old.", ge=0)
    batch_timeout: float | None = option(
        None, "Train on a smaller batch after waiting this many seconds for a full one.", shown="off", gt=0
    )
    keep_checkpoints: int = option(3, "Checkpoints to keep.", ge=1)
    gate: Path | None = option(
        None, "File of prompts with checks that a new policy must pass before it serves.", shown="no gate"
    )
    gate_margin: Fraction = option(
        0.0, "How far a new policy's share of passed checks may fall below the serving policy's."
    )
    practice: bool = option(
        False,
        "Practise notes while the server is idle, until the policy keeps to them without being told. Without it, notes "
        "are practised when somebody asks for it (openclaw-rl practise).",
    )
    practice_steps: int = option(24, "Training steps of a practice.", ge=1)
    practice_idle: float = option(
        60.0, "Seconds that nobody must have used the model before the server practises by itself.", ge=0
    )
    practice_form: Literal["imitate", "distil"] = option(
        "imitate",
        "How notes are practised: imitate the base model's answers with notes and examples, or distil them on-policy.",
    )
    guard: bool = option(
        True, "Watch that the policy still answers plain prompts sensibly, and go back to the last good one if not."
    )
    custom_loss_function_path: str | None = option(
        None, "Your own loss: path/file.py or package.module:name.", shown="--loss-fn"
    )
    tensorboard: bool = option(False, "Write metrics for TensorBoard into the run directory.")
    wandb_project: str | None = option(None, "Send metrics to this project at Weights & Biases.", shown="off")

    def rate(self, *, full_weights: bool) -> float:
        """The learning rate. The default depends on whether all weights are trained."""
        return self.learning_rate or (FULL_WEIGHTS_RATE if full_weights else ADAPTER_RATE)

    def settings(self, *, full_weights: bool, epochs: int, seed: int) -> TrainingSettings:
        """The settings with which an engine runs a training step."""
        return TrainingSettings(
            loss=LossSettings(self.loss_fn, self.eps_clip, self.eps_clip_high, self.kl_loss_coef),
            epochs=epochs,
            learning_rate=self.rate(full_weights=full_weights),
            betas=(self.adam_beta1, self.adam_beta2),
            weight_decay=self.weight_decay,
            max_grad_norm=self.max_grad_norm,
            max_kl=self.max_kl,
            seed=seed,
        )
