"""Before a start: the checks of the options, and the folders of the run, which are locked, made private and marked."""

import contextlib
from pathlib import Path

from openclaw_rl.app.assembly import check_user_code, fetch_files, judge_setup
from openclaw_rl.app.config import Config, keep_options
from openclaw_rl.app.split import check_split
from openclaw_rl.config.options import ConfigError
from openclaw_rl.engines.base import SamplerCapabilities
from openclaw_rl.engines.factory import check_pair
from openclaw_rl.errors import UserError
from openclaw_rl.judge.build import check_judges
from openclaw_rl.learn.build import check_learning, where_to_begin
from openclaw_rl.ledger.run_dir import TEXT_ONLY, RunDirLock, check_usable, keep_to_model, write_privately
from openclaw_rl.ledger.sessions import IMPORTED
from openclaw_rl.types import SHARED

#: Names that do not name one person's line, and the longest that does: it names a folder too.
NOT_OWNERS = (SHARED, IMPORTED)
MAX_LINE_NAME = 64


def check(config: Config) -> None:
    """Check everything that can be checked before a model is loaded. Raises UserError for the first mistake."""
    settings = config.engine_settings
    if config.engine.policy_per_user:
        check_lines(config)
    check_split(config)
    if config.learns:
        config.learner.check(settings)
    config.sampler.check(settings)
    if config.engine.teacher_url and not config.sampler.takes_urls:
        raise ConfigError("--teacher-url names servers of vLLM or SGLang: it needs --sampler vllm or --sampler sglang.")
    if config.learns:
        check_pair(config.sampler, config.learner, settings)
        config.learning_method.check_sampler(config.sampler.capabilities(settings))
        check_learner(config)
        check_learning(config.training)
    check_versions(config, config.sampler.capabilities(settings))
    check_judges(config.judge)
    if config.training.resume_from_ckpt not in ("auto", "none"):
        where_to_begin(config.training, config.run.folder)
    check_user_code(config)
    if config.training.continue_from is not None and not config.learns:
        raise ConfigError("--continue-from teaches this run what another one has, and this server does not learn.")
    for folder, option in locked_folders(config).items():
        check_usable(folder, option)


def check_lines(config: Config) -> None:
    """Refuse what cannot be combined with a line of policies for each person. Raises ConfigError."""
    option = "--policy-per-user"
    if config.model.full_weights:
        raise ConfigError(f"{option} gives each person an adapter, and --lora-rank 0 trains all weights.")
    if config.engine.trains_outside:
        raise ConfigError(f"{option} needs a learner of this program: {config.engine.learner} trains one line.")
    if config.engine.takes_text:
        raise ConfigError(f"{option} needs weights that are here: behind an API they are not.")
    for part, factory in (("--sampler", config.sampler), ("--learner", config.learner)):
        if not factory.has_lines:
            engines = "--backend tinker, or --learner local and --sampler local, vllm or sglang"
            raise ConfigError(f"{option} works with {engines}, and {part} is {factory.name}.")
    if config.engine.custom_generate_function_path:
        raise ConfigError(f"{option} does not work with --custom-generate-function-path, which asks the shared line.")
    if not config.server.api_keys:
        raise ConfigError(f"{option} needs a key for each person: give --api-key anna=KEY,ben=KEY.")
    for key in config.server.api_keys:
        if key.name in NOT_OWNERS or len(key.name) > MAX_LINE_NAME or ":" in key.name:
            raise ConfigError(
                f"{option} names lines after keys, and the key {key.name!r} cannot name one: give it another name "
                f"of at most {MAX_LINE_NAME} characters, without a colon, that is not {' or '.join(NOT_OWNERS)}."
            )


def check_learner(config: Config) -> None:
    """Refuse a method or a start that the learner cannot use. Raises UserError."""
    learner = config.learner
    config.learning_method.check_learner(learner.capabilities(config.engine_settings))
    if config.engine.trains_outside and config.training.resume_from_ckpt != "auto":
        raise ConfigError(
            f"--resume-from-ckpt belongs to a learner of this program; with --learner {learner.name} the trainer "
            "resumes from its own checkpoints."
        )


def check_versions(config: Config, sampler: SamplerCapabilities) -> None:
    """Refuse what needs several policy versions at once, if the sampler holds only one. Raises ConfigError."""
    cause = "This server"
    otherwise = "use another --sampler"
    if config.engine.trains_outside:
        cause = f"--learner {config.learner.name}"
        otherwise = "use a learner of this program"
    elif config.model.full_weights:
        cause = "--lora-rank 0"
        otherwise = "train an adapter"
    holds = f"{cause} with --sampler {config.sampler.name} holds one policy version at a time"
    if config.training.gate and not sampler.candidates:
        raise ConfigError(f"{holds}, so --gate cannot examine a candidate beside it: leave out --gate, or {otherwise}.")
    setup = judge_setup(config)
    teacher = "give another model with --teacher-model-name, GPUs of its own with --judge-gpus"
    if config.sampler.takes_urls:
        teacher += " or servers of the base model with --teacher-url"
    if not sampler.keeps_base and setup.uses_model and not config.has_other_model:
        user = "the judge" if setup.method.teacher_request is None else f"the teacher of --method {setup.method.name}"
        raise ConfigError(
            f"{holds}, so {user} cannot use the base model: use --method rl with --judge feedback or --judge-base-url, "
            f"{teacher}, or {otherwise}."
        )


def locked_folders(config: Config) -> dict[Path, str]:
    """The folders that only one server may write to, and the options that name them; the run directory first."""
    folders = {config.run.folder.resolve(): "--run-dir"}
    if config.capture.capture:
        folders.setdefault(config.ledger_dir.resolve(), "--rl-buffer-dir")
    return folders


def lock_folders(stack: contextlib.ExitStack, config: Config) -> RunDirLock:
    """Lock the run's folders until the stack is closed; the lock of the run directory. Raises UserError."""
    lock, *_ = [
        stack.enter_context(contextlib.closing(RunDirLock(folder, option)))
        for folder, option in locked_folders(config).items()
    ]
    return lock


def prepare_folders(config: Config) -> Path:
    """Fetch the model, then mark the locked folders with it and with the options; the model's folder."""
    folder = model_folder(config)
    # Only now: a model may be cached for several users.
    write_privately()
    for owned in locked_folders(config) if config.capture.capture else ():
        keep_to_model(owned, TEXT_ONLY if config.engine.takes_text else config.served_name)
    keep_options(config)
    return folder


def model_folder(config: Config) -> Path:
    """The folder of the policy's model. Raises UserError."""
    try:
        return fetch_files(config)
    except OSError as error:
        raise UserError(
            f"The model cannot be stored in {config.run.cache}: {error}. "
            "Set --cache-dir to a folder that can be written to."
        ) from None
