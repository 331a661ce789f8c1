"""Going back to an earlier policy, with the server running or without it: `openclaw-rl rollback`."""

import asyncio
import http
import json
import shutil
import urllib.error
import urllib.request
from pathlib import Path

from openclaw_rl.api.operations import OperationFailed
from openclaw_rl.app.background import choose
from openclaw_rl.app.config import Config
from openclaw_rl.errors import UserError
from openclaw_rl.learn.build import run_checkpoints
from openclaw_rl.learn.checkpoints import RECORD
from openclaw_rl.ledger.offline import OfflineLedger

GIVE_KEY = "Give --api-key, or set SGLANG_API_KEY."
#: The server first ends the step it is in, then loads the policy.
ANSWER_SECONDS = 600.0


def roll_back_server(server: str, config: Config, version: int | None) -> int:
    """Ask a running server. Raises UserError with what it says."""
    headers = {"Content-Type": "application/json"}
    if config.api_keys:
        headers["Authorization"] = f"Bearer {config.api_keys[0].secret}"
    body = json.dumps({} if version is None else {"version": version}).encode()
    request = urllib.request.Request(f"{server}/v1/policy/rollback", body, headers)
    try:
        # Never by way of a proxy: the server is on this machine.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=ANSWER_SECONDS) as answer:
            return int(json.load(answer)["policy_version"])
    except urllib.error.HTTPError as error:
        with error:
            message = json.load(error)["error"]["message"]
        if error.code == http.HTTPStatus.UNAUTHORIZED:
            message += f" {GIVE_KEY}"
        raise UserError(message) from None
    except OSError as error:
        raise UserError(f"The server at {server} does not answer: {error}.") from None


def roll_back_offline(ledger: OfflineLedger, config: Config, version: int | None) -> int:
    """Make an earlier checkpoint the newest one, so that the next start goes on from it."""
    checkpoints = run_checkpoints(config)
    found = checkpoints.all()
    try:
        chosen = choose(found, version, found[-1].step if found else 0)
    except OperationFailed as error:
        raise UserError(str(error)) from None
    if chosen is None:
        raise UserError(
            "There is no earlier checkpoint, so it is the base model that would be gone back to: start the server with "
            "--resume-from-ckpt none, or roll back while it runs."
        )

    async def copy(folder: Path) -> None:
        for path in chosen.folder.iterdir():
            if path.name != RECORD:
                shutil.copy(path, folder / path.name)

    new = max(ledger.latest_version(), found[-1].version) + 1
    asyncio.run(checkpoints.save(chosen.step, new, (), copy, replaced=chosen))
    ledger.roll_back(chosen.step)
    return new


def step_named(config: Config, version: int) -> str:
    """`: that of step N`, to be said after a policy's number; empty if no checkpoint tells."""
    steps = [checkpoint.step for checkpoint in run_checkpoints(config).all() if checkpoint.version == version]
    if not steps:
        return ""
    return f": that of step {steps[0]}" if steps[0] else ": the base model"
