"""Packed weights give the numbers of the weights as they are, or nearly, and are made only where they help."""

import json
from pathlib import Path

import pytest
import torch

from openclaw_rl.engines.local.model import packed as module
from openclaw_rl.engines.local.model.decoder import Decoder, load_decoder
from openclaw_rl.engines.local.model.linear import Linear
from openclaw_rl.engines.local.model.packed import (
    BLOCKS,
    FILE,
    HALF,
    PackedDecoder,
    Way,
    has_half_products,
    ways_for,
)
from support.decoders import causal

needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="PyTorch was built without oneDNN")
needs_fbgemm = pytest.mark.skipif(not has_half_products(), reason="FBGEMM is for x86")
#: How far scores are from those of float32 at most, as a share of the largest: here 0.0005.
HALF_ERROR = 0.003


@pytest.fixture(scope="module")
def decoder(tiny_model: Path) -> Decoder:
    return load_decoder(tiny_model, torch.float32, torch.device("cpu"))


def packed(decoder: Decoder, choice: str, cache: Path | None = None) -> Decoder:
    return module.packed(decoder, ways_for(decoder, choice, cache))


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


@needs_fbgemm
@pytest.mark.parametrize("rows", [0, 1, 2, 8, 70])
def test_float16_gives_nearly_the_same_numbers(decoder: Decoder, rows: int) -> None:
    half, exact = logits(packed(decoder, "half"), rows), logits(decoder, rows)
    assert half.shape == exact.shape
    assert half.dtype == torch.float32
    if rows:
        assert 0 < (half - exact).abs().max() < HALF_ERROR * exact.abs().max()


@needs_fbgemm
def test_only_the_weights_are_rounded_to_float16() -> None:
    """Inputs above the largest number of float16, a bias with more bits, and exact sums of both."""
    weight, bias = torch.randn(16, 32).half().float(), torch.randn(16)
    x = torch.randn(3, 32) * 1e6
    given = weight.clone()
    found, expected = HALF.pack(Linear(weight, bias))(x), Linear(weight, bias)(x)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
    assert torch.equal(HALF.pack(Linear(weight, bias))(torch.zeros(2, 32)), bias.expand(2, -1))
    assert torch.equal(weight, given)


@needs_fbgemm
@pytest.mark.parametrize("value", [1e5, float("nan")])
def test_weights_that_float16_has_no_room_for_stay_in_float32(tiny_model: Path, value: float) -> None:
    decoder = load_decoder(tiny_model, torch.float32, torch.device("cpu"))
    decoder.layers[-1].down.weight[3, 5] = value
    assert packed(decoder, "half") is decoder
    decoder.layers[-1].down.weight[3] = 1e-7 * torch.randn(decoder.shape.intermediate)
    assert packed(decoder, "half") is decoder, "float16 has three bits for such small numbers"
    decoder.layers[-1].down.weight[3] = 0.0
    assert packed(decoder, "half") is not decoder


@needs_onednn
def test_a_row_does_not_depend_on_how_many_are_beside_it(decoder: Decoder) -> None:
    linear = packed(decoder, "on").layers[0].qkv
    x = torch.randn(16, decoder.shape.hidden)
    with torch.inference_mode():
        whole = linear(x)
        for rows in (1, 2, 7, 16):
            torch.testing.assert_close(linear(x[:rows]), whole[:rows], rtol=1e-5, atol=1e-5)


@needs_onednn
@pytest.mark.parametrize(
    ("one_row", "several", "faster"),
    [(1, 0.5, True), (0.5, 1, True), (1, 0.9, False), (0.9, 0.9, False), (0.5, 1.9, False), (1.9, 0.5, False)],
)
def test_auto_packs_where_one_number_of_rows_gains_enough_and_both_together(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch, one_row: float, several: float, faster: bool
) -> None:
    measured(monkeypatch, {"Linear": (1, 1), "PackedLinear": (one_row, several)})
    assert (packed(decoder, "auto") is not decoder) == faster


def measured(monkeypatch: pytest.MonkeyPatch, times: dict[str, tuple[float, float]]) -> None:
    """Fakes the seconds of one row and of several, by kind of copy."""
    monkeypatch.setattr(
        module, "seconds", lambda linears, inputs: times[type(linears[0]).__name__][int(len(inputs[0]) > 1)]
    )


@needs_onednn
@needs_fbgemm
@pytest.mark.parametrize(
    ("half", "dtype"), [((0.7, 0.5), torch.float16), ((0.7, 0.9), torch.float32), ((1.1, 0.8), torch.float32)]
)
def test_auto_takes_the_faster_copy(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch, half: tuple[float, float], dtype: torch.dtype
) -> None:
    measured(monkeypatch, {"Linear": (1, 1), "PackedLinear": (1, 0.6), "HalfLinear": half})
    small = packed(decoder, "auto")
    assert isinstance(small, PackedDecoder)
    assert small.way is BLOCKS, "a small model is not rounded"
    monkeypatch.setattr(module, "LEAST_HALF_WEIGHTS", 1)
    both = packed(decoder, "auto")
    assert isinstance(both, PackedDecoder)
    assert both.way
    assert both.way.dtype == dtype
    count = sum(weight.numel() for weight in module.weights_of(decoder))
    assert module.packed_bytes(both) == count * (2 if dtype == torch.float16 else 4)
    assert module.packed_bytes(decoder) == 0


