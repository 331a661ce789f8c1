"""Plants bugs in Python code: each bug is one small change, made on the syntax tree and written back into the text."""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from random import Random

from openclaw_rl.envs.swe.packages import parse

#: Kind of bug → what is wrong.
KINDS = {
    "operator": "an operator is another one",
    "bound": "a comparison is off by one, or turned round",
    "constant": "a number is off by one",
    "name": "a name is another one",
    "default": "the default of an argument is another one",
    "missing": "a case is missing",
}
#: Each operator → its text, and the text that takes its place.
OPERATORS: dict[type, tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "+"),
    ast.FloorDiv: ("//", "*"),
    ast.Div: ("/", "*"),
    ast.Mod: ("%", "//"),
    ast.And: ("and", "or"),
    ast.Or: ("or", "and"),
}
COMPARISONS: dict[type, tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
_PAIRS = "min max, any all, upper lower, startswith endswith, lstrip rstrip, append extend, keys values, sum len"
NAMES = {a: b for pair in _PAIRS.split(", ") for a, b in (pair.split(), pair.split()[::-1])}

#: Names that the arguments of a short function may get.
ARGUMENT_NAMES = (
    *("a", "b", "c", "k", "m", "n", "p", "q", "r", "s", "t", "u", "v", "w", "x", "y", "z"),
    *("first", "second", "third", "left", "right", "given", "amount", "thing", "data", "part", "rest"),
)


@dataclass(frozen=True, slots=True)
class Bug:
    """A text with a bug, and the edit that mends it."""

    kind: str
    function: str
    """The function with the bug; for a method, its class and name."""
    text: str
    old: str
    """The lines with the bug, which occur once in the text."""
    new: str
    """The same lines without it."""


#: A change: kind of bug, where it begins and ends in the text's bytes, and what takes its place.
Change = tuple[str, int, int, str]


def bugs_in(text: str) -> list[Bug]:
    """Every bug that can be planted in the functions of a module."""
    changes = _Changes(text)
    data = text.encode()
    bugs = []
    for name, function in functions_of(parse(text)):
        for kind, start, end, replacement in changes.of_function(function):
            changed = (data[:start] + replacement.encode() + data[end:]).decode()
            if bug := make_bug(kind, name, text, changed):
                bugs.append(bug)
    return bugs


def functions_of(module: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    """The functions and methods of a module, with their names."""
    for node in module.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from ((f"{node.name}.{part.name}", part) for part in node.body if isinstance(part, ast.FunctionDef))


def renamed(bug: Bug, right: str, random: Random) -> Bug:
    """The same bug in a function whose arguments have other names. `right` is the text without the bug."""
    function = next(function for name, function in functions_of(parse(right)) if name == bug.function)
    arguments = [argument.arg for argument in function.args.args]
    used = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
    names = random.sample([name for name in ARGUMENT_NAMES if name not in used], len(arguments))
    pairs = dict(zip(arguments, names, strict=True))
    other = make_bug(bug.kind, bug.function, _with_names(right, pairs), _with_names(bug.text, pairs))
    assert other is not None  # other names make no other code
    return other


def _with_names(text: str, pairs: Mapping[str, str]) -> str:
    """The text with other names in the place of some."""
    changes = _Changes(text)
    data = text.encode()
    places = []
    for node in ast.walk(parse(text)):
        if not isinstance(node, ast.Name | ast.arg):
            continue
        name = node.id if isinstance(node, ast.Name) else node.arg
        if name in pairs:
            start = changes.start(node)
            places.append((start, start + len(name.encode()), pairs[name]))
    for start, end, name in sorted(places, reverse=True):
        data = data[:start] + name.encode() + data[end:]
    return data.decode()


class _Changes:
    """Finds what can be changed in a text."""

    def __init__(self, text: str) -> None:
        self._data = text.encode()
        self._line_starts = [0, *accumulate(len(line) for line in self._data.splitlines(keepends=True))]

    def of_function(self, function: ast.FunctionDef) -> Iterator[Change]:
        for default in function.args.defaults:
            if (other := _other_constant(default)) is not None:
                yield "default", self.start(default), self._end(default), other
        names = [argument.arg for argument in function.args.args if argument.arg != "self"]
        for statement in function.body:
            for node in ast.walk(statement):
                yield from self._of_node(node, names)
        for block in [function, *(node for node in ast.walk(function) if isinstance(node, ast.For | ast.While))]:
            for case in block.body[:-1]:
                if isinstance(case, ast.If) and not case.orelse:
                    yield "missing", self._line_starts[case.lineno - 1], self._line_starts[case.end_lineno or 0], ""

    def _of_node(self, node: ast.AST, arguments: list[str]) -> Iterator[Change]:
        match node:
            case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
                yield self._between("operator", left, right, *OPERATORS[type(op)])
            case ast.BoolOp(op=op, values=values):
                yield from (self._between("operator", a, b, *OPERATORS[type(op)]) for a, b in pairwise(values))
            case ast.Compare(left=left, ops=ops, comparators=comparators):
                for comparison, (a, b) in zip(ops, pairwise([left, *comparators]), strict=True):
                    if type(comparison) in COMPARISONS:
                        yield self._between("bound", a, b, *COMPARISONS[type(comparison)])
            case ast.Constant(value=int() as value) if not isinstance(value, bool):
                numbers = [value + 1, value - 1] if value > 0 else [value + 1]
                yield from (("constant", self.start(node), self._end(node), str(number)) for number in numbers)
            case ast.Attribute(attr=name) if name in NAMES:
                yield "name", self._end(node) - len(name), self._end(node), NAMES[name]
            case ast.Name(id=name, ctx=ast.Load()) if name in NAMES:
                yield "name", self.start(node), self._end(node), NAMES[name]
            case ast.Name(id=name, ctx=ast.Load()) if name in arguments:
                others = [other for other in arguments if other != name]
                yield from (("name", self.start(node), self._end(node), other) for other in others)

    def _between(self, kind: str, left: ast.expr, right: ast.expr, sign: str, other: str) -> Change:
        """Replace the operator between two operands; brackets may stand there too."""
        start = self._end(left)
        end = self.start(right)
        return kind, start, end, self._data[start:end].decode().replace(sign, other)

    def start(self, node: ast.arg | ast.expr) -> int:
        return self._line_starts[node.lineno - 1] + node.col_offset

    def _end(self, node: ast.expr) -> int:
        return self._line_starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)


def _other_constant(node: ast.expr) -> str | None:
    match node:
        case ast.Constant(value=bool() as value):
            return str(not value)
        case ast.Constant(value=int() as value):
            return str(value + 1)
        case ast.Constant(value=str() as text):
            return '""' if text else '" "'
    return None


def make_bug(kind: str, function: str, right: str, wrong: str) -> Bug | None:
    """The bug with the edit that mends it; None if the text does not change, or is not Python any more."""
    try:
        if ast.dump(parse(right)) == ast.dump(parse(wrong)):
            return None
    except SyntaxError:
        return None
    a = wrong.splitlines()
    b = right.splitlines()
    start = next(index for index, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    end = 0
    while end < min(len(a), len(b)) - start and a[-1 - end] == b[-1 - end]:
        end += 1
    # An empty piece cannot be found, and one that occurs twice is not clear: take the line below, or else above.
    while wrong.count(old := "\n".join(a[start : len(a) - end])) != 1 or not old.strip():
        if end and not old.strip():
            end -= 1
        elif start:
            start -= 1
        else:
            end -= 1
    return Bug(kind, function, wrong, old, "\n".join(b[start : len(b) - end]))
