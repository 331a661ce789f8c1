"""The clients that can be connected, and what each has to be told.

The settings were taken from the clients' documentation. Each has the key, the context length where the client can be
told, and whatever keeps the beginning of its prompts the same from request to request.
"""

import os
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from openclaw_rl.connect.edits import OURS, Edit, JsonEdit, SettingPath, TomlEdit, YamlEdit, toml_string

#: The key of a server that needs none: most clients refuse to send no key.
NO_KEY = "none"
#: With a shorter context, agents with many tools have no room for a conversation.
ROOMY_CONTEXT = 32_768
#: The bounds of the longest answer that a client is told to ask for.
MIN_ANSWER_TOKENS, MAX_ANSWER_TOKENS = 256, 8192


@dataclass(frozen=True)
class ServerFacts:
    """A server, as its clients see it."""

    url: str
    """Without /v1."""
    model: str
    context_tokens: int
    key: str = ""

    @property
    def api(self) -> str:
        return f"{self.url}/v1"

    @property
    def sent_key(self) -> str:
        return self.key or NO_KEY

    @property
    def is_roomy(self) -> bool:
        return self.context_tokens >= ROOMY_CONTEXT

    @property
    def answer_tokens(self) -> int:
        """The longest answer that leaves room for a conversation."""
        return max(MIN_ANSWER_TOKENS, min(MAX_ANSWER_TOKENS, self.context_tokens // 8))


#: Facts for undoing, which needs no more than the file and its format.
NO_SERVER = ServerFacts("", "", 0)


@dataclass(frozen=True)
class Setup:
    """What connects a client to a server."""

    then: str
    """What the user does next."""
    path: Path | None = None
    edit: Edit | None = None
    """The change to the file at `path`. Without it, there is only `text` to read."""
    text: str = ""

    @property
    def shown(self) -> str:
        return self.text or (self.edit.snippet() if self.edit else "")


#: Gives the setup of a client for a server.
ClientSetup = Callable[[ServerFacts], Setup]


#: The name under which clients know the server.
PROVIDER = "openclaw-rl"
#: Slow machines take long to read a long prompt.
PATIENCE_MS = 1_200_000
TOO_SHORT = (
    "\nThis client sends long prompts, and the server's context of {tokens} tokens is short for them: serve a larger "
    "model with --max-context-tokens 32768 or more."
)


def folder(variable: str, default: str) -> Path:
    """A folder that an environment variable may name."""
    return Path(os.environ.get(variable) or Path.home() / default).expanduser()


def warning(server: ServerFacts) -> str:
    return "" if server.is_roomy else TOO_SHORT.format(tokens=server.context_tokens)


def openclaw(server: ServerFacts) -> Setup:
    model = {
        "id": server.model,
        "name": server.model,
        "contextWindow": server.context_tokens,
        "maxTokens": server.answer_tokens,
        "compat": {
            # With these two, the client names the session of each request.
            "supportsPromptCacheKey": True,
            "sendSessionAffinityHeaders": True,
            "requiresStringContent": True,
            "maxTokensField": "max_tokens",
        },
    }
    provider = {"baseUrl": server.api, "apiKey": server.sent_key, "api": "openai-completions", "models": [model]}
    settings: dict[SettingPath, object] = {
        ("models", "providers", PROVIDER): provider,
        ("agents", "defaults", "model", "primary"): f"{PROVIDER}/{server.model}",
    }
    if not server.is_roomy:
        settings[("agents", "defaults", "contextInjection")] = "never"
        settings[("tools", "profile")] = "minimal"
        settings[("tools", "toolSearch")] = False
    path = Path(os.environ.get("OPENCLAW_CONFIG_PATH") or folder("OPENCLAW_STATE_DIR", ".openclaw") / "openclaw.json")
    then = "Check it with: openclaw config validate && openclaw models list"
    return Setup(then, path.expanduser(), JsonEdit(settings))


def claude_code(server: ServerFacts) -> Setup:
    models = ("ANTHROPIC_MODEL", *(f"ANTHROPIC_DEFAULT_{size}_MODEL" for size in ("OPUS", "SONNET", "HAIKU")))
    environment = {
        "ANTHROPIC_BASE_URL": server.url,
        "ANTHROPIC_AUTH_TOKEN": server.sent_key,
        **dict.fromkeys(models, server.model),
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(server.context_tokens),
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(server.answer_tokens),
        # Otherwise the system prompt begins with a number that changes with every request.
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "API_TIMEOUT_MS": str(PATIENCE_MS),
    }
    path = folder("CLAUDE_CONFIG_DIR", ".claude") / "settings.json"
    settings: Mapping[SettingPath, object] = {("env", name): value for name, value in environment.items()}
    return Setup(f"Start a new session: claude{warning(server)}", path, JsonEdit(settings))


def codex(server: ServerFacts) -> Setup:
    # Codex sends `store: false`; the header lets its owner's server record the turns nevertheless.
    headers = {"X-Store": "1", **({"Authorization": f"Bearer {server.key}"} if server.key else {})}
    pairs = ", ".join(f"{toml_string(name)} = {toml_string(value)}" for name, value in headers.items())
    content = f"""\
{OURS} codex`
model = {toml_string(server.model)}
model_provider = "{PROVIDER}"
model_context_window = {server.context_tokens}
model_auto_compact_token_limit = {server.context_tokens * 4 // 5}
# The server takes functions only: no search on OpenAI's servers, no tools in namespaces.
web_search = "disabled"

[features]
multi_agent = false

[model_providers.{PROVIDER}]
name = "{PROVIDER}"
base_url = {toml_string(server.api)}
wire_api = "responses"
stream_idle_timeout_ms = {PATIENCE_MS}
http_headers = {{ {pairs} }}
"""
    path = folder("CODEX_HOME", ".codex") / f"{PROVIDER}.config.toml"
    then = f"Use it (Codex 0.134 or newer) with: codex --profile {PROVIDER}{warning(server)}"
    return Setup(then, path, TomlEdit(content))


def opencode(server: ServerFacts) -> Setup:
    limit = {"context": server.context_tokens, "output": server.answer_tokens}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": PROVIDER,
        "options": {"baseURL": server.api, "apiKey": server.sent_key},
        "models": {server.model: {"name": server.model, "limit": limit}},
    }
    model = f"{PROVIDER}/{server.model}"
    settings: Mapping[SettingPath, object] = {
        ("provider", PROVIDER): provider,
        ("model",): model,
        ("small_model",): model,
    }
    home = folder("XDG_CONFIG_HOME", ".config") / "opencode"
    existing = [path for name in ("opencode.json", "opencode.jsonc") if (path := home / name).exists()]
    path = Path(os.environ.get("OPENCODE_CONFIG") or next(iter(existing), home / "opencode.json"))
    return Setup(f"Start it: opencode{warning(server)}", path.expanduser(), JsonEdit(settings))


def continue_dev(server: ServerFacts) -> Setup:
    item = {
        "name": f"{server.model} ({PROVIDER})",
        "provider": "openai",
        "model": server.model,
        "apiBase": server.api,
        "apiKey": server.sent_key,
        "roles": ["chat", "edit", "apply"],
        "defaultCompletionOptions": {"contextLength": server.context_tokens, "maxTokens": server.answer_tokens},
    }
    path = folder("CONTINUE_GLOBAL_DIR", ".continue") / "config.yaml"
    whole = {"name": "Local configuration", "version": "1.0.0", "schema": "v1"}
    edit = YamlEdit("continue", list_name="models", item=item, whole=whole)
    return Setup(f"Choose {item['name']} in Continue's list of models.", path, edit)


def aider(server: ServerFacts) -> Setup:
    model = f"openai/{server.model}"
    keys = {
        "model": model,
        "weak-model": model,
        "openai-api-base": server.api,
        "openai-api-key": server.sent_key,
        "show-model-warnings": False,
    }
    return Setup("Start it in a repository: aider", Path.home() / ".aider.conf.yml", YamlEdit("aider", keys))


def open_webui(server: ServerFacts) -> Setup:
    text = variables(OPENAI_API_BASE_URL=server.api, OPENAI_API_KEY=server.sent_key, ENABLE_OLLAMA_API="false")
    then = (
        "Set these before `open-webui serve`, or enter URL and key under Admin Settings, Connections. In Docker, give "
        "them with -e; there 127.0.0.1 is the container, so start the server with --api-key, which opens it to the "
        "network, and write host.docker.internal instead."
    )
    return Setup(then, text=text)


def litellm(server: ServerFacts) -> Setup:
    parameters = {"model": f"openai/{server.model}", "api_base": server.api, "api_key": server.sent_key}
    information = {"max_input_tokens": server.context_tokens, "max_output_tokens": server.answer_tokens}
    item = {"model_name": server.model, "litellm_params": parameters, "model_info": information}
    text = YamlEdit("litellm", list_name="model_list", item=item).snippet()
    return Setup("Add this to the proxy's config.yaml, and restart: litellm --config config.yaml", text=text)


def openai_sdk(server: ServerFacts) -> Setup:
    text = variables(OPENAI_BASE_URL=server.api, OPENAI_API_KEY=server.sent_key)
    return Setup(f'Set these; the client is then OpenAI(), with model="{server.model}".', text=text)


def anthropic_sdk(server: ServerFacts) -> Setup:
    text = variables(ANTHROPIC_BASE_URL=server.url, ANTHROPIC_API_KEY=server.sent_key)
    return Setup(f'Set these; the client is then Anthropic(), with model="{server.model}".', text=text)


def variables(**values: str) -> str:
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in values.items())


#: In the order that --help lists them.
CLIENTS: Mapping[str, ClientSetup] = {
    "openclaw": openclaw,
    "claude-code": claude_code,
    "codex": codex,
    "opencode": opencode,
    "continue": continue_dev,
    "aider": aider,
    "open-webui": open_webui,
    "litellm": litellm,
    "openai": openai_sdk,
    "anthropic": anthropic_sdk,
}
