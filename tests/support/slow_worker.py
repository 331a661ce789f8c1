"""A worker process that reads and writes slowly, for tests of the pipe to it."""

import os
import struct
import time
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler

PAUSE_SECONDS = 0.2


def main(connection: Connection, options: object) -> None:
    """Answer each command with itself. Read late, and pause between the length of an answer and its content."""
    while True:
        time.sleep(PAUSE_SECONDS)
        try:
            answer = ForkingPickler.dumps(connection.recv())
        except EOFError:
            return
        os.write(connection.fileno(), struct.pack("!i", len(answer)))
        time.sleep(PAUSE_SECONDS)
        connection._send(answer)  # type: ignore[attr-defined]
