"""Edits in the text of an answer: search/replace blocks, fenced or not.

    calc.py
    <<<<<<< SEARCH
        return a - b
    =======
        return a + b
    >>>>>>> REPLACE

The line with the path may be left out where the repository has one source file.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass

BLOCK = re.compile(
    r"^<{5,9} ?SEARCH[ \t]*\n(?P<old>.*?)^={5,9}[ \t]*\n(?P<new>.*?)^>{5,9} ?REPLACE", re.MULTILINE | re.DOTALL
)
#: Text that was meant as a block.
MEANT_AS_BLOCK = re.compile(r"<<<<<|>>>>>|^=====", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class EditBlock:
    """One edit: what to find, and what takes its place."""

    path: str
    """The file; empty if the answer does not name it."""
    old: str
    new: str

    def __str__(self) -> str:
        lines = ["<<<<<<< SEARCH", *filter(None, [self.old]), "=======", *filter(None, [self.new]), ">>>>>>> REPLACE"]
        return "\n".join([self.path, *lines] if self.path else lines)


def read_blocks(text: str, paths: Collection[str]) -> list[EditBlock]:
    """The edits in an answer. A path is taken if it is the line above the block, or above the block's fence."""
    blocks = []
    for match in BLOCK.finditer(text):
        above = [line.strip(" \t`*:") for line in text[: match.start()].splitlines()[-2:]]
        path = next((line for line in reversed(above) if line in paths), "")
        blocks.append(EditBlock(path, match["old"].removesuffix("\n"), match["new"].removesuffix("\n")))
    return blocks
