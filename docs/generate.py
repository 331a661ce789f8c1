"""Writes the parts of the docs that follow from the code: `make docs`."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from openclaw_rl.app.config import FIELDS
from openclaw_rl.cli.launchers.variables import launchers_table
from openclaw_rl.config.options import options_list
from openclaw_rl.envs.options import FIELDS as DRIVER_FIELDS

ROOT = Path(__file__).parent.parent
#: The pages with a table that is written here, and what writes it.
PAGES: dict[Path, Callable[[], str]] = {
    ROOT / "docs" / "options.md": partial(options_list, FIELDS),
    ROOT / "docs" / "environments.md": partial(options_list, DRIVER_FIELDS),
    ROOT / "docs" / "launchers.md": launchers_table,
}
BEGIN, END = "<!-- options: written by `make docs` -->", "<!-- end of options -->"


def with_options(page: Path) -> str:
    """The text of a page with today's table."""
    before, _, rest = page.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{PAGES[page]()}\n\n{END}{after}"


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(with_options(page))
