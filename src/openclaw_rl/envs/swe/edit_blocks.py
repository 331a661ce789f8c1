"""Edits in the text of an answer, in two forms. Both replace a text that occurs once in a file.

A search/replace block, fenced or not; the line above it names the file:

    calc.py
    <<<<<<< SEARCH
        return a - b
    =======
        return a + b
    >>>>>>> REPLACE

A fenced block of the language diff, with or without a header that names the file, also as git writes it; a hunk's
numbers are ignored:

    ```diff
    -    return a - b
    +    return a + b
    ```

The path may be left out where the repository has one source file.
"""

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

BLOCK = re.compile(
    r"^<{5,9} ?SEARCH[ \t]*\n(?P<old>.*?)^={5,9}[ \t]*\n(?P<new>.*?)^>{5,9} ?REPLACE", re.MULTILINE | re.DOTALL
)
DIFF = re.compile(r"^```diff[ \t]*\n(?P<lines>.*?)(?:^```|\Z)", re.MULTILINE | re.DOTALL)
#: Lines of a diff that end the hunk before them, and the line by which git begins the next file.
HUNK_MARKS = ("@@", "--- ", "+++ ")
FILE_MARK = "diff --git "
#: Text that was meant as a block.
MEANT_AS_BLOCK = re.compile(r"<<<<<|>>>>>|^=====|^```diff", re.MULTILINE)


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
    return blocks + [block for match in DIFF.finditer(text) for block in _read_diff(match["lines"])]


def _read_diff(text: str) -> Iterator[EditBlock]:
    """The hunks of a diff, each as an edit."""
    path = ""
    old: list[str] = []
    new: list[str] = []
    lines = text.removesuffix("\n").split("\n")
    # Lines before the first mark belong to no hunk, unless they are edits of a diff without a header.
    in_header = not lines[0].startswith(("+", "-", " ")) and any(line.startswith(HUNK_MARKS) for line in lines)
    for line in [*lines, "@@"]:
        if line.startswith((*HUNK_MARKS, FILE_MARK)):
            if old or new:
                yield EditBlock(path, "\n".join(old), "\n".join(new))
            old = []
            new = []
            in_header = line.startswith(FILE_MARK)
            if line.startswith("+++ "):
                # A time may stand after a tab.
                path = line[4:].partition("\t")[0].strip().removeprefix("b/")
        elif not in_header and not line.startswith("\\"):
            if not line.startswith("+"):
                old.append(line[1:])
            if not line.startswith("-"):
                new.append(line[1:])
