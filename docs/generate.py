"""Writes the parts of the docs that follow from the code: `make docs`."""

from pathlib import Path

from openclaw_rl.app.config import FIELDS
from openclaw_rl.config.options import options_table
from openclaw_rl.envs.options import FIELDS as DRIVER_FIELDS

ROOT = Path(__file__).parent.parent
#: The pages that list options, and which options each lists.
PAGES = {ROOT / "README.md": FIELDS, ROOT / "docs" / "environments.md": DRIVER_FIELDS}
BEGIN, END = "<!-- options: written by `make docs` -->", "<!-- end of options -->"


def with_options(page: Path) -> str:
    """The text of a page with today's table of options."""
    before, _, rest = page.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{options_table(PAGES[page])}\n\n{END}{after}"


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(with_options(page))
