"""Checks of the running server and of the clients that are configured for it."""

import time

from openclaw_rl.app.config import Config
from openclaw_rl.app.doctor.finding import Finding, Health, broken, note, ok
from openclaw_rl.client import GIVE_KEY, Client, ready_state
from openclaw_rl.connect.clients import CLIENTS, NO_SERVER, ServerFacts
from openclaw_rl.connect.files import addition, is_connected
from openclaw_rl.errors import UserError
from openclaw_rl.ledger.lock import read_server, server_url

#: Asked for an answer of a few tokens, which is neither recorded nor learned from.
QUESTION = [{"role": "user", "content": "Say hello."}]
ANSWER_TOKENS = 4


def first_key(config: Config) -> str:
    return next((key.secret for key in (*config.server.user_keys, *config.server.api_keys)), "")


def answers(config: Config) -> Finding:
    """Whether the server of the run gives a real answer. Raises UserError if it does not."""
    url = server_url(config.run.folder)
    if url is None:
        return (
            note("it is starting") if read_server(config.run.folder) else note("it is not running", "openclaw-rl serve")
        )
    key = first_key(config)
    state = ready_state(url, key)
    if not state.get("ready"):
        return broken(
            f"{url} is not ready: {state.get('detail') or 'it does not answer'}", "look at the server's messages"
        )
    if "policy_version" not in state:
        return note(f"{url} is ready, but was not asked: it needs a key", GIVE_KEY)
    started = time.monotonic()
    with Client(url, key) as client:
        pieces = list(client.chat(QUESTION, max_tokens=ANSWER_TOKENS, store=False))
    text = f"{url} answered in {time.monotonic() - started:.1f} s with policy {state['policy_version']}"
    if not pieces:
        return broken(f"{url} gives empty answers", "look at the server's messages")
    trouble = [f"{part}: {state[part]}" for part in ("capture", "judge", "learner") if is_trouble(state.get(part))]
    return note(f"{text}; {'; '.join(trouble)}", "look at the server's messages") if trouble else ok(text)


def is_trouble(state: object) -> bool:
    """Whether a part of the server says that it does not work at the moment."""
    return isinstance(state, str) and state.startswith(("suspended", "down", "failed", "stopped"))


def clients(config: Config) -> Finding:
    """Whether the clients that `connect` has configured still fit the server."""
    connected = [name for name, setup in CLIENTS.items() if (path := setup(NO_SERVER).path) and is_connected(path)]
    if not connected:
        return ok("none is configured by openclaw-rl connect")
    url, key = server_url(config.run.folder), first_key(config)
    if url is None:
        return note(f"{', '.join(connected)}: not compared, because the server is not running")
    with Client(url, key) as client:
        model = client.model()
    facts = ServerFacts(url, model["id"], model["max_input_tokens"], key)
    stale = [name for name in connected if not fits(name, facts)]
    if stale:
        mend = "; ".join(f"openclaw-rl connect {name}" for name in stale)
        return Finding(Health.NOTE, f"{', '.join(stale)}: configured for another server, model or key", mend)
    return ok(f"{', '.join(connected)}: configured for this server")


def fits(name: str, facts: ServerFacts) -> bool:
    """Whether a client's file says what the server needs."""
    setup = CLIENTS[name](facts)
    assert setup.path is not None
    assert setup.edit is not None
    try:
        return not addition(setup.path, setup.edit).is_needed
    except UserError:
        return False
