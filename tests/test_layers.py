"""How the code is laid out: what may import what, how large a part may be, and that one name means one thing.

The tables that start with KNOWN list today's exceptions. They must be exact, so they can only shrink: an exception that
is not listed fails, and so does a listed one that is gone.
"""

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from openclaw_rl.engines.registry import LEARNERS, SAMPLERS

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "src" / "openclaw_rl"

#: The rooms of the package from top to bottom. A room imports rooms of its own row and of the rows below.
LAYERS = (
    ("__main__",),
    ("cli",),
    ("app",),
    ("api", "judge", "learn", "envs", "evals", "dashboard", "connect"),
    ("lab",),
    ("methods", "engines", "ledger", "rendering", "sandbox"),
    ("losses", "sense"),
    ("types", "config", "errors", "plugins", "models", "terminal", "client", "http_client", "aio", "integrations"),
)
#: These rooms share a row but never import each other.
APART = {"api", "judge", "learn", "envs"}
MAX_MODULE_LINES = 500
MAX_FUNCTION_LINES = 60
#: A module shorter than this that a single module of its room imports is part of that module.
MIN_MODULE_LINES = 60
#: Names of files that mean the same in each place, where others are used at most twice. They may be short.
FILE_NAMES = {
    "__init__.py",
    "base.py",
    "environment.py",
    "episode.py",
    "errors.py",
    "factory.py",
    "options.py",
    "registry.py",
    "sampler.py",
}

#: "module → room" for each module that imports a room it may not import.
KNOWN_UPWARD_IMPORTS: set[str] = set()
KNOWN_LONG_MODULES: set[str] = set()
#: Short modules with a single importer.
KNOWN_SLIVERS: set[str] = set()
KNOWN_SHARED_FILE_NAMES: set[str] = {
    "build.py",
    "chat.py",
    "notes.py",
    "pages.py",
}
#: "module function".
KNOWN_LONG_FUNCTIONS: set[str] = set()
#: Names of classes that are defined more than once.
KNOWN_SHARED_CLASS_NAMES: set[str] = set()
#: Modules outside `methods` that treat a method by its name.
KNOWN_METHOD_COMPARISONS: set[str] = set()
#: Modules outside `engines` that treat an engine by its name.
KNOWN_ENGINE_COMPARISONS: set[str] = set()

ENGINES = {*SAMPLERS, *LEARNERS}
RANKS = {room: rank for rank, row in enumerate(LAYERS) for room in row}
#: The nodes of each module, by its path. They are walked once, for that takes longer than any check.
Tree = dict[str, list[ast.AST]]
#: The lines by which one module of tests may import another.
IMPORTS_TESTS = re.compile(r"^\s*(from|import)\b.*\b(conftest|test_)", re.MULTILINE)


