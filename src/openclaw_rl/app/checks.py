"""Checks of the options, before and after the model is loaded."""

from pathlib import Path

from openclaw_rl.app.assembly import check_own_code, judge_setup
from openclaw_rl.app.config import Config
from openclaw_rl.config.options import ConfigError
from openclaw_rl.engines.capabilities import SamplerCapabilities
from openclaw_rl.engines.factory import check_pair
from openclaw_rl.judge.build import check_judges
from openclaw_rl.learn.build import check_learning, where_to_begin
from openclaw_rl.ledger.lock import check_usable


def check(config: Config) -> None:
    """Check everything that can be checked before a model is loaded. Raises UserError for the first mistake."""
    settings = config.engine_settings
    config.sampler.check(settings)
    if config.learns:
        config.learner.check(settings)
        check_pair(config.sampler, config.learner, settings)
        config.learning_method.check_sampler(config.sampler.capabilities(settings))
        check_learning(config.training)
    check_versions(config, config.sampler.capabilities(settings))
    check_judges(config.judge)
    if config.training.resume_from_ckpt not in ("auto", "none"):
        where_to_begin(config.training, config.run.folder)
    check_own_code(config)
    for folder, option in own_folders(config).items():
        check_usable(folder, option)


def check_versions(config: Config, sampler: SamplerCapabilities) -> None:
    """Refuse what needs several policy versions at once, if the sampler holds only one. Raises ConfigError."""
    holds = (
        f"--lora-rank {config.model.lora_rank} with --sampler {config.sampler.name} holds one policy version at a time"
    )
    if config.training.gate and not sampler.candidates:
        raise ConfigError(
            f"{holds}, so --gate cannot examine a candidate beside it: leave out --gate, or train an adapter."
        )
    has_other_model = config.model.teacher_model_name not in (None, config.model.model_name)
    setup = judge_setup(config)
    if not sampler.keeps_base and setup.uses_model and not has_other_model:
        user = "the judge" if setup.method.teacher_request is None else f"the teacher of --method {setup.method.name}"
        raise ConfigError(
            f"{holds}, so {user} cannot use the base model: use --method rl with --judge feedback or --judge-base-url, "
            "give another model with --teacher-model-name, or train an adapter."
        )


def own_folders(config: Config) -> dict[Path, str]:
    """The folders that only one server may write to, and the options that name them; the run directory first."""
    folders = {config.run.folder.resolve(): "--run-dir"}
    if config.capture.capture:
        folders.setdefault(config.ledger_dir.resolve(), "--rl-buffer-dir")
    return folders
