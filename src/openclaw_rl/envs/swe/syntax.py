"""Python's parser, used by one thread at a time.

CPython 3.11 keeps one count of a tree's depth for the whole interpreter. If threads switch while a tree is made, as in
garbage collection, another thread changes the count, and `ast.parse` raises SystemError.
"""

import ast
import threading
from typing import Any

_parsing = threading.Lock()


def parse(source: str) -> ast.Module:
    """As `ast.parse`."""
    with _parsing:
        return ast.parse(source)


def literal(source: str) -> Any:
    """As `ast.literal_eval`."""
    with _parsing:
        return ast.literal_eval(source)
