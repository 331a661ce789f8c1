"""Which judges there are, from the options; what can be wrong with them is said before anything starts."""

from dataclasses import dataclass
from pathlib import Path

from prometheus_client import CollectorRegistry

from openclaw_rl.app.config import Config
from openclaw_rl.config.options import ConfigError, read_text
from openclaw_rl.engines.base import Sampler
from openclaw_rl.judge.askers import Asker, AskParams, EndpointAsker, EngineAsker
from openclaw_rl.judge.dispatch import Signals
from openclaw_rl.judge.judges.base import Judge
from openclaw_rl.judge.judges.custom import NAMES, OPTION, CustomJudge
from openclaw_rl.judge.judges.explicit import Explicit
from openclaw_rl.judge.judges.llm import LlmJudge
from openclaw_rl.judge.judges.panel import JudgePanel
from openclaw_rl.judge.judges.rules import FeedbackReader
from openclaw_rl.judge.loop import JudgeLoop
from openclaw_rl.judge.metrics import JudgeMetrics
from openclaw_rl.judge.teacher import Curriculum, Teacher
from openclaw_rl.ledger.ledger import Ledger
from openclaw_rl.plugins import load_plugin
from openclaw_rl.rendering.chat import ChatRenderer
from openclaw_rl.rendering.tokenizer import ChatTokenizer


@dataclass(frozen=True, slots=True)
class JudgingModel:
    """A model on an engine that can be asked, with its own way of writing chats."""

    sampler: Sampler
    renderer: ChatRenderer


def build_loop(
    config: Config, ledger: Ledger, policy: JudgingModel, other: JudgingModel | None, registry: CollectorRegistry
) -> JudgeLoop | None:
    """The judging of a server's turns, by another model than the policy's if there is one. Raises ConfigError."""
    if config.judging == "none":
        return None
    signals = Signals.of(config)
    # The policy's renderer also for another teacher: the two have one vocabulary, and the prompt is the policy's.
    teacher = Teacher((other or policy).sampler, policy.renderer, Curriculum.of(config), policy.sampler)
    panel = build_panel(config, other or policy)
    taught = teacher if signals.opd else None
    return JudgeLoop(ledger, panel, taught, signals, JudgeMetrics(registry), workers=config.num_judge_workers)


def needs_other_model(config: Config) -> bool:
    """Whether a model beside the policy has to be loaded."""
    asked = config.asks_llm and config.judge_base_url is None
    given = config.teacher_model_name not in (None, config.model_name)
    return given and config.judging != "none" and (asked or Signals.of(config).opd)


def check_judges(config: Config) -> None:
    """What can be wrong with the owner's files, said before a model is loaded. Raises ConfigError."""
    read_rubric(config.judge_rubric)
    if config.judging == "custom":
        load_plugin(config.custom_rm_path or "", OPTION, NAMES)


def build_panel(config: Config, model: JudgingModel | None, *, explicit: bool = True) -> JudgePanel:
    """The judges in the order they are asked; `model` is asked where no endpoint is given. Raises ConfigError."""
    judges: list[Judge] = [Explicit()] if explicit else []
    if config.judging in ("auto", "feedback"):
        judges.append(FeedbackReader())
    if config.judging == "custom":
        settings = config.model_dump(exclude={"api_key", "judge_api_key"})
        judges.append(CustomJudge(config.custom_rm_path or "", settings, config.judge_timeout))
    if config.asks_llm:
        judges.append(llm_judge(config, model))
    return JudgePanel(judges)


def llm_judge(config: Config, model: JudgingModel | None) -> LlmJudge:
    params = AskParams(config.prm_m, config.prm_temperature, config.prm_max_tokens)
    return LlmJudge(
        asker(config, model),
        params,
        threshold=config.majority_vote_threshold,
        rubric=read_rubric(config.judge_rubric),
        timeout=config.judge_timeout,
        seed=config.seed,
    )


def asker(config: Config, model: JudgingModel | None) -> Asker:
    if config.judge_base_url is None:
        assert model is not None
        return EngineAsker(model.sampler, model.renderer)
    return EndpointAsker(config.judge_base_url, config.judge_model or "", config.judge_api_key)


def read_rubric(path: Path | None) -> str:
    """The owner's guidelines. Raises ConfigError if they cannot be read."""
    return read_text(path, "--judge-rubric") if path else ""


def check_teacher(policy: ChatTokenizer, teacher: ChatTokenizer) -> None:
    """A teacher scores the policy's tokens, so both must mean the same by them. Raises ConfigError."""
    if policy.backend.get_vocab() != teacher.backend.get_vocab():
        raise ConfigError(
            "--teacher-model-name has another vocabulary than the policy, so it cannot score the policy's tokens: "
            "choose a teacher of the same family, or --method rl."
        )


def describe(config: Config) -> str:
    """Who judges, for the banner."""
    if config.judging == "none":
        return "none: turns are recorded and wait (--judge none)"
    if config.judging == "custom":
        return f"{config.custom_rm_path}, after explicit feedback"
    rules = "explicit feedback, then rules that read what came next"
    if not config.asks_llm:
        small = "; the embedded model is too small to judge (--judge-base-url names another)"
        return rules + (small if config.judging == "auto" else "")
    where = f"{config.judge_model} at {config.judge_base_url}" if config.judge_base_url else "the base model itself"
    if config.teacher_model_name and not config.judge_base_url:
        where = config.teacher_model_name
    first = rules if config.judging == "auto" else "explicit feedback"
    return f"{first}, then {where} ({config.prm_m} votes)"
