"""Writes the parts of the README that follow from the code: `make docs`."""

from pathlib import Path

from openclaw_rl.app.config import FIELDS
from openclaw_rl.config.options import options_table

README = Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- options: written by `make docs` -->", "<!-- end of options -->"


def with_options(readme: str) -> str:
    """The README with today's table of options."""
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{options_table(FIELDS)}\n\n{END}{after}"


if __name__ == "__main__":
    README.write_text(with_options(README.read_text()))
