"""Builds the judges from the options, and checks them before anything starts."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from openclaw_rl.config.options import ConfigError, read_text
from openclaw_rl.engines.base import Sampler, TextSampler
from openclaw_rl.http_client import url_without_account
from openclaw_rl.judge.answer_checks import HintCheck
from openclaw_rl.judge.askers import Asker, AskParams, EndpointAsker, EngineAsker, TextAsker
from openclaw_rl.judge.judges.base import Explicit, FeedbackReader, Judge, JudgePanel
from openclaw_rl.judge.judges.custom import NAMES, OPTION, CustomJudge
from openclaw_rl.judge.judges.llm import LlmJudge
from openclaw_rl.judge.loop import JudgeLoop, JudgeMetrics
from openclaw_rl.judge.options import JudgeOptions
from openclaw_rl.judge.teacher import NoteDistiller, Teacher
from openclaw_rl.ledger.options import NotesOptions
from openclaw_rl.ledger.store import Ledger
from openclaw_rl.methods.base import Method
from openclaw_rl.plugins import load_plugin
from openclaw_rl.rendering.chat import ChatRenderer, Renderer
from openclaw_rl.rendering.tokenizer import ChatTokenizer


@dataclass(frozen=True, slots=True)
class JudgingModel:
    """A sampler, and the renderer of its model's chats."""

    sampler: Sampler
    renderer: Renderer

    @property
    def chat_renderer(self) -> ChatRenderer:
        """The renderer of a model that is given tokens."""
        assert isinstance(self.renderer, ChatRenderer)
        return self.renderer


@dataclass(frozen=True, slots=True)
class JudgeSetup:
    """What the judging loop is built from."""

    options: JudgeOptions
    method: Method
    asks_llm: bool
    """Whether a language model is among the judges."""
    llm_is_capable: bool
    """Whether it may be asked for wishes, too."""
    seed: int
    values: Mapping[str, Any]
    """All options of the server, for a custom judge."""
    notes: NotesOptions = field(default_factory=NotesOptions)
    several_users: bool = False
    """Whether the server has keys for several users."""

    @property
    def uses_model(self) -> bool:
        """Whether a model on an engine judges or teaches."""
        if self.options.kind == "none":
            return False
        return (self.asks_llm and self.options.judge_base_url is None) or self.method.teacher_request is not None


def build_loop(
    setup: JudgeSetup, ledger: Ledger, policy: JudgingModel, other: JudgingModel | None, registry: CollectorRegistry
) -> JudgeLoop | None:
    """Build the judging loop. `other`, if given, judges and teaches instead of the policy. Raises ConfigError."""
    if setup.options.kind == "none":
        return None
    panel = build_panel(setup, other or policy)
    wanted, teacher = setup.method.teacher_request, None
    if wanted is not None:
        # Another teacher has the policy's vocabulary and reads the policy's prompts, so it uses the policy's renderer.
        sampler = (other or policy).sampler
        hint_check = HintCheck(sampler, policy.chat_renderer) if setup.options.check_hints else None
        teacher = Teacher(sampler, policy.chat_renderer, wanted, policy.sampler, hint_check)
    distiller = None
    if setup.method.distils_notes and setup.notes.notes:
        personal = setup.notes.distil_personal
        distiller = NoteDistiller(
            ledger, policy.sampler, policy.chat_renderer, personal=personal, several=setup.several_users
        )
    workers = setup.options.num_judge_workers
    custom = next((judge for judge in panel.judges if isinstance(judge, CustomJudge)), None)
    reads_wishes = custom.reads_wishes if custom else setup.asks_llm and setup.llm_is_capable
    return JudgeLoop(
        ledger,
        panel,
        teacher,
        setup.method,
        JudgeMetrics(registry),
        workers=workers,
        judges_steps=setup.options.step_judge,
        keeps_notes=setup.notes.notes,
        judge_reads_wishes=reads_wishes,
        distiller=distiller,
    )


def check_judges(options: JudgeOptions) -> None:
    """Check the user's files before a model is loaded. Raises ConfigError."""
    read_rubric(options.judge_rubric)
    if options.kind == "custom":
        load_plugin(options.custom_rm_path or "", OPTION, NAMES)


def build_panel(setup: JudgeSetup, model: JudgingModel | None, *, explicit: bool = True) -> JudgePanel:
    """The judges in the order in which they are asked. `model` judges if no endpoint is given. Raises ConfigError."""
    options = setup.options
    judges: list[Judge] = [Explicit()] if explicit else []
    if options.reads_feedback:
        judges.append(FeedbackReader())
    if options.kind == "custom":
        judges.append(CustomJudge(options.custom_rm_path or "", dict(setup.values), options.judge_timeout))
    if setup.asks_llm:
        judges.append(llm_judge(options, model, setup.seed))
    return JudgePanel(judges)


def llm_judge(options: JudgeOptions, model: JudgingModel | None, seed: int) -> LlmJudge:
    params = AskParams(options.prm_m, options.prm_temperature, options.prm_max_tokens)
    return LlmJudge(
        asker(options, model),
        params,
        threshold=options.majority_vote_threshold,
        rubric=read_rubric(options.judge_rubric),
        timeout=options.judge_timeout,
        seed=seed,
    )


def asker(options: JudgeOptions, model: JudgingModel | None) -> Asker:
    if options.judge_base_url is None:
        assert model is not None
        if isinstance(model.sampler, TextSampler):
            return TextAsker(model.sampler)
        return EngineAsker(model.sampler, model.chat_renderer)
    return EndpointAsker(options.judge_base_url, options.judge_model or "", options.judge_api_key)


def read_rubric(path: Path | None) -> str:
    """The user's guidelines for the judge. Raises ConfigError if the file cannot be read."""
    return read_text(path, "--judge-rubric") if path else ""


def check_teacher(policy: ChatTokenizer, teacher: ChatTokenizer) -> None:
    """Refuse a teacher with another vocabulary, because it must score the policy's tokens. Raises ConfigError."""
    if policy.backend.get_vocab() != teacher.backend.get_vocab():
        raise ConfigError(
            "--teacher-model-name has another vocabulary than the policy, so it cannot score the policy's tokens: "
            "choose a teacher of the same family, or --method rl."
        )


def describe(setup: JudgeSetup, teacher: str | None, without: str) -> str:
    """What judges turns, for the banner. `teacher` is the model of --teacher-model-name.

    `without` says why no language model judges, if none does.
    """
    options = setup.options
    if options.kind == "none":
        return "none: turns are recorded and wait (--judge none)"
    if options.kind == "custom":
        return f"{options.custom_rm_path}, after explicit feedback"
    rules = "explicit feedback, then rules that read what came next"
    if not setup.asks_llm:
        return rules + (f"; {without}" if options.kind == "auto" else "")
    where = teacher or "the base model itself"
    if options.judge_base_url:
        where = f"{options.judge_model} at {url_without_account(options.judge_base_url)}"
    first = rules if options.kind == "auto" else "explicit feedback"
    return f"{first}, then {where} ({options.prm_m} votes)"
