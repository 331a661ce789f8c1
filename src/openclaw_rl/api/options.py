"""The options of the server, and its keys."""

from dataclasses import dataclass
from typing import Literal, Self
from urllib.parse import urlsplit

from pydantic import model_validator

from openclaw_rl.config.options import Section, option

LOOPBACK = "127.0.0.1"
ALL_ADDRESSES = "0.0.0.0"
#: Hosts that only this machine can reach.
LOOPBACK_HOSTS = (LOOPBACK, "localhost", "::1")
#: How keys of OpenAI and of many programs that make keys begin.
KEY_PREFIX = "sk-"
#: The name under which the requests with the admin key are kept.
ADMIN = "admin"
#: The formats of tool calls, as rendering/tool_formats.py has them.
ToolParserName = Literal[
    "auto",
    "hermes",
    "llama3",
    "mistral",
    "qwen3_coder",
    "glm",
    "harmony",
    "gemma4",
    "functiongemma",
    "phi4",
    "granite",
    "deepseek",
]


@dataclass(frozen=True)
class ApiKey:
    """A secret and the name under which its owner's data is kept. The secret is never shown."""

    name: str
    secret: str

    def __repr__(self) -> str:
        return f"{self.name}=***"

    @classmethod
    def parse_all(cls, text: str) -> tuple["ApiKey", ...]:
        """`KEY`, `NAME=KEY`, or several of them separated by commas. `=KEY` is a key without a name."""
        items = filter(None, (part.strip() for part in text.split(",")))
        return tuple(cls.parse(item, f"key-{number}") for number, item in enumerate(items, start=1))

    @classmethod
    def parse(cls, item: str, default_name: str) -> "ApiKey":
        name, _, secret = item.partition("=")
        if not name and secret:
            return cls(default_name, secret)
        # A key may contain "=" itself: in base64 it ends in it, and no owner's name begins as keys do.
        if not secret.strip("=") or name.startswith(KEY_PREFIX):
            return cls(default_name, item)
        return cls(name, secret)


class ServerOptions(Section):
    """Where the server listens, who may use it, and what it accepts."""

    heading = "Server"
    proxy_host: str | None = option(
        None, "Address to listen on.", flags=("--host",), shown="0.0.0.0 with an API key, else 127.0.0.1"
    )
    proxy_port: int = option(30000, "Port to listen on.", flags=("--port",), ge=0, le=65535)
    served_model_name: str | None = option(
        None,
        "The model's name in the API.",
        shown="qwen3-4b for the default Tinker model, smollm2-135m for the embedded one, else the model's name",
    )
    api_key: str = option(
        "",
        "Key that clients must send, or several separated by commas; NAME=KEY names the owner of a key "
        "(=KEY: a key without a name that contains = itself).",
        env="SGLANG_API_KEY",
        shown="no key",
        secret=True,
    )
    admin_key: str = option(
        "",
        "Key for operations: rolling the policy back, and the metrics of all users.",
        shown="the first API key",
        secret=True,
    )
    allow_origin: str = option(
        "",
        "Web origins whose pages may use the server from a browser, separated by commas, such as "
        "https://chat.example.org; * for all, which needs a key.",
        shown="no other origin",
    )
    dashboard: bool = option(True, "Serve the live page at /; --no-dashboard leaves it out.")
    max_request_mb: float = option(8.0, "Largest request body, in megabytes.", gt=0)
    header_seconds: float = option(20.0, "Seconds that a client has to send a request's headers.", gt=0)
    body_seconds: float = option(120.0, "Seconds that a client has to send a request's body.", gt=0)
    max_connections: int = option(
        1000, "Most connections at once; fewer if the process may open fewer files (ulimit -n).", ge=1
    )
    max_connections_per_address: int = option(250, "Most connections at once from one address.", ge=1)
    shutdown_seconds: float = option(30.0, "Seconds that running requests have to finish after Ctrl-C.", ge=0)
    tool_parser: ToolParserName = option(
        "auto", "Format in which the model writes tool calls; auto detects it from the chat template."
    )

    @model_validator(mode="after")
    def _no_contradictions(self) -> Self:
        if self.proxy_host not in (None, *LOOPBACK_HOSTS) and not self.api_keys:
            raise ValueError(
                f"--proxy-host {self.proxy_host} would open the server to the network without a key: "
                "set --api-key (or SGLANG_API_KEY), or listen on 127.0.0.1"
            )
        for flag, text in (("--api-key", self.api_key), ("--admin-key", self.admin_key)):
            if not text.isascii():
                raise ValueError(f"{flag} must be plain ASCII, because it is sent in an HTTP header")
        names = [key.name for key in self.api_keys]
        if len(set(names)) < len(names):
            raise ValueError("--api-key gives two keys the same name")
        if self.admin_key.strip() in {key.secret for key in self.user_keys}:
            raise ValueError("--admin-key must differ from the keys in --api-key; without it, the first of them is it")
        self._check_origins()
        return self

    def _check_origins(self) -> None:
        if "*" in self.allowed_origins and not self.api_keys:
            raise ValueError(
                "--allow-origin * would let any page in a browser on this machine use the server: "
                "set --api-key (or SGLANG_API_KEY), or name the pages' origins"
            )
        for origin in self.allowed_origins:
            parts = urlsplit(origin)
            if origin != "*" and (parts.scheme not in ("http", "https") or not parts.netloc or parts.path):
                raise ValueError(
                    f"--allow-origin {origin} is not an origin: it must begin with http:// or https:// and have no path"
                )

    @property
    def allowed_origins(self) -> tuple[str, ...]:
        """The origins in `allow_origin`."""
        return tuple(origin.strip().rstrip("/") for origin in self.allow_origin.split(",") if origin.strip())

    @property
    def api_keys(self) -> tuple[ApiKey, ...]:
        """All keys. The first one may operate the server."""
        admin = (ApiKey(ADMIN, self.admin_key.strip()),) if self.admin_key.strip() else ()
        return (*admin, *self.user_keys)

    @property
    def user_keys(self) -> tuple[ApiKey, ...]:
        return ApiKey.parse_all(self.api_key)

    @property
    def user_key(self) -> str:
        """The key with which our own commands chat, if one is given."""
        return next((key.secret for key in (*self.user_keys, *self.api_keys)), "")

    @property
    def operator_key(self) -> str:
        """The key with which they operate the server, if one is given."""
        return next((key.secret for key in self.api_keys), "")

    @property
    def host(self) -> str:
        """The address to listen on: beyond this machine only with a key."""
        return self.proxy_host or (ALL_ADDRESSES if self.api_keys else LOOPBACK)
