"""Looks for what keeps a server from working on this machine, and says how to mend it. Nothing is changed."""

from collections.abc import Callable, Iterator

from openclaw_rl.app.config import Config
from openclaw_rl.app.doctor.finding import Finding, Health
from openclaw_rl.app.doctor.machine import disk, gpu, memory, packages, precision, python, sandbox, torch_works
from openclaw_rl.app.doctor.run import engine, keys, ledger, model, permissions, port
from openclaw_rl.app.doctor.serving import answers, clients
from openclaw_rl.errors import UserError

#: A check gives one finding, which names it.
Check = Callable[[Config], Finding]
#: In the order that they are shown: what others depend on comes first.
CHECKS: dict[str, Check] = {
    "Python": python,
    "packages": packages,
    "PyTorch": torch_works,
    "GPU": gpu,
    "precision": precision,
    "memory": memory,
    "disk": disk,
    "permissions": permissions,
    "model": model,
    "engine": engine,
    "sandbox": sandbox,
    "port": port,
    "keys": keys,
    "ledger": ledger,
    "server": answers,
    "clients": clients,
}


def examine(config: Config) -> Iterator[tuple[str, Finding]]:
    """Make every check. One that fails with an error that a user can fix is a finding like any other."""
    for name, check in CHECKS.items():
        try:
            yield name, check(config)
        except (UserError, OSError) as error:
            yield name, Finding(Health.BROKEN, str(error))
