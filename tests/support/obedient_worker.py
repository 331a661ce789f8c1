"""A worker that returns what it is sent, and reports when it is told to stop."""

import contextlib
import signal
from multiprocessing.connection import Connection

from openclaw_rl.engines.local.process.launcher import STOP_SIGNAL


def main(connection: Connection, options: object) -> None:
    signal.signal(STOP_SIGNAL, lambda _number, _frame: connection.send("stopped"))
    connection.send(options)
    with contextlib.suppress(EOFError):
        while True:
            connection.send(connection.recv())
