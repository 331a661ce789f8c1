"""Runs tests inside the sandbox: functions whose asserts were replaced by calls of `__see__`.

It reports the values that the tests saw, and does not know which values are right. It is passed to Python as text, so
it imports the standard library only.
"""

import json
import os
import signal
import sys
from typing import Any

#: The first line of the output. It is written before any tested code is loaded.
STARTED = "the tests were started"
#: Longer values are cut; no test expects one so long.
MAX_SHOWN = 2000
#: Most seconds for one test.
TEST_SECONDS = 2.0


def run_file(file: str, source: str, names: list[str], scope: dict[str, Any], report: Any) -> None:
    """Load a test file and run its tests one by one. `report` gets a list: file, test, what it saw, error."""
    seen: list[tuple[int, str]] = []
    scope |= {
        "__name__": "tests",
        "__see__": lambda index, value: seen.append((index, repr(value)[:MAX_SHOWN])),
        "__raised__": name_of_raised,
    }
    try:
        exec(compile(source, file, "exec"), scope)
    except BaseException as error:  # noqa: BLE001 - the tested code may raise anything, SystemExit too
        report([file, "", [], describe(error)])
        return
    for name in names:
        seen.clear()
        error_text = ""
        try:
            scope[name]()
        except BaseException as error:  # noqa: BLE001
            error_text = describe(error)
        report([file, name, list(seen), error_text])


def name_of_raised(function: Any, *arguments: Any) -> str | None:
    """The name of the exception that a call raises, or of its nearest built-in base; None if it raises none."""
    try:
        function(*arguments)
    except Exception as error:  # noqa: BLE001
        return next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins")
    return None


def describe(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:  # noqa: BLE001
        text = ""
    return f"{type(error).__name__}: {text}"[:MAX_SHOWN].rstrip(": ")


class TestTooLong(BaseException):
    """A test did not end in time. Code that catches every Exception does not catch it."""


def main() -> None:
    """Standard input is JSON: a list of [file, source, names of tests]. Each report is a line of JSON."""
    sys.stdout.write(f"{STARTED}\n")
    sys.stdout.flush()
    job = json.load(sys.stdin)
    lines = os.fdopen(os.dup(1), "w")
    # What the tested code prints must not mix with the reports.
    os.dup2(2, 1)
    sys.path.insert(0, os.getcwd())

    def stop(*_: Any) -> None:
        raise TestTooLong(f"the test did not end within {TEST_SECONDS:g} seconds")

    def report(result: list[Any]) -> None:
        lines.write(json.dumps(result) + "\n")
        lines.flush()
        signal.setitimer(signal.ITIMER_REAL, TEST_SECONDS)

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, TEST_SECONDS)
    for file, source, names in job:
        run_file(file, source, names, {}, report)
    lines.flush()
    # Threads and handlers of the tested code end here.
    os._exit(0)


if __name__ == "__main__":
    main()
