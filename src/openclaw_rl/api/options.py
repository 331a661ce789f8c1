"""The options of the server, and its keys."""

from dataclasses import dataclass
from typing import Literal, Self

from pydantic import model_validator

from openclaw_rl.config.options import Section, option

LOOPBACK, ALL_ADDRESSES = "127.0.0.1", "0.0.0.0"
#: Hosts that only this machine can reach.
LOOPBACK_HOSTS = (LOOPBACK, "localhost", "::1")


@dataclass(frozen=True)
class ApiKey:
    """A secret and the name under which its owner's data is kept. The secret is never shown."""

    name: str
    secret: str

    def __repr__(self) -> str:
        return f"{self.name}=***"

    @classmethod
    def parse_all(cls, text: str) -> tuple["ApiKey", ...]:
        """`KEY`, `NAME=KEY`, or several of them separated by commas."""
        keys = []
        for number, item in enumerate(filter(None, (part.strip() for part in text.split(","))), start=1):
            name, _, secret = item.partition("=")
            # A key in base64 may end in "=" itself.
            named = name and secret.strip("=")
            keys.append(cls(name, secret) if named else cls(f"key-{number}", item))
        return tuple(keys)


class ServerOptions(Section):
    """Where the server listens, who may use it, and what it accepts."""

    proxy_host: str | None = option(
        None,
        "Address to listen on.",
        group="Server",
        env="PROXY_HOST",
        shown="0.0.0.0 with an API key, else 127.0.0.1",
    )
    proxy_port: int = option(30000, "Port to listen on.", group="Server", env="PROXY_PORT", ge=0, le=65535)
    served_model_name: str | None = option(
        None,
        "The model's name in the API.",
        group="Server",
        env="SERVED_MODEL_NAME",
        shown="qwen3-4b for the default Tinker model, smollm2-135m for the embedded one, else the model's name",
    )
    api_key: str = option(
        "",
        "Key that clients must send, or several separated by commas; NAME=KEY names the owner of a key.",
        group="Server",
        env="SGLANG_API_KEY",
        shown="no key",
        secret=True,
    )
    max_request_mb: float = option(
        32.0, "Largest request body, in megabytes.", group="Server", env="MAX_REQUEST_MB", gt=0
    )
    shutdown_seconds: float = option(
        30.0,
        "Seconds that running requests have to finish after Ctrl-C.",
        group="Server",
        env="SHUTDOWN_SECONDS",
        ge=0,
    )
    tool_parser: Literal["auto", "hermes", "llama3"] = option(
        "auto",
        "Format in which the model writes tool calls; auto detects it from the chat template.",
        group="Server",
        env="TOOL_PARSER",
    )

    @model_validator(mode="after")
    def _no_contradictions(self) -> Self:
        if self.proxy_host not in (None, *LOOPBACK_HOSTS) and not self.api_keys:
            raise ValueError(
                f"--proxy-host {self.proxy_host} would open the server to the network without a key: "
                "set --api-key (or SGLANG_API_KEY), or listen on 127.0.0.1"
            )
        if not self.api_key.isascii():
            raise ValueError("--api-key must be plain ASCII, because it is sent in an HTTP header")
        names = [key.name for key in self.api_keys]
        if len(set(names)) < len(names):
            raise ValueError("--api-key gives two keys the same name")
        return self

    @property
    def api_keys(self) -> tuple[ApiKey, ...]:
        return ApiKey.parse_all(self.api_key)

    @property
    def host(self) -> str:
        """The address to listen on: beyond this machine only with a key."""
        return self.proxy_host or (ALL_ADDRESSES if self.api_keys else LOOPBACK)
