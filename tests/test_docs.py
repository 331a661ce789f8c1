"""The docs say what the code does."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_readme_lists_the_options_as_they_are() -> None:
    sys.path.insert(0, str(ROOT / "docs"))
    from generate import README, with_options

    assert README.read_text() == with_options(README.read_text()), "run `make docs`"


def test_links_between_the_docs_lead_somewhere() -> None:
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_module_says_what_it_is_for() -> None:
    for module in (ROOT / "src").rglob("*.py"):
        assert module.read_text().startswith('"""'), module


def test_make_help_lists_every_target() -> None:
    shown = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert all(f"make {target}" in shown for target in ("run", "test", "lint", "bench", "docs", "install"))
