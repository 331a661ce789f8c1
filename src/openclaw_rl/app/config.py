"""Every option once: its flag, its environment variables, its default and one line that says what it means.

Everything that can be wrong with a value, or with two values together, is said in one sentence before anything
starts.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from openclaw_rl.config.options import flag, option, option_of, problem, read, read_file
from openclaw_rl.models import EMBEDDED
from openclaw_rl.types import LossSettings, TrainingSettings

LOOPBACK = "127.0.0.1"
#: Reached under these names, the server is reached from this machine only.
LOOPBACK_HOSTS = (LOOPBACK, "localhost", "::1")
#: The policy of the documented cloud quick start.
CLOUD_MODEL = "Qwen/Qwen3-4B-Instruct-2507"
CLOUD_SERVED_NAME = "qwen3-4b"
EMBEDDED_SERVED_NAME = "smollm2-135m"
#: Methods that learn from scores and from hints, each as its weight says.
BOTH_SIGNALS = ("combine", "topk-select")
#: What an adapter can change in the models that the local engine runs.
LINEAR_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class ApiKey:
    """A secret and the name under which its owner's data is kept. The secret is never shown."""

    name: str
    secret: str

    def __repr__(self) -> str:
        return f"{self.name}=***"

    @classmethod
    def parse_all(cls, text: str) -> tuple["ApiKey", ...]:
        """`KEY`, `NAME=KEY`, or several of them separated by commas."""
        keys = []
        for number, item in enumerate(filter(None, (part.strip() for part in text.split(","))), start=1):
            name, _, secret = item.partition("=")
            # A key in base64 may end in "=" itself.
            named = name and secret.strip("=")
            keys.append(cls(name, secret) if named else cls(f"key-{number}", item))
        return tuple(keys)


Fraction = Annotated[float, Field(ge=0, le=1)]


