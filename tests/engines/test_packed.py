"""Packed weights give the numbers of the weights as they are, and are made only where they help."""

from pathlib import Path

import pytest
import torch

from openclaw_rl.engines.local.model import packed as module
from openclaw_rl.engines.local.model.decoder import Decoder, Layer, load_decoder
from openclaw_rl.engines.local.model.packed import PackedDecoder, packed
from support.decoders import causal

needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="PyTorch was built without oneDNN")


@pytest.fixture(scope="module")
def decoder(tiny_model: Path) -> Decoder:
    return load_decoder(tiny_model, torch.float32, torch.device("cpu"))


def logits(decoder: Decoder, rows: int) -> torch.Tensor:
    with torch.inference_mode():
        ids = torch.arange(rows) + 5
        return decoder.logits(decoder.forward(ids, torch.arange(rows), causal))


@needs_onednn
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 8, 9, 70])
def test_any_number_of_rows_gets_the_same_numbers(decoder: Decoder, rows: int) -> None:
    both = packed(decoder, "on")
    assert isinstance(both, PackedDecoder)
    torch.testing.assert_close(logits(both, rows), logits(decoder, rows), rtol=1e-4, atol=1e-4)


@needs_onednn
def test_a_row_does_not_depend_on_how_many_are_beside_it(decoder: Decoder) -> None:
    linear = packed(decoder, "on").layers[0].qkv
    x = torch.randn(16, decoder.shape.hidden)
    with torch.inference_mode():
        whole = linear(x)
        for rows in (1, 2, 7, 16):
            torch.testing.assert_close(linear(x[:rows]), whole[:rows], rtol=1e-5, atol=1e-5)


@needs_onednn
@pytest.mark.parametrize("faster", [True, False])
def test_auto_packs_where_it_is_faster(decoder: Decoder, monkeypatch: pytest.MonkeyPatch, faster: bool) -> None:
    times = iter([2.0, 1.0] * module.MEASUREMENTS if faster else [1.0, 1.0] * module.MEASUREMENTS)
    monkeypatch.setattr(module, "seconds", lambda *_: next(times))
    assert (packed(decoder, "auto") is not decoder) == faster


@needs_onednn
def test_auto_refuses_results_that_differ(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    def rounded(layer: Layer) -> Layer:
        for linear in ((changed := real(layer)).qkv, changed.down):
            linear.packed = module.pack(type(linear)(linear.weight.bfloat16().float())).packed
        return changed

    real = module.pack_layer
    monkeypatch.setattr(module, "pack_layer", rounded)
    monkeypatch.setattr(module, "seconds", lambda linears, _: 1.0 if hasattr(linears[0], "packed") else 2.0)
    assert packed(decoder, "auto") is decoder


@needs_onednn
def test_auto_leaves_the_memory_to_others(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "pays", lambda _: True)
    needed = 8 * module.packed_bytes(decoder)
    monkeypatch.setattr(module, "usable_memory", lambda: needed - 1)
    assert packed(decoder, "auto") is decoder
    monkeypatch.setattr(module, "usable_memory", lambda: needed)
    assert packed(decoder, "auto") is not decoder


def test_other_precisions_and_the_choice_off_stay_as_they_are(tiny_model: Path, decoder: Decoder) -> None:
    narrow = load_decoder(tiny_model, torch.bfloat16, torch.device("cpu"))
    assert packed(narrow, "on") is narrow
    assert packed(decoder, "off") is decoder
