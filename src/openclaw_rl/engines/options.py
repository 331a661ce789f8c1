"""The options that all engines share: engine, model and adapter."""

from typing import Self

from pydantic import ValidationInfo, field_validator, model_validator

from openclaw_rl.config.options import Section, choices_of, option
from openclaw_rl.engines.registry import LEARNERS, SAMPLERS, backends, names_code

ALL_LINEAR = "all-linear"
#: The modules that an adapter can change.
LINEAR_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class ModelOptions(Section):
    """The model, and which of its weights are trained."""

    heading = "Model"
    model_name: str | None = option(
        None,
        "Policy model: a Hugging Face id, a local folder or a GGUF file.",
        flags=("--model-path",),
        shown="the embedded SmolLM2-135M-Instruct; on Tinker Qwen/Qwen3-4B-Instruct-2507",
    )
    lora_rank: int = option(32, "Rank of the LoRA adapter; 0 trains all weights.", ge=0)
    teacher_model_name: str | None = option(
        None, "Model that teaches and judges (base weights, no adapter).", shown="the model of --model-name"
    )
    lora_alpha: float | None = option(None, "Alpha of the LoRA adapter, which sets its scale.", shown="2 x rank", gt=0)
    lora_dropout: float = option(0.0, "Dropout on the adapter's input during training.", ge=0, lt=1)
    lora_target_modules: str = option(
        "all-linear",
        "Modules to adapt, separated by commas: q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj.",
    )
    lora_experts: bool = option(
        False,
        "With the local engine: in a mixture of experts, adapt each expert too. The adapter is many times as large.",
    )

    @model_validator(mode="after")
    def _experts_have_plain_adapters(self) -> Self:
        if self.lora_experts and self.lora_rank == 0:
            raise ValueError(
                "--lora-experts needs an adapter, and --lora-rank 0 trains all weights: leave out one of them"
            )
        if self.lora_experts and self.lora_dropout:
            raise ValueError(
                "--lora-experts and --lora-dropout: PEFT has no dropout on experts, so leave out one of them"
            )
        return self

    @model_validator(mode="after")
    def _known_modules(self) -> Self:
        given = self.lora_target_modules.replace(",", " ").split()
        if given != [ALL_LINEAR] and (not given or set(given) - set(LINEAR_MODULES)):
            raise ValueError(f"--lora-target-modules must be all-linear or some of {', '.join(LINEAR_MODULES)}")
        return self

    @property
    def adapted_modules(self) -> tuple[str, ...]:
        """The modules that --lora-target-modules names."""
        if self.lora_target_modules == ALL_LINEAR:
            return LINEAR_MODULES
        given = self.lora_target_modules.replace(",", " ").split()
        return tuple(name for name in LINEAR_MODULES if name in given)

    @property
    def full_weights(self) -> bool:
        """Whether all weights are trained instead of an adapter."""
        return self.lora_rank == 0


class EngineOptions(Section):
    """Which engines run, and how many sequences and policies they hold at once."""

    heading = "Engine"
    backend: str = option(
        "auto",
        "Where the model runs; auto is tinker if TINKER_API_KEY or TINKER_BASE_URL is set, else local. vllm, sglang "
        "and upstream mean --sampler.",
        choices=("auto", *backends()),
    )
    sampler: str = option(
        "auto",
        "Engine that samples tokens; auto is the engine of --backend. Also path/file.py with a SAMPLER of your own.",
        choices=("auto", *SAMPLERS),
    )
    learner: str = option(
        "auto", "Engine that computes gradients; auto is the engine of --backend.", choices=("auto", *LEARNERS)
    )
    teacher_url: str = option(
        "",
        "With --sampler vllm or sglang: URLs of running servers of the same kind that judge and teach, with the model "
        "of --teacher-model-name or else the policy's base model.",
        shown="no other servers",
    )
    trust_remote_code: bool = option(
        False,
        "Run the Python code in the model's folder where nothing else can compute the model. It gets all your rights: "
        "read it first.",
    )
    max_context_tokens: int | None = option(
        None, "Most tokens of a prompt and its answer together.", shown="what the model allows, at most 32768", ge=16
    )
    max_sequences: int = option(16, "Most sequences to sample at the same time.", ge=1, le=256)
    policy_slots: int | None = option(
        None,
        "Policy versions to keep loaded besides the base model, of all lines together; others are loaded on demand.",
        ge=2,
        shown="4, 2 with --lora-rank 0, 16 with --policy-per-user",
    )
    policy_per_user: bool = option(
        False,
        "Give each owner of a key a line of policies of their own, which learns from them alone; environments and "
        "imports teach the shared line, which serves those who have none yet (docs/teams.md).",
        group="Training",
    )
    max_queue: int = option(256, "Sequences that may wait before requests are refused with 429.", group="Server", ge=0)
    custom_generate_function_path: str | None = option(
        None,
        "Your own function that answers requests: path/file.py or package.module:name.",
        group="Server",
        shown="the model answers",
    )

    @field_validator("backend", "sampler", "learner")
    @classmethod
    def _known_engine(cls, name: str, info: ValidationInfo) -> str:
        names = choices_of(cls.model_fields[str(info.field_name)])
        if name not in names and not (info.field_name == "sampler" and names_code(name)):
            raise ValueError(f"use one of {', '.join(names)}")
        return name

    @property
    def trains_outside(self) -> bool:
        """Whether the learner is a trainer outside this program."""
        entry = LEARNERS.get(self.learner)
        return entry is not None and entry.outside

    @property
    def takes_text(self) -> bool:
        """Whether the model is given messages, and its tokens and weights are elsewhere."""
        entry = SAMPLERS.get(self.sampler)
        return entry is not None and entry.takes_text

    def policies_held(self, *, full_weights: bool) -> int:
        """How many policy versions an engine keeps loaded. With full weights, each is as large as the base model."""
        return self.policy_slots or (2 if full_weights else 16 if self.policy_per_user else 4)
