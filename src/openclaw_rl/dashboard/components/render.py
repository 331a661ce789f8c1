"""Renders a page from a template and values. Text from models and people is escaped, so it is never markup."""

import time
from functools import cache
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from openclaw_rl import __version__
from openclaw_rl.errors import UserError
from openclaw_rl.ledger.packing import whole_text


def render(template: str, **values: object) -> str:
    """A page from a template, which is named by its path in this package. Only `Markup` is not escaped."""
    page = _environment().get_template(template).render(version=__version__, **values)
    # A client may have sent half a surrogate pair, which UTF-8 cannot encode.
    return whole_text(page)


def write(path: Path, page: str) -> None:
    """Write a page to a file and create its folders. Raises UserError if it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}.") from None


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("openclaw_rl", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["moment"] = moment
    return environment


def moment(seconds: float) -> str:
    """A readable time, in the time zone of this machine."""
    try:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):
        return "at an unknown time"
