"""Finds the Python in an answer that is written for people: fenced, bare, cut off, with prose around it."""

import ast
import re
import warnings

#: A fenced block: its language, and its text up to the closing fence or to the end of the answer.
FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})[ \t]*([\w+.-]*)[^\n]*\n(.*?)(?:\1|\Z)", re.DOTALL | re.MULTILINE)
#: Where code begins in an answer without fences.
CODE_LINE = re.compile(r"^(?:def |async def |class |import |from \w+ import |@)", re.MULTILINE)
PYTHON_NAMES = ("python", "py", "python3")
#: Of an answer without fences, how many places where code may begin are tried.
MAX_BEGINNINGS = 8
#: No function here is longer, and Python's parser is not made for endless expressions.
MAX_ANSWER = 20_000


def extract_code(answer: str) -> str:
    """The code in an answer: its fenced blocks that are Python, else what begins like code; empty if there is none.

    Several blocks that can stand together are one program, else the first that is Python counts. Text behind the code,
    or a last line that was cut off, is no reason to refuse what stands before it.
    """
    answer = answer[:MAX_ANSWER]
    fenced = FENCE.findall(answer)
    blocks = [_dedented(text) for _, language, text in fenced if language.lower() in ("", *PYTHON_NAMES)]
    if fenced:
        candidates = ["\n\n".join(blocks), *blocks]
    else:
        beginnings = [found.start() for found in CODE_LINE.finditer(answer)][:MAX_BEGINNINGS]
        candidates = [answer[start:] for start in beginnings]
    whole = (code for code in candidates if defines(code))
    cut = (code for code in map(_without_tail, candidates) if defines(code))
    return next(whole, None) or next(cut, "")


def _without_tail(code: str) -> str:
    """The beginning that is Python: up to the line that is not."""
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
    """A block in a list is indented as a whole, by as much as its first line."""
    margin = len(text) - len(text.lstrip(" "))
    return "\n".join(line[margin:] if not line[:margin].strip() else line for line in text.splitlines())


def defines(code: str, name: str | None = None) -> bool:
    """Whether code is Python that defines or assigns this name; any name at all, if none is given."""
    try:
        body = _parse(code).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    named = {node.name for node in body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    targets = [target for node in body if isinstance(node, ast.Assign) for target in node.targets]
    named |= {target.id for target in targets if isinstance(target, ast.Name)}
    return bool(named) if name is None else name in named


def _parse(code: str) -> ast.Module:
    with warnings.catch_warnings():
        # What Python thinks of a model's style is nobody's concern here.
        warnings.simplefilter("ignore")
        return ast.parse(code)
