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
from openclaw_rl.engines.local.decoder import Decoder, load_decoder
from openclaw_rl.engines.local.learner_messages import (
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
from openclaw_rl.engines.local.shared import take_up
from openclaw_rl.engines.local.student import Student
from openclaw_rl.engines.local.worker import describe, placement, weight_bytes

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
            student = Student(decoder, options)
        except Exception as error:
            log.debug("loading failed", exc_info=True)
            connection.send(Broken(f"The learner could not load the model in {options.model}: {describe(error)}"))
            return
        connection.send(Started(weight_bytes(decoder)))
        while True:
            connection.send(obey(student, connection.recv()))


def load_alone(options: LearnerOptions) -> Decoder:
    """A copy of the weights for this process."""
    device, dtype = placement(options.device, options.dtype)
    return load_decoder(options.model, dtype, device)


def obey(student: Student, command: Command) -> Report:
    try:
        match command:
            case Step(sequences):
                return Done(student.step(sequences))
            case Reset():
                student.reset()
            case Undo():
                student.undo()
            case WritePolicy(folder):
                student.write_policy(folder)
            case Save(folder):
                student.save(folder)
            case Load(folder):
                student.load(folder)
    except StepRefused as error:
        return Refused(str(error))
    except OSError as error:
        return Refused(f"{error.filename or 'the disk'}: {error.strerror or error}")
    return Done()
