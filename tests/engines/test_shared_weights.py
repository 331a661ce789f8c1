"""One copy of the weights for two processes."""

import multiprocessing
import os
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from openclaw_rl.engines.local.model import shared_weights
from openclaw_rl.engines.local.model.decoder import Decoder, load_decoder
from openclaw_rl.engines.local.model.shared_weights import share, take_up
from openclaw_rl.engines.local.sampling.runner import RowKVCache
from openclaw_rl.engines.local.sampling.scheduler import Sequence, Work
from openclaw_rl.types import SamplingParams

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="anonymous shared memory is Linux's")


def logits(decoder: Decoder) -> torch.Tensor:
    """What the decoder says after a few tokens."""
    tokens = [3, 1, 4, 1, 5, 9, 2, 6]
    sequence = Sequence(1, 0, tokens, SamplingParams(max_tokens=1), 0, 0, (0, 0))
    sequence.pages = [0]
    cache = RowKVCache(decoder.shape, 1, torch.float32)
    ids = torch.tensor(tokens)
    with torch.inference_mode():
        attend = cache.attend([Work(sequence, 0, len(tokens))])
        return decoder.logits(decoder.forward(ids, torch.arange(len(tokens)), attend))


def other_process(connection: Connection) -> None:
    decoder = take_up(connection.recv())
    assert decoder is not None
    connection.send(logits(decoder).numpy())
    connection.recv()
    connection.send(float(decoder.norm[0]))


@pytest.fixture
def decoder(tiny_model: Path) -> Decoder:
    return load_decoder(tiny_model, torch.float32, torch.device("cpu"))


@pytest.mark.more
def test_another_process_computes_with_the_very_same_memory(decoder: Decoder) -> None:
    expected = logits(decoder)
    shared, handle = share(decoder)
    assert handle is not None
    assert torch.equal(logits(shared), expected)
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=other_process, args=(theirs,))
    process.start()
    ours.send(handle)
    assert torch.equal(torch.from_numpy(ours.recv()), expected)
    shared.norm[0] = 42.0
    ours.send(None)
    assert ours.recv() == 42.0
    process.join()


def test_a_tied_head_is_the_embedding_in_every_process(decoder: Decoder) -> None:
    decoder.untied_head = None
    shared, handle = share(decoder)
    assert handle is not None
    for opened in (shared, take_up(handle)):
        assert opened is not None
        assert opened.head is opened.embed
        assert torch.equal(opened.embed, decoder.embed)


def test_weights_of_another_machine_are_not_opened(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    _, handle = share(decoder)
    assert handle is not None
    monkeypatch.setattr(shared_weights, "host_id", lambda: "another machine")
    assert take_up(handle) is None