class Config(BaseModel):
    """The resolved settings of a server."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())

    method: Literal["rl", "opd", "combine", "topk-select"] = option(
        "combine",
        "What to learn from: scores, hindsight hints, or both; topk-select distils the likeliest tokens under the best "
        "of several hints.",
        group="Method",
        env="METHOD",
    )

    model_name: str | None = option(
        None,
        "Policy model: a Hub id, a local folder or a GGUF file.",
        group="Model",
        env="MODEL_NAME",
        shown="the embedded SmolLM2-135M-Instruct; on Tinker Qwen/Qwen3-4B-Instruct-2507",
    )
    lora_rank: int = option(32, "Rank of the adapter; 0 trains all weights.", group="Model", env="LORA_RANK", ge=0)
    teacher_model_name: str | None = option(
        None,
        "Teacher and judge model (base weights, no adapter).",
        group="Model",
        env="TEACHER_MODEL_NAME",
        shown="same as policy",
    )

    learning_rate: float | None = option(
        None,
        "Learning rate of the optimiser.",
        group="Training",
        env="LEARNING_RATE",
        shown="1e-4, or 1e-6 with --lora-rank 0",
        gt=0,
    )
    batch_size: int = option(4, "Samples per training step.", group="Training", env="BATCH_SIZE", ge=1)
    max_steps: int = option(1000, "Training steps in all.", group="Training", env="MAX_STEPS", ge=0)
    loss_fn: Literal["ppo", "importance_sampling", "cispo"] = option(
        "ppo", "Policy loss on the sampled tokens.", group="Training", env="LOSS_FN"
    )
    kl_loss_coef: float = option(
        0.0,
        "Weight of the penalty for drifting from the base model.",
        group="Training",
        env="KL_LOSS_COEF",
        ge=0,
    )
    save_interval: int = option(20, "Steps between checkpoints.", group="Training", env="SAVE_INTERVAL", ge=1)
    resume_from_ckpt: str = option(
        "auto",
        "Checkpoint to go on from: a folder, auto (the run's last one, if it has one), or none (begin anew).",
        group="Training",
        env="RESUME_FROM_CKPT",
    )

    lora_alpha: float | None = option(
        None, "Scale of the adapter.", group="Model", env="LORA_ALPHA", shown="2 x rank", gt=0
    )
    lora_dropout: float = option(
        0.0, "Share of the adapter's input that is dropped in training.", group="Model", env="LORA_DROPOUT", ge=0, lt=1
    )
    lora_target_modules: str = option(
        "all-linear",
        "Modules that are adapted, separated by commas: q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj.",
        group="Model",
        env="LORA_TARGET_MODULES",
    )

    eps_clip: float = option(0.2, "How far a token's ratio may fall.", group="Training", env="EPS_CLIP", gt=0, lt=1)
    eps_clip_high: float = option(0.28, "How far it may rise.", group="Training", env="EPS_CLIP_HIGH", gt=0)
    weight_decay: float = option(0.0, "Weight decay of AdamW.", group="Training", env="WEIGHT_DECAY", ge=0)
    adam_beta1: float = option(0.9, "First moment's decay of AdamW.", group="Training", env="ADAM_BETA1", ge=0, lt=1)
    adam_beta2: float = option(0.95, "Second moment's decay of AdamW.", group="Training", env="ADAM_BETA2", ge=0, lt=1)
    max_grad_norm: float = option(1.0, "Longer gradients are cut.", group="Training", env="MAX_GRAD_NORM", gt=0)
    max_kl: float = option(
        0.5,
        "A step that moves the policy further than this, a token, is taken back.",
        group="Training",
        env="MAX_KL",
        gt=0,
    )
    max_staleness: int = option(
        8, "Samples of a policy more versions ago are dropped.", group="Training", env="MAX_STALENESS", ge=0
    )
    batch_timeout: float | None = option(
        None,
        "Seconds after which a smaller batch is trained on.",
        group="Training",
        env="BATCH_TIMEOUT",
        shown="off",
        gt=0,
    )
    keep_checkpoints: int = option(3, "Checkpoints that are kept.", group="Training", env="KEEP_CHECKPOINTS", ge=1)
    micro_batch_tokens: int = option(
        4096, "Tokens that go through the learner at once.", group="Training", env="MICRO_BATCH_TOKENS", ge=1
    )
    gradient_checkpointing: bool = option(
        False,
        "Compute activations twice instead of keeping them: less memory, a third slower.",
        group="Training",
        env="GRADIENT_CHECKPOINTING",
    )
    offload_optimizer_state: bool = option(
        False, "Keep the optimiser's state off the GPU between steps.", group="Training", env="OFFLOAD_OPTIMIZER_STATE"
    )
    gate: Path | None = option(
        None,
        "File of prompts with checks that a new policy has to pass before it serves.",
        group="Training",
        env="GATE",
    )
    gate_margin: Fraction = option(
        0.0, "How much worse than the policy before it may do there.", group="Training", env="GATE_MARGIN"
    )
    custom_loss_function_path: str | None = option(
        None, "Your own loss: path/file.py or package.module:name.", group="Training", env="CUSTOM_LOSS_FUNCTION_PATH"
    )
    custom_generate_function_path: str | None = option(
        None,
        "Your own way to answer requests: path/file.py or package.module:name.",
        group="Server",
        env="CUSTOM_GENERATE_FUNCTION_PATH",
    )
    rollout_function_path: str | None = option(
        None,
        "Your own rollouts, which run beside the server and talk to it: path/file.py or package.module:name.",
        group="Training",
        env="ROLLOUT_FUNCTION_PATH",
    )
    tensorboard: bool = option(
        False, "Write metrics for TensorBoard into the run directory.", group="Training", env="TENSORBOARD"
    )
    wandb_project: str | None = option(
        None, "Send metrics to this project at Weights & Biases.", group="Training", env="WANDB_PROJECT"
    )

    w_opd: float = option(
        1.0,
        "Weight of the distillation advantage.",
        group="Method",
        env=("OPENCLAW_COMBINE_W_OPD", "OPENCLAW_TOPK_W_OPD"),
        ge=0,
    )
    baseline: Literal["none", "batch"] = option(
        "none",
        "What a score and a distillation advantage are measured from: nothing, or their mean over the step's batch.",
        group="Method",
        env="OPENCLAW_BASELINE",
    )
    opd_clip: float = option(
        0.0,
        "Largest distillation advantage of a token, either way; 0: no limit.",
        group="Method",
        env="OPENCLAW_OPD_CLIP",
        ge=0,
    )
    w_rl: float = option(
        1.0,
        "Weight of the reward advantage.",
        group="Method",
        env=("OPENCLAW_COMBINE_W_RL", "OPENCLAW_TOPK_W_RL"),
        ge=0,
    )
    topk_k: int = option(
        4,
        "With topk-select: likeliest tokens that count at each position.",
        group="Method",
        env="OPENCLAW_TOPK_K",
        ge=1,
        le=20,
    )
    topk_max_cand: int = option(
        3,
        "With topk-select: hints of a turn that the teacher reads, the shortest first.",
        group="Method",
        env="OPENCLAW_TOPK_MAX_CAND",
        ge=1,
    )
    topk_hint_selection: Literal["sequence_optimal", "token_optimal", "shortest"] = option(
        "sequence_optimal",
        "With topk-select: which hint: by what teacher and policy have in common, over the response or at each token.",
        group="Method",
        env="OPENCLAW_TOPK_HINT_SELECTION",
    )
    topk_subset_mode: Literal["student", "teacher", "overlap"] = option(
        "student",
        "With topk-select: whose likeliest tokens are learned about, the policy's, the teacher's, or those of both.",
        group="Method",
        env="OPENCLAW_TOPK_SUBSET_MODE",
    )
    topk_adv_diff_clip: float = option(
        1.0,
        "With topk-select: largest gap between teacher and policy that counts; 0 or less: no limit.",
        group="Method",
        env="OPENCLAW_TOPK_ADV_DIFF_CLIP",
    )
    record: bool = option(
        False,
        "With topk-select: write what each sample taught (hints, overlaps, the choice, gaps) into the run directory.",
        group="Method",
        env="OPENCLAW_RECORD_ENABLED",
    )
    train_epochs: int = option(
        1,
        "Optimiser passes over each batch (combine typically uses 2).",
        group="Method",
        env="TRAIN_EPOCHS",
        ge=1,
    )
    at_least_one: bool = option(
        True,
        "With rl: a session that ends without a good turn gets one, its best counts as +1.",
        group="Method",
        env="AT_LEAST_ONE",
    )
    eval_mode: bool = option(False, "With opd: also score turns, for monitoring.", group="Method", env="EVAL_MODE")

    judge: Literal["auto", "feedback", "llm", "custom", "none"] = option(
        "auto",
        "Who scores turns: rules that read what came next, a language model, your own code; auto is rules first, then "
        "a capable model if there is one.",
        group="Judge",
        env="JUDGE",
    )
    judge_base_url: str | None = option(
        None,
        "OpenAI-compatible endpoint of a judge.",
        group="Judge",
        env="JUDGE_BASE_URL",
        shown="the served model judges itself, without its adapter",
    )
    judge_model: str | None = option(None, "The judge's name at that endpoint.", group="Judge", env="JUDGE_MODEL")
    judge_api_key: str = option(
        "", "Key for that endpoint.", group="Judge", env="OPENCLAW_JUDGE_API_KEY", shown="no key", secret=True
    )
    judge_rubric: Path | None = option(
        None, "File with your guidelines for the judge.", group="Judge", env="JUDGE_RUBRIC", flags=("--rubric",)
    )
    custom_rm_path: str | None = option(
        None,
        "Your own judge: path/file.py, path/file.py:name or package.module:name.",
        group="Judge",
        env="CUSTOM_RM_PATH",
    )
    num_judge_workers: int = option(4, "Turns judged at the same time.", group="Judge", env="NUM_JUDGE_WORKERS", ge=1)
    judge_timeout: float = option(
        120.0, "Seconds that a judge has for its answers.", group="Judge", env="JUDGE_TIMEOUT", gt=0
    )
    prm_m: int = option(
        3,
        "Judge votes per question.",
        group="Judge",
        env=("PRM_M", "MAJORITY_VOTE_N"),
        flags=("--majority-vote-n",),
        ge=1,
    )
    majority_vote_threshold: Fraction = option(
        0.0,
        "Share of the valid votes that the winner needs; 0 means the most votes win, a tie counts 0.",
        group="Judge",
        env="MAJORITY_VOTE_THRESHOLD",
    )
    prm_temperature: float = option(
        0.6, "Sampling temperature of the judge.", group="Judge", env="PRM_TEMPERATURE", ge=0
    )
    prm_max_tokens: int = option(
        4096, "Longest answer of the judge, in tokens.", group="Judge", env="PRM_MAX_TOKENS", ge=1
    )

    proxy_host: str | None = option(
        None,
        "Address to listen on.",
        group="Server",
        env="PROXY_HOST",
        shown="0.0.0.0 with an API key, else 127.0.0.1",
    )
    proxy_port: int = option(30000, "Port to listen on.", group="Server", env="PROXY_PORT", ge=0, le=65535)
    served_model_name: str | None = option(
        None,
        "The model's name in the API.",
        group="Server",
        env="SERVED_MODEL_NAME",
        shown="qwen3-4b for the default Tinker model, smollm2-135m for the embedded one, else the model's name",
    )
    api_key: str = option(
        "",
        "Key that clients must send, or several separated by commas; NAME=KEY names its owner.",
        group="Server",
        env="SGLANG_API_KEY",
        shown="no key",
        secret=True,
    )
    session_timeout: float = option(
        1800.0, "Seconds after which a silent session has ended.", group="Capture", env="SESSION_TIMEOUT", gt=0
    )
    capture: bool = option(
        True,
        "Record turns; without it the server serves and stores nothing.",
        group="Capture",
        env=("CAPTURE", "ENABLE_RL_INTERCEPT"),
        flags=("--enable-rl-intercept",),
    )
    rl_buffer_dir: Path | None = option(
        None, "Where the ledger of turns is kept.", group="Capture", env="RL_BUFFER_DIR", shown="the run directory"
    )
    max_queue: int = option(
        256,
        "Sequences that may wait before requests are refused with 429.",
        group="Server",
        env="MAX_QUEUE",
        ge=0,
    )
    max_request_mb: float = option(
        32.0, "Largest request body, in megabytes.", group="Server", env="MAX_REQUEST_MB", gt=0
    )
    shutdown_seconds: float = option(
        30.0,
        "How long requests in flight may go on after Ctrl-C.",
        group="Server",
        env="SHUTDOWN_SECONDS",
        ge=0,
    )
    tool_parser: Literal["auto", "hermes", "llama3"] = option(
        "auto",
        "How the model writes tool calls; auto reads its chat template.",
        group="Server",
        env="TOOL_PARSER",
    )

    backend: Literal["auto", "local", "tinker"] = option(
        "auto",
        "Where the model runs; auto is tinker when TINKER_API_KEY or TINKER_BASE_URL is set, else local.",
        group="Engine",
        env="BACKEND",
    )
    tinker_base_url: str | None = option(
        None, "Address of a self-hosted Tinker server.", group="Engine", env=("TINKER_BASE_URL", "TINKER_HOST")
    )
    tinker_stream_chunk: int = option(
        32,
        "On Tinker: tokens that are sampled at a time, so that answers can be streamed; 0: whole answers.",
        group="Engine",
        env="TINKER_STREAM_CHUNK",
        ge=0,
    )
    tinker_timeout: float = option(
        300.0,
        "On Tinker: seconds that a call may take before it is made again, or given up.",
        group="Engine",
        env="TINKER_TIMEOUT",
        gt=0,
    )
    device: Literal["auto", "cpu", "cuda"] = option("auto", "Device of the local engine.", group="Engine", env="DEVICE")
    dtype: Literal["auto", "float32", "bfloat16"] = option(
        "auto",
        "Precision of the weights; auto is float32 on CPU, bfloat16 on CUDA.",
        group="Engine",
        env="DTYPE",
    )
    max_context_tokens: int | None = option(
        None,
        "Longest prompt and answer together.",
        group="Engine",
        env="MAX_CONTEXT_TOKENS",
        shown="what the model allows, at most 32768",
        ge=16,
    )
    max_sequences: int = option(
        16, "Sequences sampled at the same time.", group="Engine", env="MAX_SEQUENCES", ge=1, le=256
    )
    kv_cache_gib: float | None = option(
        None,
        "Memory for keys and values, in GiB.",
        group="Engine",
        env="KV_CACHE_GIB",
        shown="a quarter of the memory, at most 4, on CPU; 60% of what is free on CUDA",
        gt=0,
    )
    policy_slots: int | None = option(
        None,
        "Policy versions held at the same time, beside the base model.",
        group="Engine",
        env="POLICY_SLOTS",
        ge=2,
        shown="4, or 2 with --lora-rank 0",
    )

    run_dir: Path = option(Path("runs/default"), "Where this run keeps what it learns.", group="General", env="RUN_DIR")
    cache_dir: Path = option(
        Path("~/.cache/openclaw-rl"),
        "Where fetched and converted models are kept.",
        group="General",
        env="OPENCLAW_RL_CACHE",
    )
    seed: int = option(0, "Start of every random stream.", group="General", env="SEED", ge=0)
    log_level: Literal["debug", "info", "warning", "error"] = option(
        "info", "How much to log.", group="General", env="LOG_LEVEL"
    )

    @model_validator(mode="after")
    def _no_contradictions(self) -> Self:
        if self.proxy_host not in (None, *LOOPBACK_HOSTS) and not self.api_keys:
            raise ValueError(
                f"--proxy-host {self.proxy_host} would open the server to the network without a key: "
                "set --api-key (or SGLANG_API_KEY), or listen on 127.0.0.1"
            )
        if not self.api_key.isascii():
            raise ValueError("--api-key must be plain ASCII, since it travels in an HTTP header")
        names = [key.name for key in self.api_keys]
        if len(set(names)) < len(names):
            raise ValueError("--api-key gives two keys the same name")
        if self.eval_mode and self.method != "opd":
            raise ValueError("--eval-mode belongs to --method opd; rl and combine always score")
        if (self.judge_base_url is None) != (self.judge_model is None):
            raise ValueError(
                "--judge-base-url and --judge-model belong together: where the judge is, and its name there"
            )
        if self.judge_base_url is not None and not self.judge_base_url.startswith(("http://", "https://")):
            raise ValueError("--judge-base-url must begin with http:// or https://")
        if not self.judge_api_key.isascii() or not self.judge_api_key.strip().isprintable():
            raise ValueError("--judge-api-key must be plain ASCII, since it travels in an HTTP header")
        if self.judge == "custom" and self.custom_rm_path is None:
            raise ValueError("--judge custom needs --custom-rm-path, the file with your judge")
        if self.custom_rm_path is not None and self.judge not in ("auto", "custom"):
            raise ValueError(f"--custom-rm-path is for --judge custom, not {self.judge}")
        given = self.lora_target_modules.replace(",", " ").split()
        if given != ["all-linear"] and (not given or set(given) - set(LINEAR_MODULES)):
            raise ValueError(f"--lora-target-modules takes all-linear, or some of {', '.join(LINEAR_MODULES)}")
        if self.method in BOTH_SIGNALS and self.w_opd == self.w_rl == 0:
            raise ValueError("--w-opd and --w-rl are both 0, so there would be nothing to learn from")
        if self.baseline == "batch" and self.batch_size == 1:
            raise ValueError("--baseline batch has nothing to measure from with --batch-size 1: take 2 or more")
        return self

    @property
    def api_keys(self) -> tuple[ApiKey, ...]:
        return ApiKey.parse_all(self.api_key)

    @property
    def host(self) -> str:
        """Closed by default: beyond this machine only with a key."""
        return self.proxy_host or ("0.0.0.0" if self.api_keys else LOOPBACK)

    @property
    def engine(self) -> Literal["local", "tinker"]:
        """The backend that `auto` stands for."""
        if self.backend != "auto":
            return self.backend
        return "tinker" if os.environ.get("TINKER_API_KEY") or self.tinker_base_url else "local"

    @property
    def embedded(self) -> bool:
        """Whether the policy is the model that comes with the program."""
        return self.model_name in (None, EMBEDDED) and self.engine == "local"

    @property
    def policy_name(self) -> str:
        """The policy's model, whether or not it was named."""
        return self.model_name or (CLOUD_MODEL if self.engine == "tinker" else EMBEDDED)

    @property
    def judging(self) -> Literal["auto", "feedback", "llm", "custom", "none"]:
        """Who judges; whoever gives a judge of their own means it."""
        return "custom" if self.custom_rm_path is not None else self.judge

    @property
    def reads_feedback(self) -> bool:
        """Whether rules are among the judges."""
        return self.capture and self.judging in ("auto", "feedback")

    @property
    def asks_llm(self) -> bool:
        """Whether a language model is among the judges; the embedded one is too small to be asked by itself."""
        capable = bool(self.judge_base_url or self.teacher_model_name) or not self.embedded
        return self.judging == "llm" or (self.judging == "auto" and capable)

    @property
    def model_label(self) -> str:
        """The name clients see."""
        if self.served_model_name:
            return self.served_model_name
        name = self.model_name or (CLOUD_MODEL if self.engine == "tinker" else None)
        if name is None:
            return EMBEDDED_SERVED_NAME
        if name == CLOUD_MODEL:
            return CLOUD_SERVED_NAME
        return Path(name).resolve().name.removesuffix(".gguf").lower()

    @property
    def ledger_dir(self) -> Path:
        return (self.rl_buffer_dir or self.run_dir).expanduser()

    @property
    def adapted_modules(self) -> tuple[str, ...]:
        """The modules that --lora-target-modules names."""
        if self.lora_target_modules == "all-linear":
            return LINEAR_MODULES
        return tuple(name for name in LINEAR_MODULES if name in self.lora_target_modules.replace(",", " ").split())

    @property
    def distils_alternatives(self) -> bool:
        """Whether tokens that were not sampled are learned about."""
        return self.method == "topk-select" and self.w_opd > 0

    @property
    def recorded_top(self) -> int:
        """How many of the policy's likeliest tokens are recorded at each token of a turn."""
        return self.topk_k if self.distils_alternatives else 0

    @property
    def policies_held(self) -> int:
        """Policy versions that the engine has room for; one that is all weights takes as much as the base model."""
        return self.policy_slots or (4 if self.lora_rank else 2)

    @property
    def learns(self) -> bool:
        """Whether anything is trained at all."""
        return self.capture and self.judging != "none" and self.max_steps > 0

    @property
    def training(self) -> TrainingSettings:
        """How a step is made."""
        return TrainingSettings(
            loss=LossSettings(self.loss_fn, self.eps_clip, self.eps_clip_high, self.kl_loss_coef),
            epochs=self.train_epochs,
            learning_rate=self.step_size,
            betas=(self.adam_beta1, self.adam_beta2),
            weight_decay=self.weight_decay,
            max_grad_norm=self.max_grad_norm,
            max_kl=self.max_kl,
            seed=self.seed,
        )

    @property
    def step_size(self) -> float:
        """The learning rate, by what is trained if it is not given."""
        return self.learning_rate or (1e-4 if self.lora_rank else 1e-6)


