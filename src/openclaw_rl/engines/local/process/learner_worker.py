"""The learner's process: it reads calls and answers each with one report.

It runs at a lower priority than everything else, so that a step does not slow serving. Like the sampler's worker it
ends when its pipe closes, and ignores signals, which the server handles.
"""

import contextlib
import logging
import os
import signal
from multiprocessing.connection import Connection

import torch

from openclaw_rl.engines.base import StepLost, StepRefused, StepStopped
from openclaw_rl.engines.local.model.decoder import Decoder, load_decoder
from openclaw_rl.engines.local.model.placement import describe, placement, weight_bytes
from openclaw_rl.engines.local.model.shared_weights import take_up
from openclaw_rl.engines.local.process.learner_messages import (
    STOP_SIGNAL,
    Broken,
    Done,
    LearnerOptions,
    Refused,
    Report,
    Started,
    TrainerCall,
)
from openclaw_rl.engines.local.training.policy_trainer import PolicyTrainer

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
    # A few small kernels compile here in seconds; a pool of compiler processes has hung before.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        try:
            decoder = take_up(options.shared) if options.shared else load_alone(options)
            torch.manual_seed(options.training.seed)
            trainer = PolicyTrainer(decoder, options)
        except Exception as error:
            log.debug("loading failed", exc_info=True)
            connection.send(Broken(f"The learner could not load the model in {options.model}: {describe(error)}"))
            return
        signal.signal(STOP_SIGNAL, lambda _number, _frame: trainer.stop())
        connection.send(Started(weight_bytes(decoder)))
        while True:
            connection.send(answer(trainer, connection.recv()))


def load_alone(options: LearnerOptions) -> Decoder:
    """A copy of the weights for this process."""
    device, dtype = placement(options.device, options.dtype)
    return load_decoder(options.model, dtype, device)


def answer(trainer: PolicyTrainer, call: TrainerCall) -> Report:
    try:
        return Done(getattr(trainer, call.method)(**call.arguments))
    except StepRefused as error:
        return Refused(str(error), stopped=isinstance(error, StepStopped))
    except StepLost as error:
        return Refused(str(error), may_pass=True)
    except OSError as error:
        return Refused(f"{error.filename or 'the disk'}: {error.strerror or error}")