def parse(folder: Path, having: re.Pattern[str] | None = None) -> Tree:
    """Every module under a folder; only those whose text has the given pattern, if one is given."""
    texts = {str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*.py"))}
    chosen = {path: text for path, text in texts.items() if having is None or having.search(text)}
    return {path: list(ast.walk(ast.parse(text))) for path, text in chosen.items()}


def imports(path: str, module: list[ast.AST]) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything that a module imports, also inside functions and under TYPE_CHECKING."""
    packages = ["openclaw_rl", *path.split("/")[:-1]]
    for node in module:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            relative = packages[: len(packages) + 1 - node.level] if node.level else []
            start = [*relative, node.module] if node.module else relative
            yield from ((node.lineno, ".".join([*start, alias.name])) for alias in node.names)


def room_of(path: str) -> str:
    return path.split("/")[0].removesuffix(".py")


def imported_rooms(tree: Tree) -> Iterator[tuple[str, int, str, str, str]]:
    """Module, line, import, importing room and imported room of every import from one room into another."""
    for path, module in tree.items():
        for line, name in imports(path, module):
            package, _, rest = name.partition(".")
            if package == "openclaw_rl" and not rest.startswith("__"):
                yield path, line, name, room_of(path), rest.split(".")[0]


def forbidden_imports(tree: Tree) -> dict[str, str]:
    """For each "module → room" that the rule forbids, a sentence that names the line and the import."""
    forbidden = {}
    for path, line, name, room, target in imported_rooms(tree):
        if room == "__init__" or room == target:
            continue
        known = room in RANKS and target in RANKS
        if not known or RANKS[target] < RANKS[room] or {room, target} <= APART:
            why = f"{room} may not import {target}" if known else "a room is missing in LAYERS"
            forbidden[f"{path} → {target}"] = f"{path}:{line} imports {name}: {why}"
    return forbidden


def rooms_in_a_row(tree: Tree) -> dict[str, set[str]]:
    """Which rooms of its own row each room imports."""
    graph = defaultdict(set)
    for _, _, _, room, target in imported_rooms(tree):
        if room != target and RANKS.get(room) == RANKS.get(target):
            graph[room].add(target)
    return graph


def imported_modules(tree: Tree) -> dict[str, set[str]]:
    """Which modules of the tree each module imports, also inside functions and under TYPE_CHECKING."""
    return {
        path: {target for _, name in imports(path, module) if (target := module_named(name, tree))} - {path}
        for path, module in tree.items()
    }


def module_named(name: str, tree: Tree) -> str | None:
    """The module that an import of `package.module` or of `package.module.something` reads."""
    parts = name.split(".")[1:] if name.startswith("openclaw_rl.") else []
    for length in (len(parts), len(parts) - 1):
        path = "/".join(parts[:length])
        for candidate in (f"{path}.py", f"{path}/__init__.py"):
            if path and candidate in tree:
                return candidate
    return None


def long_functions(tree: Tree) -> dict[str, int]:
    return {
        f"{path} {node.name}": node.end_lineno - node.lineno + 1
        for path, module in tree.items()
        for node in module
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno >= MAX_FUNCTION_LINES
    }


def slivers(tree: Tree, lengths: dict[str, int]) -> dict[str, str]:
    """For each short module that only one module imports, and that of its own room, a sentence that names both.

    A package's `__init__` that imports a module lists it, as `cli` lists its commands: that is no reason to join them.
    """
    importers = defaultdict(set)
    for path, targets in imported_modules(tree).items():
        for target in targets:
            importers[target].add(path)
    found = {}
    for path, (importer, *others) in importers.items():
        short = lengths[path] < MIN_MODULE_LINES and Path(path).name not in FILE_NAMES
        if short and not others and room_of(importer) == room_of(path) and Path(importer).name != "__init__.py":
            found[path] = f"{path} has {lengths[path]} lines and one importer: make it part of {importer}"
    return found


def shared_file_names(tree: Tree) -> dict[str, str]:
    """For each name that three files have, a sentence that names them."""
    paths = defaultdict(list)
    for path in tree:
        paths[Path(path).name].append(path)
    return {
        name: f"{name} is the name of {', '.join(same)}"
        for name, same in paths.items()
        if len(same) > 2 and name not in FILE_NAMES
    }


def shared_class_names(tree: Tree) -> dict[str, list[str]]:
    """The modules that define a class of the same name, for each name that has several."""
    modules = defaultdict(list)
    for path, module in tree.items():
        for node in module:
            if isinstance(node, ast.ClassDef):
                modules[node.name].append(path)
    return {name: paths for name, paths in modules.items() if len(paths) > 1}


def is_method_name(node: ast.expr) -> bool:
    """Whether an expression holds the name of a method: `method` or `….method`, but not a request's HTTP method."""
    if isinstance(node, ast.Attribute):
        return node.attr == "method" and not (isinstance(node.value, ast.Name) and node.value.id == "request")
    return isinstance(node, ast.Name) and node.id == "method"


def method_comparisons(tree: Tree) -> dict[str, str]:
    """For each module outside `methods` that compares a method's name, or looks it up in a literal, one place."""
    places = {}
    for path, module in tree.items():
        for node in module if room_of(path) != "methods" else ():
            match node:
                case ast.Compare() if room_of(path) != "api":  # which compares HTTP methods
                    compared = any(map(is_method_name, [node.left, *node.comparators]))
                case ast.Match():
                    compared = is_method_name(node.subject)
                case ast.Subscript(value=ast.Dict()):
                    compared = is_method_name(node.slice)
                case _:
                    compared = False
            if compared:
                places[path] = f"{path}:{node.lineno} treats a method by its name: {ast.unparse(node)}"
    return places


def is_engine_name(node: ast.expr, constants: set[str]) -> bool:
    """Whether an expression is the name of an engine, a collection of such names, or a constant that is one."""
    match node:
        case ast.Constant():
            return node.value in ENGINES
        case ast.Tuple() | ast.List() | ast.Set():
            return any(is_engine_name(item, constants) for item in node.elts)
        case ast.Dict():
            return any(key is not None and is_engine_name(key, constants) for key in node.keys)
        case ast.Starred():
            return is_engine_name(node.value, constants)
        case ast.Name():
            return node.id in constants
        case ast.Attribute(attr="name", value=ast.Attribute(attr=part) | ast.Name(id=part)):
            return part in ("sampler", "learner")
        case _:
            return False


def constants_with_engines(module: list[ast.AST]) -> set[str]:
    """The module's constants that hold names of engines."""
    names: set[str] = set()
    assert isinstance(module[0], ast.Module)
    for node in module[0].body:
        if isinstance(node, ast.Assign) and is_engine_name(node.value, names):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


def engine_comparisons(tree: Tree) -> dict[str, str]:
    """For each module outside `engines` that compares an engine's name, or looks it up in a literal, one place."""
    places = {}
    for path, module in tree.items():
        constants = constants_with_engines(module)
        for node in module if room_of(path) != "engines" else ():
            match node:
                case ast.Compare():
                    operands = [node.left, *node.comparators]
                case ast.Match():
                    patterns = [part for case in node.cases for part in ast.walk(case.pattern)]
                    operands = [part.value for part in patterns if isinstance(part, ast.MatchValue)]
                case ast.Subscript() if isinstance(node.ctx, ast.Load):
                    operands = [node.value] if isinstance(node.value, ast.Dict | ast.Name) else []
                case _:
                    operands = []
            if any(is_engine_name(operand, constants) for operand in operands):
                places[path] = f"{path}:{node.lineno} treats an engine by its name: {ast.unparse(node)}"
    return places


def imported_tests(tree: Tree) -> list[str]:
    """Imports of a test module or a conftest: helpers that several test modules need belong in tests/support."""
    return [
        f"{path}:{line} imports {name}"
        for path, module in tree.items()
        for line, name in imports(path, module)
        if any(part == "conftest" or part.startswith("test_") for part in name.split(".")[:-1] or [name])
    ]


def check_exactly(found: dict[str, str], known: set[str], table: str) -> None:
    """Fail for what is found but not listed, and for what is listed but gone."""
    new = [sentence for key, sentence in found.items() if key not in known]
    assert not new, "\n".join(new)
    assert not known - found.keys(), f"gone, remove from {table}: {sorted(known - found.keys())}"


@pytest.fixture(scope="module")
def package() -> Tree:
    return parse(PACKAGE)


def test_imports_go_down_only(package: Tree) -> None:
    check_exactly(forbidden_imports(package), KNOWN_UPWARD_IMPORTS, "KNOWN_UPWARD_IMPORTS")


def test_rooms_of_a_row_do_not_import_each_other_in_a_circle(package: Tree) -> None:
    TopologicalSorter(rooms_in_a_row(package)).prepare()


def test_modules_do_not_import_each_other_in_a_circle(package: Tree) -> None:
    """Neither for types only nor inside functions: what both need belongs in a module below them."""
    TopologicalSorter(imported_modules(package)).prepare()


def line_counts(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): len(path.read_text().splitlines()) for path in folder.rglob("*.py")}


