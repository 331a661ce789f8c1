"""The actor: a process that Ray starts on some node of the cluster, where it becomes a worker and calls the server.

The worker calls over TCP, and says a secret that Ray brought it. Two connections lead to it. Over the first one go
commands and reports, as over a pipe. Over the second one comes the order to end a step early. Neither is encrypted, as
Ray's own connections are not: the cluster's network must be one that its owner trusts.
"""

import contextlib
import hmac
import os
import secrets
import signal
import socket
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

from openclaw_rl.engines.host import host_id
from openclaw_rl.engines.local.process.launcher import STOP_SIGNAL, WAIT_SETTINGS, run_worker

SECRET_BYTES = 32
#: The byte after the secret: which of the two connections it is.
WORK = b"w"
ORDERS = b"o"
#: How long a caller has to say the secret, and a worker to reach the server.
SECRET_SECONDS = 5.0
CALL_SECONDS = 60.0
#: After so many seconds of silence a connection is tried, so often and with such pauses, before it counts as lost.
KEEP_ALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}


@dataclass(frozen=True, slots=True)
class CallBack:
    """Where the server waits for the calls of one worker."""

    host: str
    port: int
    secret: bytes


class CalledEnd:
    """One end of a connection, which can be hung up while another thread reads from it."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self.connection = Connection(os.dup(sock.fileno()))

    def hang_up(self) -> None:
        """Wake those who read at both ends. The connection stays open for what is under way."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.hang_up()
        self._socket.close()
        self.connection.close()


class Reception:
    """Waits for the calls of one worker."""

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)
        self.address = CallBack(host, self._listener.getsockname()[1], secrets.token_bytes(SECRET_BYTES))

    def accept(self, seconds: float) -> tuple[bytes, CalledEnd] | None:
        """The next call of the worker, and which connection it is; None if none comes, or a stranger calls."""
        self._listener.settimeout(seconds)
        try:
            sock, _ = self._listener.accept()
        except TimeoutError:
            return None
        said = read_exactly(sock, SECRET_BYTES + 1)
        if said is None or not hmac.compare_digest(said[:-1], self.address.secret):
            sock.close()
            return None
        prepare(sock)
        return said[-1:], CalledEnd(sock)

    def close(self) -> None:
        self._listener.close()


def call(server: CallBack, purpose: bytes) -> Connection:
    """Call the server. Raises OSError."""
    sock = socket.create_connection((server.host, server.port), CALL_SECONDS)
    sock.sendall(server.secret + purpose)
    prepare(sock)
    return Connection(sock.detach())


def prepare(sock: socket.socket) -> None:
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEP_ALIVE.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def read_exactly(sock: socket.socket, count: int) -> bytes | None:
    """So many bytes; None if they do not come in time."""
    end = time.monotonic() + SECRET_SECONDS
    said = b""
    with contextlib.suppress(OSError):
        while len(said) < count:
            sock.settimeout(max(0.001, end - time.monotonic()))
            piece = sock.recv(count - len(said))
            if not piece:
                return None
            said += piece
        return said
    return None


@dataclass(frozen=True, slots=True)
class Placed:
    """A worker's first report: where it runs."""

    node: str
    host: str
    """See `host_id`."""
    pid: int


@dataclass(frozen=True, slots=True)
class Assignment:
    """What an actor is to do."""

    server: CallBack
    target: str
    """A module with `main(connection, arguments)`."""
    arguments: object
    spins: int
    """How often threads look for each other before they give up their core."""
    uses_gpu: bool


class WorkerActor:
    """Runs one worker. Ray ends the actor's process with the server's."""

    def work(self, assignment: Assignment) -> int:
        """Be the worker until its connection closes. Returns the exit code that its process would have."""
        if not any(name in os.environ for name in WAIT_SETTINGS):
            os.environ[WAIT_SETTINGS[0]] = str(assignment.spins)
        if not assignment.uses_gpu:
            # Ray does not hide GPUs from those who asked for none.
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        signal.signal(STOP_SIGNAL, signal.SIG_IGN)
        with contextlib.closing(call(assignment.server, WORK)) as connection:
            orders = call(assignment.server, ORDERS)
            threading.Thread(target=pass_on, args=(orders,), name="orders", daemon=True).start()
            connection.send(Placed(self.node(), host_id(), os.getpid()))
            try:
                run_worker(connection, assignment.target, assignment.arguments)
            except SystemExit as end:
                return end.code if isinstance(end.code, int) else 1
        return 0

    def node(self) -> str:
        """The address of the node that it runs on."""
        return node_address()


def node_address() -> str:
    """The address that Ray has for the node of this process."""
    import ray

    here = ray.get_runtime_context().get_node_id()
    return next(str(node["NodeManagerAddress"]) for node in ray.nodes() if node["NodeID"] == here)


def pass_on(orders: Connection) -> None:
    """Turn each order to end a step into the signal that a worker expects."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            orders.recv_bytes()
            os.kill(os.getpid(), STOP_SIGNAL)