@dataclass(frozen=True)
class Loaded:
    """A configuration and where each of its values came from."""

    config: Config
    origins: dict[str, str]

    def describe(self) -> list[tuple[str, str, str]]:
        """(option, value, origin) of everything, for --dry-run; secrets hidden, derived values shown."""
        config = self.config
        derived = {
            "proxy_host": config.host,
            "learning_rate": config.step_size,
            "served_model_name": config.model_label,
            "backend": config.engine,
        }
        rows = []
        for name, field in Config.model_fields.items():
            value, origin = getattr(config, name), self.origins[name]
            if name == "api_key":
                value = ", ".join(map(repr, config.api_keys)) or None
            elif option_of(field).secret:
                value = "***" if value else None
            elif name in derived and value != derived[name]:
                value, origin = derived[name], f"{origin}, resolved"
            rows.append((flag(name), "none" if value is None else str(value), origin))
        return rows


def load(
    flags: Mapping[str, Any],
    environment: Mapping[str, str] | None = None,
    file: Path | None = None,
    only: Callable[[str], bool] = lambda name: True,
) -> Loaded:
    """Resolve every option; `only` says which of them may come from the file. Raises ConfigError with one sentence."""
    in_file = read_file(file, Config) if file else {}
    wanted = {name: value for name, value in in_file.items() if only(name)}
    values, origins = read(Config, flags, os.environ if environment is None else environment, wanted, file)
    try:
        return Loaded(Config(**values), origins)
    except ValidationError as error:
        raise problem(error, Config, origins) from None