def test_modules_are_short() -> None:
    lengths = line_counts(PACKAGE)
    found = {path: f"{path} has {lines} lines" for path, lines in lengths.items() if lines > MAX_MODULE_LINES}
    check_exactly(found, KNOWN_LONG_MODULES, "KNOWN_LONG_MODULES")


def test_a_short_module_with_one_importer_is_part_of_it(package: Tree) -> None:
    check_exactly(slivers(package, line_counts(PACKAGE)), KNOWN_SLIVERS, "KNOWN_SLIVERS")


def test_one_file_name_means_one_thing(package: Tree) -> None:
    check_exactly(shared_file_names(package), KNOWN_SHARED_FILE_NAMES, "KNOWN_SHARED_FILE_NAMES")


def test_functions_are_short(package: Tree) -> None:
    found = {name: f"{name} has {lines} lines" for name, lines in long_functions(package).items()}
    check_exactly(found, KNOWN_LONG_FUNCTIONS, "KNOWN_LONG_FUNCTIONS")


def test_one_class_name_means_one_thing(package: Tree) -> None:
    found = {name: f"class {name} is in {', '.join(paths)}" for name, paths in shared_class_names(package).items()}
    check_exactly(found, KNOWN_SHARED_CLASS_NAMES, "KNOWN_SHARED_CLASS_NAMES")


