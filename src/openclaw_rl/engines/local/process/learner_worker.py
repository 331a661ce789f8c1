"""The learner's process: it reads calls and answers each with one report.

It runs at a lower priority than everything else, so that a step does not slow serving. Like the sampler's worker it
ends when its pipe closes, and ignores signals, which the server handles.
"""

import contextlib
import logging
import os
import signal
from multiprocessing.connection import Connection
from typing import Any

import torch

from openclaw_rl.engines.base import StepLost, StepRefused, StepStopped
from openclaw_rl.engines.local.model.placement import describe, placement
from openclaw_rl.engines.local.model.shared_weights import take_up
from openclaw_rl.engines.local.model.transformers_decoder import load_language_model
from openclaw_rl.engines.local.process.launcher import STOP_SIGNAL
from openclaw_rl.engines.local.process.worker_messages import (
    Broken,
    Done,
    LearnerOptions,
    LearnerReport,
    Refused,
    Started,
    TrainerCall,
)
from openclaw_rl.engines.local.training.policy_trainer import PolicyTrainer
from openclaw_rl.engines.local.training.ranks import RankLost

log = logging.getLogger(__name__)

#: With this niceness serving loses a fifth of its speed on two busy cores. With twice as much, a step that takes
#: seconds on idle cores takes minutes.
NICENESS = 5


def main(connection: Connection, options: LearnerOptions) -> None:
    """Load the model, then carry out calls until the pipe closes."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    os.nice(NICENESS)
    if options.cuda_device:
        # PyTorch looks at the devices at its first use of one, which comes later.
        os.environ["CUDA_VISIBLE_DEVICES"] = options.cuda_device
    if options.trusts_code:
        # The sampler's weights name classes in the copy that Transformers keeps of a folder's code.
        from transformers import dynamic_module_utils

        modules: Any = dynamic_module_utils
        modules.init_hf_modules()
    # A few small kernels compile here in seconds; a pool of compiler processes has hung before.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        try:
            torch.manual_seed(options.training.seed)
            trainer = open_trainer(connection, options)
        except Exception as error:
            log.debug("loading failed", exc_info=True)
            connection.send(Broken(f"The learner could not load the model in {options.model}: {describe(error)}"))
            return
        signal.signal(STOP_SIGNAL, lambda _number, _frame: trainer.stop())
        connection.send(Started(trainer.weight_bytes, (str(trainer.device),)))
        while True:
            try:
                connection.send(answer(trainer, connection.recv()))
            except RankLost as error:
                log.debug("another rank is gone", exc_info=True)
                raise SystemExit(1) from error


def open_trainer(connection: Connection, options: LearnerOptions) -> PolicyTrainer:
    """Load the model; as one of several ranks, together with the others."""
    if options.place is not None:
        from openclaw_rl.engines.local.process.rank_worker import open_rank

        return open_rank(options, options.place, connection)
    shared = take_up(options.shared) if options.shared else None
    if shared is not None:
        return PolicyTrainer(shared, options)
    device, dtype = placement(options.device, options.dtype, options.cpu_dtype)
    model = load_language_model(
        options.model, dtype, device, quantize=options.quantize, compare=True, trusts_code=options.trusts_code
    )
    return PolicyTrainer(model, options)


def answer(trainer: PolicyTrainer, call: TrainerCall) -> LearnerReport:
    try:
        return Done(getattr(trainer, call.method)(**call.arguments))
    except StepRefused as error:
        return Refused(str(error), stopped=isinstance(error, StepStopped))
    except StepLost as error:
        return Refused(str(error), may_pass=True)
    except OSError as error:
        return Refused(f"{error.filename or 'the disk'}: {error.strerror or error}")
