"""Renders a page from a template and values. Text from models and people is escaped, so it is never markup."""

import hashlib
import time
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from openclaw_rl import __version__
from openclaw_rl.lab.charts import STYLE
from openclaw_rl.ledger.packing import whole_text

FOLDER = Path(__file__).parent
#: The files beside this one that a browser may fetch, and what they are.
ASSETS = {
    "style.css": "text/css",
    "live.css": "text/css",
    "live.js": "text/javascript",
    "compare.js": "text/javascript",
    "icon.svg": "image/svg+xml",
}


def render(template: str, **values: object) -> str:
    """A page from a template, which is named by its path in this package. Only `Markup` is not escaped."""
    page = _environment().get_template(template).render(version=__version__, **values)
    # A client may have sent half a surrogate pair, which UTF-8 cannot encode.
    return whole_text(page)


@cache
def asset(name: str) -> bytes:
    """The content of one of the `ASSETS`. Charts have their part of the style sheet, with the colours of all pages."""
    content = (FOLDER / name).read_bytes()
    return STYLE.read_bytes() + content if name == "style.css" else content


@cache
def asset_url(name: str) -> str:
    """Its address, which changes with its content: browsers may keep it for good."""
    return f"/dashboard/assets/{hashlib.sha256(asset(name)).hexdigest()[:12]}/{name}"


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("openclaw_rl", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"moment": moment, "clock": clock, "day": day, "iso": iso}
    environment.globals |= {"asset_url": asset_url, "stylesheet": Markup(asset("style.css").decode())}
    return environment


def moment(seconds: float) -> str:
    """A readable time, in the time zone of this machine."""
    return _local(seconds, "%Y-%m-%d %H:%M") or "at an unknown time"


def clock(seconds: float) -> str:
    """The time of day if it is today, else the day."""
    today = time.strftime("%Y-%m-%d")
    return _local(seconds, "%H:%M" if _local(seconds, "%Y-%m-%d") == today else "%Y-%m-%d") or "?"


def day(seconds: float) -> str:
    return _local(seconds, "%d %B %Y").lstrip("0") or "?"


def iso(seconds: float) -> str:
    """A time for programs; empty if there is no such time."""
    try:
        return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
    except (OverflowError, ValueError, OSError):
        return ""


def _local(seconds: float, form: str) -> str:
    try:
        return time.strftime(form, time.localtime(seconds))
    except (OverflowError, ValueError, OSError):
        return ""