@needs_onednn
@needs_fbgemm
@pytest.mark.parametrize("layer", [0, -1])
def test_auto_takes_float32_where_float16_has_no_room(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, layer: int
) -> None:
    measured(monkeypatch, {"Linear": (1, 1), "PackedLinear": (1, 0.6), "HalfLinear": (0.5, 0.5)})
    monkeypatch.setattr(module, "LEAST_HALF_WEIGHTS", 1)
    decoder = load_decoder(tiny_model, torch.float32, torch.device("cpu"))
    decoder.layers[layer].down.weight[3, 5] = 65510.0
    copy = packed(decoder, "auto")
    assert isinstance(copy, PackedDecoder)
    assert copy.way is BLOCKS
    assert decoder.layers[layer].down.weight[3, 5] == 65510.0, "it was not changed"


@needs_onednn
@pytest.mark.parametrize("faster", [True, False])
def test_auto_measures_once_for_a_machine_and_a_size(
    decoder: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, faster: bool
) -> None:
    measured(monkeypatch, {"Linear": (1, 1), "PackedLinear": (1, 0.5 if faster else 0.9)})
    assert (packed(decoder, "auto", tmp_path) is not decoder) == faster
    measured(monkeypatch, {"Linear": (1, 1), "PackedLinear": (1, 0.9 if faster else 0.5)})
    assert (packed(decoder, "auto", tmp_path) is not decoder) == faster, "it was measured again"
    monkeypatch.setattr(module, "machine", lambda: "another")
    assert (packed(decoder, "auto", tmp_path) is decoder) == faster


@needs_onednn
@pytest.mark.parametrize("content", ["", "[]", '{"MACHINE": 1}', '{"MACHINE": {"float32": "fast"}}'])
def test_a_damaged_file_of_measurements_is_replaced(
    decoder: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    measured(monkeypatch, {"Linear": (1, 1), "PackedLinear": (1, 0.5)})
    packed(decoder, "auto", tmp_path)
    (here,) = json.loads((tmp_path / FILE).read_text())
    (tmp_path / FILE).write_text(content.replace("MACHINE", here))
    assert packed(decoder, "auto", tmp_path) is not decoder
    assert json.loads((tmp_path / FILE).read_text()) == {here: {"float32": 2.0}}


@needs_onednn
def test_packing_is_given_up_when_it_is_no_longer_wanted(decoder: Decoder) -> None:
    wanted = iter([True] * (len(module.weights_of(decoder)) + 1))
    assert module.packed(decoder, [BLOCKS], lambda: next(wanted, False)) is decoder


@needs_onednn
def test_auto_refuses_results_that_differ(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    def rounded(linear: Linear) -> Linear:
        return module.PackedLinear(linear.weight, packed=module.pack(Linear(linear.weight.bfloat16().float())).packed)

    monkeypatch.setattr(module, "BLOCKS", Way(torch.float32, rounded, BLOCKS.holds, BLOCKS.max_error))
    measured(monkeypatch, {"Linear": (1, 1), "PackedLinear": (1, 0.5)})
    assert packed(decoder, "auto") is decoder


@needs_onednn
def test_auto_leaves_the_memory_to_others(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    measured(monkeypatch, {"Linear": (1, 1), "PackedLinear": (1, 0.5)})
    needed = 8 * module.packed_bytes(packed(decoder, "on"))
    monkeypatch.setattr(module, "usable_memory", lambda: needed - 1)
    assert packed(decoder, "auto") is decoder
    monkeypatch.setattr(module, "usable_memory", lambda: needed)
    assert packed(decoder, "auto") is not decoder


def test_other_precisions_and_the_choice_off_stay_as_they_are(tiny_model: Path, decoder: Decoder) -> None:
    narrow = load_decoder(tiny_model, torch.bfloat16, torch.device("cpu"))
    assert packed(narrow, "half") is narrow
    assert packed(narrow, "off") is narrow
    assert packed(decoder, "off") is decoder


@needs_fbgemm
@needs_onednn
def test_weights_in_bfloat16_have_a_copy_for_single_rows_and_one_for_several(tiny_model: Path) -> None:
    """The weights are the same numbers; the input of a single row is not rounded."""
    narrow = load_decoder(tiny_model, torch.bfloat16, torch.device("cpu"))
    both = packed(narrow, "on")
    assert isinstance(both, PackedDecoder)
    linear, copies = narrow.layers[0].gate_up, both.layers[0].gate_up
    x = torch.randn(9, narrow.shape.hidden)
    torch.testing.assert_close(copies(x), linear(x), rtol=0.01, atol=0.01)
    torch.testing.assert_close(copies(x[:1]), x[:1] @ linear.weight.float().t(), rtol=1e-4, atol=1e-5)
    rounded = narrow.logits(x[:1])
    assert 0 < (both.logits(x[:1]) - rounded).abs().max() < 0.02 * rounded.abs().max()


def test_float16_is_not_tried_on_arm(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch for Arm names FBGEMM as its engine, but its products end the process on many processors."""
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert not has_half_products()
    assert packed(decoder, "half") is decoder
