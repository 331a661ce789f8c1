"""Reading failed tool calls: which failures are the call's fault, and which come from outside."""

import json

import pytest

from openclaw_rl.judge.rules import ReplyKind, read_reply
from support.reading import tool

TESTS_FAIL = "FAILED tests/test_sync.py::test_retry - TimeoutError\n1 failed, 8 passed in 0.4s\n\n{code}"
CODE = "(Command exited with code 1)"


def read_call(request: str, command: str, result: str) -> ReplyKind:
    call = json.dumps({"name": "exec", "arguments": {"command": command}})
    return read_reply(request, f"<tool_call>\n{call}\n</tool_call>", tool(result)).kind


@pytest.mark.parametrize(
    ("command", "result"),
    [
        ("cat /var/log/secure", "cat: /var/log/secure: Permission denied"),
        ("cat /var/log/secure", "cat: /var/log/secure: Keine Berechtigung"),
        ("cp a /mnt", "cp: impossible de créer '/mnt/a': Permission non accordée\n\n" + CODE),
        ("ssh ops@db1 df", "ops@db1: Permission denied (publickey).\n\n(Command exited with code 255)"),
        ("psql -c 'delete from t'", "ERROR:  permission denied for table t"),
        ("pytest -q", TESTS_FAIL.format(code=CODE)),
        ("pytest -q", TESTS_FAIL.format(code="")),
        ("go test ./...", "--- FAIL: TestSum (0.00s)\nFAIL\n\n" + CODE),
        (
            "cargo build",
            "error[E0308]: mismatched types\nerror: could not compile `a`\n\n(Command exited with code 101)",
        ),
        (
            "curl -f https://example.com/a",
            "curl: (22) The requested URL returned error: 404\n\n(Command exited with code 22)",
        ),
        ("curl htps://example.com/a", 'curl: (1) Protocol "htps" not supported'),
        (
            "python a.py",
            'Traceback (most recent call last):\n  File "a.py", line 503, in f\n    get(timeout=3)\nTypeError: no\n\n'
            + CODE,
        ),
    ],
)
def test_a_call_that_could_not_do_its_work_is_an_error(command: str, result: str) -> None:
    assert read_call("Do it.", command, result) is ReplyKind.TOOL_ERROR


@pytest.mark.parametrize(
    ("command", "result"),
    [
        ("git pull", "ssh: connect to host git.example.com port 22: Connection refused\n\n" + CODE),
        (
            "curl -f https://example.com/a",
            "curl: (22) The requested URL returned error: 503\n\n(Command exited with code 22)",
        ),
        ("curl https://example.com/a", "curl: (6) Could not resolve host: example.com\n\n(Command exited with code 6)"),
        ("kubectl get pods", "Error from server (Forbidden): pods is forbidden\n\n" + CODE),
        ("sudo make install", "sudo: a password is required\n\n" + CODE),
        ("cp a /mnt", "cp: error writing '/mnt/a': No space left on device\n\n" + CODE),
        ("rm a", "Permission to run this command was denied by the user."),
        (
            "python a.py",
            "Traceback (most recent call last):\n  f()\nrequests.exceptions.ConnectionError: refused\n\n" + CODE,
        ),
        ("python a.py", "Traceback (most recent call last):\n  f()\nKeyboardInterrupt\n\n" + CODE),
        ("grep -c kiwi a.txt", "0\n\n" + CODE),
    ],
)
def test_a_failure_from_outside_says_nothing(command: str, result: str) -> None:
    assert read_call("Do it.", command, result) is ReplyKind.UNCLEAR


@pytest.mark.parametrize(
    "request_",
    [
        "Run the tests and tell me what fails.",
        "Do the tests pass?",
        "Schau, ob die Tests laufen.",
        "Vérifie si les tests passent.",
        "Mira si pasan las pruebas.",
        "看看测试能不能通过。",
    ],
)
def test_findings_of_a_check_that_was_asked_for_say_nothing(request_: str) -> None:
    assert read_call(request_, "pytest -q", TESTS_FAIL.format(code=CODE)) is ReplyKind.UNCLEAR
    assert read_call(request_, "sed -i s/1/2/ a.py && pytest -q", TESTS_FAIL.format(code=CODE)) is ReplyKind.TOOL_ERROR


def test_words_of_failure_that_the_call_used_itself_are_no_failure() -> None:
    result = "[main 4f2c1ab] Fix crash on connection refused\n 2 files changed, 14 insertions(+)"
    assert read_call("Commit it.", "git commit -am 'Fix crash on connection refused'", result) is ReplyKind.TOOL_SUCCESS


@pytest.mark.parametrize(
    ("name", "arguments", "result", "kind"),
    [
        ("weather", {"city": "Bonn"}, "Bonn: 12 °C, light rain", ReplyKind.TOOL_SUCCESS),
        ("weather", {"city": "Bon"}, "City 'Bon' not found. Did you mean 'Bonn'?", ReplyKind.TOOL_ERROR),
        ("write", {"path": "a.c"}, "a.c:4:1: error: unknown type name 'strng'", ReplyKind.TOOL_ERROR),
        ("fetch", {"url": "https://a.example"}, '{"error": "net::ERR_NAME_NOT_RESOLVED"}', ReplyKind.UNCLEAR),
    ],
)
def test_calls_in_json_are_read_by_their_name(
    name: str, arguments: dict[str, str], result: str, kind: ReplyKind
) -> None:
    call = json.dumps({"name": name, "arguments": arguments})
    assert read_reply("Do it.", f"<tool_call>\n{call}\n</tool_call>", tool(result)).kind is kind
