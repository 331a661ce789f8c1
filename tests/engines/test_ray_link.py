"""Workers that run elsewhere: their calls to the server, their reports and their end. Actors are processes here."""

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import AsyncIterator

from openclaw_rl.engines.local.process.launcher import WorkerLink
from openclaw_rl.engines.ray.actor import SECRET_BYTES, WORK, Reception, call
from openclaw_rl.engines.ray.launcher import RayLauncher
from support.ray_double import NODE, RoomDouble

SECONDS = 60


@contextlib.asynccontextmanager
async def link_to(
    room: RoomDouble, arguments: object = "hello"
) -> AsyncIterator[tuple[WorkerLink, AsyncIterator[object]]]:
    """A worker that has sent its first report."""
    link = RayLauncher(room, spins=0).start("support.obedient_worker", arguments, "cpu")
    reports = link.reports()
    try:
        async with asyncio.timeout(SECONDS):
            assert await anext(reports) == arguments
            yield link, reports
    finally:
        await link.close(patience=0.0)


async def test_a_worker_gets_commands_in_order_and_says_where_it_runs() -> None:
    large = bytes(range(256)) * 16384
    async with link_to(room := RoomDouble()) as (link, reports):
        link.send(large)
        link.send("and one more")
        assert [await anext(reports), await anext(reports)] == [large, "and one more"]
        assert link.nodes == [NODE]
        assert link.pids == [room.actors[0].process.pid]
        link.interrupt()
        assert await anext(reports) == "stopped"
        await link.close()
        assert room.actors[0].process.exitcode == 0
        assert link.end == ""
    assert room.take() == 0


async def test_reports_end_with_a_reason_when_a_worker_is_killed() -> None:
    async with link_to(room := RoomDouble()) as (link, reports):
        os.kill(link.pids[0], signal.SIGKILL)
        assert [report async for report in reports] == []
        await link.close()
        assert link.end == "Ray says: SIGKILL"
    async with link_to(room) as (again, _):
        assert again.pids != link.pids


async def test_a_worker_that_does_not_end_is_killed() -> None:
    async with link_to(room := RoomDouble()) as (link, _):
        os.kill(link.pids[0], signal.SIGSTOP)
        await link.close(patience=0.1)
        assert room.actors[0].process.exitcode == -signal.SIGKILL
        assert link.end == ""


async def test_a_cluster_without_room_is_a_sentence() -> None:
    link = RayLauncher(RoomDouble(trouble="The sampler needs CPU 9."), spins=0).start("nowhere", None, "cpu")
    async with asyncio.timeout(SECONDS):
        assert [report async for report in link.reports()] == []
        await link.close()
    assert link.end == "The sampler needs CPU 9."


def test_only_those_who_know_the_secret_are_connected() -> None:
    with contextlib.closing(Reception(NODE)) as reception:
        address = (reception.address.host, reception.address.port)
        for said in (b"", b"w" * (SECRET_BYTES + 1), reception.address.secret[:-1]):
            with socket.create_connection(address) as stranger:
                stranger.sendall(said)
                stranger.shutdown(socket.SHUT_WR)
                assert reception.accept(SECONDS) is None
        with contextlib.closing(call(reception.address, WORK)) as worker:
            called = reception.accept(SECONDS)
            assert called is not None
            purpose, end = called
            with contextlib.closing(end):
                worker.send("hello")
                assert (purpose, end.connection.recv()) == (WORK, "hello")
        assert reception.accept(0.01) is None