def test_only_methods_treats_a_method_by_its_name(package: Tree) -> None:
    check_exactly(method_comparisons(package), KNOWN_METHOD_COMPARISONS, "KNOWN_METHOD_COMPARISONS")


def test_only_engines_treats_an_engine_by_its_name(package: Tree) -> None:
    check_exactly(engine_comparisons(package), KNOWN_ENGINE_COMPARISONS, "KNOWN_ENGINE_COMPARISONS")


def test_no_test_module_imports_another() -> None:
    assert not imported_tests(parse(TESTS, IMPORTS_TESTS))


# The checks themselves, on small trees.


def written(folder: Path, **modules: str) -> Tree:
    """A tree of modules; two underscores in a name stand for a slash."""
    for name, text in modules.items():
        path = folder / (name.replace("__", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return parse(folder)


def test_test_modules_have_different_names() -> None:
    """pytest cannot collect two modules of one name in one run."""
    names = Counter(path.name for path in TESTS.rglob("test_*.py"))
    assert [name for name, times in names.items() if times > 1] == []


def test_an_import_that_goes_up_or_across_is_caught(tmp_path: Path) -> None:
    tree = written(
        tmp_path,
        engines__base="import os\nfrom openclaw_rl.app.config import Config\nfrom openclaw_rl.types import Turn",
        losses__policy="def f():\n    from openclaw_rl import ledger",
        judge__loop="if TYPE_CHECKING:\n    import openclaw_rl.learn.loop",
        cli__chat="from openclaw_rl.app.config import Config\nfrom openclaw_rl import __version__",
        evals__demo="from openclaw_rl.judge.rules import Reading",
        sandbox__a__b="from .system import prctl\nfrom ...api import wire\nfrom ... import types",
        attic__old="from openclaw_rl.types import Turn",
    )
    assert forbidden_imports(tree) == {
        "attic/old.py → types": "attic/old.py:1 imports openclaw_rl.types.Turn: a room is missing in LAYERS",
        "engines/base.py → app": "engines/base.py:2 imports openclaw_rl.app.config.Config: engines may not import app",
        "judge/loop.py → learn": "judge/loop.py:2 imports openclaw_rl.learn.loop: judge may not import learn",
        "losses/policy.py → ledger": "losses/policy.py:2 imports openclaw_rl.ledger: losses may not import ledger",
        "sandbox/a/b.py → api": "sandbox/a/b.py:2 imports openclaw_rl.api.wire: sandbox may not import api",
    }


def test_a_circle_of_rooms_is_caught(tmp_path: Path) -> None:
    tree = written(
        tmp_path,
        evals__demo="from openclaw_rl.dashboard import charts",
        dashboard__run="from openclaw_rl.learn import gate",
        learn__gate="from openclaw_rl.evals import scores",
    )
    with pytest.raises(ValueError, match="cycle"):
        TopologicalSorter(rooms_in_a_row(tree)).prepare()


@pytest.mark.parametrize(
    "upward",
    [
        "from openclaw_rl.engines.b import B",
        "import openclaw_rl.engines.b",
        "from openclaw_rl.engines import b",
        "from .b import B",
        "from openclaw_rl.engines import Engine",
        "if TYPE_CHECKING:\n    from openclaw_rl.engines.b import B",
        "def f():\n    from openclaw_rl.engines.b import B",
    ],
)
def test_a_circle_of_modules_is_caught(tmp_path: Path, upward: str) -> None:
    modules = {
        "engines__b": "from openclaw_rl.engines.c import C",
        "engines__c": "import os\nfrom openclaw_rl.engines.a import A",
    }
    written(tmp_path, engines__a="import numpy", **modules)
    (tmp_path / "engines" / "__init__.py").write_text("from openclaw_rl.engines.b import Engine")
    TopologicalSorter(imported_modules(parse(tmp_path))).prepare()
    with pytest.raises(ValueError, match="cycle"):
        TopologicalSorter(imported_modules(written(tmp_path, engines__a=upward))).prepare()


def test_a_long_function_and_a_name_used_twice_are_caught(tmp_path: Path) -> None:
    body = "\n    x = 1" * MAX_FUNCTION_LINES
    tree = written(tmp_path, a=f"class Same:\n  def f(self):{body}", b="class Same: ...\ndef g(): ...")
    assert long_functions(tree) == {"a.py f": MAX_FUNCTION_LINES + 1}
    assert shared_class_names(tree) == {"Same": ["a.py", "b.py"]}


def test_a_sliver_is_caught(tmp_path: Path) -> None:
    long = "x = 1\n" * MIN_MODULE_LINES
    written(
        tmp_path,
        judge__loop="from openclaw_rl.judge import short, long, shared, options\nfrom openclaw_rl.ledger import below",
        judge__other="from openclaw_rl.judge import shared",
        judge__short="x = 1",
        judge__shared="x = 1",
        judge__options="x = 1",
        judge__long=long,
        ledger__below="x = 1",
        cli__chat="x = 1",
    )
    (tmp_path / "cli" / "__init__.py").write_text("from openclaw_rl.cli import chat")
    found = slivers(parse(tmp_path), line_counts(tmp_path))
    assert found == {"judge/short.py": "judge/short.py has 1 lines and one importer: make it part of judge/loop.py"}


def test_a_file_name_used_three_times_is_caught(tmp_path: Path) -> None:
    names = {f"{room}__{name}": "x = 1" for room in ("api", "envs", "judge") for name in ("notes", "options")}
    tree = written(tmp_path, **names, api__text="x = 1", judge__text="x = 1")
    assert shared_file_names(tree) == {
        "notes.py": "notes.py is the name of api/notes.py, envs/notes.py, judge/notes.py"
    }


def test_a_comparison_of_a_method_is_caught(tmp_path: Path) -> None:
    tree = written(
        tmp_path,
        judge__a="x = config.method == 'rl'",
        judge__b="x = 1 if method in BOTH else 2",
        judge__c="match self.method:\n    case 'rl': ...",
        judge__d="x = {'rl': 1}[config.method]",
        judge__e="x = method.name",
        api__f="x = method not in READING_METHODS",
        methods__g="x = config.method == 'rl'",
    )
    assert sorted(method_comparisons(tree)) == ["judge/a.py", "judge/b.py", "judge/c.py", "judge/d.py"]


def test_a_comparison_of_an_engine_is_caught(tmp_path: Path) -> None:
    tree = written(
        tmp_path,
        app__a="x = config.sampler.name == other",
        app__b="SERVERS = ('vllm', 'sglang')\nx = name not in (*SERVERS, 'other')",
        app__c="match name:\n    case 'tinker': ...",
        app__d="x = {'local': 1}[name]",
        app__e="ARGUMENTS = {'vllm': 1}\nx = ARGUMENTS[name]",
        app__f="x = learner.name\ny = config.engine.sampler == 'auto'\nz = names[0]",
        engines__g="x = name == 'local'",
    )
    assert sorted(engine_comparisons(tree)) == ["app/a.py", "app/b.py", "app/c.py", "app/d.py", "app/e.py"]


def test_a_listed_exception_that_is_gone_is_caught() -> None:
    check_exactly({"a": "a is long"}, {"a"}, "KNOWN")
    with pytest.raises(AssertionError, match="a is long"):
        check_exactly({"a": "a is long"}, set(), "KNOWN")
    with pytest.raises(AssertionError, match="gone, remove from KNOWN"):
        check_exactly({}, {"a"}, "KNOWN")


def test_an_import_of_a_test_module_is_caught(tmp_path: Path) -> None:
    tree = written(
        tmp_path,
        helper="def f():\n    from slow.test_b import g",
        slow__test_b="import os\nimport test_a\nfrom conftest import tiny_model",
        test_a="def test_a() -> None: ...",
    )
    assert parse(tmp_path, IMPORTS_TESTS).keys() == {"helper.py", "slow/test_b.py"}
    assert imported_tests(tree) == [
        "helper.py:2 imports slow.test_b.g",
        "slow/test_b.py:2 imports test_a",
        "slow/test_b.py:3 imports conftest.tiny_model",
    ]
