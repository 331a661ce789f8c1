"""The docs say what the code does."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

from openclaw_rl.app.config import load as load_config
from openclaw_rl.engines.memory import Trained, known_models, learner_memory, read_size, sampler_memory
from openclaw_rl.engines.options import LINEAR_MODULES
from openclaw_rl.evals.personas.persona import load
from openclaw_rl.evals.personas.rules import CHECKS
from openclaw_rl.models import EMBEDDED

ROOT = Path(__file__).parent.parent


def test_the_docs_list_the_options_as_they_are() -> None:
    sys.path.insert(0, str(ROOT / "docs"))
    from generate import PAGES, with_options

    for page in PAGES:
        assert page.read_text() == with_options(page), "run `make docs`"


def anchors(page: Path) -> set[str]:
    """The names by which links reach the headings of a page, as GitHub makes them."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_between_the_docs_lead_somewhere() -> None:
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]:
        for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", page.read_text()):
            linked = page.parent / target if target else page
            assert linked.exists(), f"{page.name} links to {target}"
            assert not anchor or anchor in anchors(linked), f"{page.name} links to {target}#{anchor}"


def test_every_module_says_what_it_is_for() -> None:
    for module in (ROOT / "src").rglob("*.py"):
        assert module.read_text().startswith('"""'), module


def test_make_help_lists_every_target() -> None:
    shown = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert all(f"make {target}" in shown for target in ("run", "test", "lint", "bench", "docs", "install"))


def test_the_persona_of_the_tutorial_is_one(tmp_path: Path) -> None:
    (written,) = re.findall(r"```toml\n(.*?)```", (ROOT / "docs/tutorial.md").read_text(), re.DOTALL)
    (tmp_path / "pirate.toml").write_text(written)
    persona = load(str(tmp_path / "pirate.toml"))
    assert not persona.failed("Ahoy! The sky is blue because air scatters blue light.")
    assert persona.failed("The sky is blue because air scatters blue light.")


def test_the_tutorial_has_every_check_of_a_persona_with_its_parameters() -> None:
    rows = [row.split("|") for row in (ROOT / "docs/tutorial.md").read_text().splitlines() if row.startswith("| `")]
    told = {name: set(re.findall(r"`(\w+)`", row[2])) for row in rows for name in re.findall(r"`(\w+)`", row[1])}
    assert told == {name: set(list(inspect.signature(check).parameters)[2:]) for name, check in CHECKS.items()}


def test_the_service_of_the_docs_reads_its_variables() -> None:
    page = (ROOT / "docs/deploy.md").read_text()
    (written,) = re.findall(r"with mode 0600:\n\n```sh\n(.*?)```", page, re.DOTALL)
    variables = dict(line.split("=", 1) for line in written.splitlines())
    loaded = load_config({}, variables)
    origins = set(loaded.origins.values())
    assert all(f"environment {name}" in origins for name in variables if name != "HOME")
    assert [key.name for key in loaded.config.server.user_keys] == ["alice", "bob"]
    assert loaded.config.server.host == "127.0.0.1"


def test_the_memory_of_recommended_models_is_what_the_program_computes() -> None:
    """As --dry-run does: an adapter, one copy of the weights, and the keys and values of one context."""
    table = (ROOT / "docs/engines.md").read_text().partition("## Which model\n")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("| ")]
    stated = {row[0].split(" (")[0]: row[2] for row in rows[1:] if row[2]}
    computed = {}
    small = EMBEDDED.rpartition("/")[2]
    models = {name.replace(EMBEDDED, small): sizes for name, sizes in known_models().items()}
    for name, sizes in {**models, "Qwen/Qwen3-0.6B on the CPU": models["Qwen/Qwen3-0.6B"]}.items():
        size = read_size(sizes)
        assert size is not None
        on_cpu = name == small or name.endswith("CPU")
        trained = Trained(rank=32, modules=LINEAR_MODULES, width=4 if on_cpu else 2, policies=4)
        sampler = sampler_memory(size, trained, gpus=1, context=8192)
        learner = learner_memory(size, trained, ranks=1, sharded=False, has_weights=False)
        computed[name] = f"{(sampler.total + learner.total) / 2**30:.1f}"
    assert stated == computed
