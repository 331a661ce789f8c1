"""The report: one page about a run, from what its directory holds, whether or not a server uses it."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from openclaw_rl.dashboard.components.render import render
from openclaw_rl.dashboard.run import TITLES, Prompt, Run, RunSource, make_example
from openclaw_rl.dashboard.views.learning import (
    COLUMNS,
    NOT_JUDGED,
    evaluation_charts,
    reward_charts,
    step_charts,
    step_row,
    verdict_charts,
)
from openclaw_rl.engines.base import EngineError, WeightForm, policy_in
from openclaw_rl.engines.factory import Resources, sampler_that_loads
from openclaw_rl.learn.checkpoints import Checkpoint
from openclaw_rl.learn.gate import answer_greedily
from openclaw_rl.learn.reporting import METRICS_FILE
from openclaw_rl.ledger.episodes import outcome
from openclaw_rl.ledger.run_dir import was_served
from openclaw_rl.ledger.schema import FILE as LEDGER
from openclaw_rl.models import BadModelFolder, ModelNotFound, adapter_rank, find_model
from openclaw_rl.rendering.chat import ChatRenderer
from openclaw_rl.rendering.tokenizer import ChatTokenizer
from openclaw_rl.terminal import progress
from openclaw_rl.types import BASE_VERSION

TEMPLATE = "dashboard/report.html.j2"
#: Where the report is written in the run directory, unless another file is named.
NAME = "report.html"
ANSWER_TOKENS = 200
#: A few short sequences need little memory, and a server may be using the same machine.
CACHE_GIB = 0.5


@dataclass(frozen=True, slots=True)
class Compared:
    """Two answers to one prompt."""

    question: str
    before: str
    after: str


def may_be_run(source: RunSource) -> bool:
    """Whether a folder holds a run or is empty; a report is not written beside other files."""
    others = (path for path in source.run_dir.iterdir() if path.name != NAME)
    files = (source.ledger_dir / LEDGER, source.run_dir / METRICS_FILE)
    return was_served(source.run_dir) or any(path.is_file() for path in files) or not any(others)


def page(source: RunSource, run: Run, *, answers: bool = True) -> str:
    """The page's text; with `answers`, both models are asked first, which takes a while."""
    model, no_model = model_folder(source, run)
    tokenizer, no_tokens = read_tokenizer(model) if model else (None, no_model)
    compared, no_answers = ask(source, run, model) if answers else ([], "They were not asked for (--no-answers).")
    return render(
        TEMPLATE,
        run=run,
        status=run.status,
        method=source.method.name,
        curves=[*evaluation_charts(run.evaluations), *step_charts(run.metrics.steps)],
        columns=COLUMNS,
        rows=[step_row(update) for update in run.updates],
        mix=verdict_charts(run.verdicts),
        not_judged=NOT_JUDGED,
        examples=[make_example(TITLES[kind], turn, tokenizer, source.method) for kind, turn in run.examples],
        no_tokens=no_tokens,
        outcome=outcome,
        rewards=reward_charts(run.episode_points),
        compared=compared,
        no_answers=no_answers or no_model,
        now=time.time(),
    )


def model_folder(source: RunSource, run: Run) -> tuple[Path | None, str]:
    """Where the run's model is on this machine, or why it is not; nothing is downloaded for a report."""
    try:
        folder = find_model(run.model, source.settings.cache)
    except ModelNotFound as error:
        return None, str(error)
    return folder, "" if folder else f"The model {run.model} is not on this machine; name its folder with --model-name."


def read_tokenizer(folder: Path) -> tuple[Tokenizer | None, str]:
    try:
        return ChatTokenizer(folder).backend, ""
    except BadModelFolder as error:
        return None, str(error)


def ask(source: RunSource, run: Run, model: Path | None) -> tuple[list[Compared], str]:
    """Answers of the base model and of the newest checkpoint, or why there are none."""
    if model is None:
        return [], ""
    if not run.prompts:
        return [], "No conversation has been recorded, so there is nothing to ask."
    checkpoint = source.checkpoints.latest()
    if checkpoint is None:
        return [], "There is no checkpoint yet: one is saved every --save-interval steps, and when the server stops."
    with contextlib.suppress(KeyboardInterrupt), progress() as shown:
        task = shown.add_task("Asking both models (Ctrl-C skips this)", total=2 * len(run.prompts))
        try:
            asking = compare(source, run.model, model, checkpoint, run.prompts, lambda: shown.advance(task))
            return asyncio.run(asking), ""
        except (EngineError, ModelNotFound, OSError) as error:
            return [], f"The models could not be asked: {error}"
    return [], "You interrupted it."


async def compare(
    source: RunSource,
    model: str,
    folder: Path,
    checkpoint: Checkpoint,
    prompts: Sequence[Prompt],
    on_answer: Callable[[], None],
) -> list[Compared]:
    """Ask the base model `model`, whose files are in `folder`, and the checkpoint all prompts.

    Raises EngineError, ModelNotFound and OSError.
    """
    policy = policy_in(checkpoint.folder)
    rank = adapter_rank(checkpoint.folder) if policy.form is WeightForm.PEFT else 0
    settings = source.settings.for_few_sequences(2 * len(prompts), rank, CACHE_GIB)
    async with contextlib.AsyncExitStack() as stack:
        factory = sampler_that_loads(policy.form, settings)
        sampler = factory.open(settings, Resources(stack), folder, model)
        stack.push_async_callback(sampler.close)
        await sampler.start()
        renderer = await asyncio.to_thread(ChatRenderer, folder)
        # A checkpoint may have version 0, which is the base model's here.
        version = max(checkpoint.version, BASE_VERSION + 1)
        await sampler.publish(version, policy)

        async def one(prompt: Prompt, asked: int) -> str:
            said = await answer_greedily(sampler, renderer, prompt.ids, asked, ANSWER_TOKENS)
            on_answer()
            return said

        said = await asyncio.gather(*(one(prompt, v) for prompt in prompts for v in (BASE_VERSION, version)))
    pairs = zip(prompts, said[::2], said[1::2], strict=True)
    return [Compared(prompt.question, before, after) for prompt, before, after in pairs]
