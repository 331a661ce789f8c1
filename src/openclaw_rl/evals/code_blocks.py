"""Finds the Python code in an answer: in fenced blocks or without them, cut off or complete, with prose around it."""

import ast
import re
import warnings

#: A fenced block: its language, and its text up to the closing fence or the end of the answer.
FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})[ \t]*([\w+.-]*)[^\n]*\n(.*?)(?:\1|\Z)", re.DOTALL | re.MULTILINE)
#: A line with which code may begin in an answer without fences.
CODE_LINE = re.compile(r"^(?:def |async def |class |import |from \w+ import |@)", re.MULTILINE)
PYTHON_NAMES = ("python", "py", "python3")
#: How many such lines are tried as the beginning of the code.
MAX_BEGINNINGS = 8
#: The rest of a longer answer is ignored: no function here is longer, and Python's parser fails on huge expressions.
MAX_ANSWER_CHARACTERS = 20_000


def extract_code(answer: str) -> str:
    """The Python code in an answer; empty if there is none.

    - Fenced blocks count if there are any; otherwise the text from a line that looks like the beginning of code.
    - Blocks that form one valid program together are joined; otherwise the first valid block counts.
    - Text after the code, or a last line that was cut off, is left out.
    """
    answer = answer[:MAX_ANSWER_CHARACTERS]
    fenced = FENCE.findall(answer)
    blocks = [_dedented(text) for _, language, text in fenced if language.lower() in ("", *PYTHON_NAMES)]
    if fenced:
        candidates = ["\n\n".join(blocks), *blocks]
    else:
        beginnings = [match.start() for match in CODE_LINE.finditer(answer)][:MAX_BEGINNINGS]
        candidates = [answer[start:] for start in beginnings]
    whole = (code for code in candidates if defines(code))
    cut = (code for code in map(_without_tail, candidates) if defines(code))
    return next(whole, None) or next(cut, "")


def _without_tail(code: str) -> str:
    """The code up to the first line that is not Python."""
    lines = code.splitlines()
    while lines:
        try:
            _parse("\n".join(lines))
        except SyntaxError as error:
            lines = lines[: min((error.lineno or 1) - 1, len(lines) - 1)]
        except (ValueError, RecursionError, MemoryError):
            return ""
        else:
            break
    return "\n".join(lines)


def _dedented(text: str) -> str:
    """A block without the indentation of its first line: a block inside a list is indented as a whole."""
    margin = len(text) - len(text.lstrip(" "))
    return "\n".join(line[margin:] if not line[:margin].strip() else line for line in text.splitlines())


def defines(code: str, name: str | None = None) -> bool:
    """Whether code is valid Python that defines or assigns this name, or any name if none is given."""
    try:
        body = _parse(code).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    names = {node.name for node in body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    targets = [target for node in body if isinstance(node, ast.Assign) for target in node.targets]
    names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return bool(names) if name is None else name in names


def _parse(code: str) -> ast.Module:
    with warnings.catch_warnings():
        # Warnings about the model's code must not reach the user.
        warnings.simplefilter("ignore")
        return ast.parse(code)
