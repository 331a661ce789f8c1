"""No body makes the server stumble, on whichever wire it comes."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from support.properties import examples
from support.recording import Recording


@dataclass(frozen=True)
class AnyWire:
    """A wire, the words of its requests, and the places in a request where anything is put."""

    path: str
    names: str
    values: str = ""
    places: tuple[Callable[[object], object], ...] = ()


CHAT = AnyWire(
    "chat/completions",
    "messages role content tools function name type text "
    "stop n stream stream_options max_tokens response_format modalities functions",
)
MESSAGES = AnyWire(
    "messages",
    "messages role content type text tools name input_schema system tool_choice",
    "user assistant text tool_use tool_result thinking hello",
    (
        lambda anything: {"messages": anything},
        lambda anything: {"messages": [{"role": "user", "content": anything}]},
    ),
)
RESPONSES = AnyWire(
    "responses",
    "input role content type text tools name output call_id arguments",
    "user assistant message function_call function_call_output reasoning function input_text",
    (lambda anything: {"input": anything}, lambda anything: {"input": [{"role": "user", "content": anything}]}),
)
COMPLETIONS = AnyWire(
    "completions",
    "prompt n stream stop max_tokens logprobs echo suffix seed",
    "hello",
    (lambda anything: {"prompt": anything},),
)


def bodies(wire: AnyWire) -> st.SearchStrategy[object]:
    """JSON values with the words of a wire in them."""
    texts = st.sampled_from(wire.values.split()) if wire.values else st.text(max_size=5)
    return st.recursive(
        st.none() | st.booleans() | st.integers() | texts,
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(wire.names.split()), inner, max_size=4)
        ),
        max_leaves=12,
    )


@pytest.mark.parametrize("wire", [CHAT, MESSAGES, RESPONSES, COMPLETIONS], ids=lambda wire: wire.path)
@examples(60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_body_makes_the_server_stumble(recording: Recording, wire: AnyWire, data: st.DataObject) -> None:
    body = data.draw(bodies(wire))
    for shaped in (body, *(place(body) for place in wire.places)):
        assert recording.send(wire.path, shaped).status_code in (200, 400, 404)
