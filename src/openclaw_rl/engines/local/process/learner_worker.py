"""The learner's process: commands in, one report for each out.

It stands behind everybody else on the machine: serving must not feel a step. Like the sampler's worker it ends when
its pipe closes, and leaves signals to the server.
"""

import contextlib
import logging
import os
import signal
from multiprocessing.connection import Connection

import torch

from openclaw_rl.engines.base import StepRefused
from openclaw_rl.engines.local.model.decoder import Decoder, load_decoder
from openclaw_rl.engines.local.model.shared_weights import take_up
from openclaw_rl.engines.local.process.learner_messages import (
    Broken,
    Command,
    Done,
    LearnerOptions,
    Load,
    Refused,
    Report,
    Reset,
    Save,
    Started,
    Step,
    Undo,
    WritePolicy,
)
from openclaw_rl.engines.local.process.sampler_worker import describe, placement, weight_bytes
from openclaw_rl.engines.local.training.policy_trainer import PolicyTrainer

log = logging.getLogger(__name__)

#: Serving loses a fifth of its speed to a learner of this niceness on two busy cores, and learning still goes on;
#: twice as much and a step takes minutes where it takes seconds on idle cores.
NICENESS = 5


def main(connection: Connection, options: LearnerOptions) -> None:
    """The process: load, then obey until the pipe closes."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    os.nice(NICENESS)
    # A few small kernels: compiled here they take seconds, and a pool of compilers has been seen to hang.
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
        connection.send(Started(weight_bytes(decoder)))
        while True:
            connection.send(obey(trainer, connection.recv()))


def load_alone(options: LearnerOptions) -> Decoder:
    """A copy of the weights for this process."""
    device, dtype = placement(options.device, options.dtype)
    return load_decoder(options.model, dtype, device)


def obey(trainer: PolicyTrainer, command: Command) -> Report:
    try:
        match command:
            case Step(sequences):
                return Done(trainer.step(sequences))
            case Reset():
                trainer.reset()
            case Undo():
                trainer.undo()
            case WritePolicy(folder):
                trainer.write_policy(folder)
            case Save(folder):
                trainer.save(folder)
            case Load(folder):
                trainer.load(folder)
    except StepRefused as error:
        return Refused(str(error))
    except OSError as error:
        return Refused(f"{error.filename or 'the disk'}: {error.strerror or error}")
    return Done()
