"""The decoder computes what Transformers computes, for every family it claims."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from openclaw_rl.engines.local.model.decoder import load_decoder
from openclaw_rl.engines.local.model.model_config import UnsupportedModel
from openclaw_rl.engines.local.model.packed import packed, ways_for
from support.decoders import FAMILIES, causal


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_transformers(family: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(FAMILIES[family]).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    theirs.save_pretrained(tmp_path)
    ours = load_decoder(tmp_path, torch.float32, torch.device("cpu"))
    ids = torch.randint(0, 200, (70,))
    with torch.inference_mode():
        expected = theirs(ids[None]).logits[0]
        assert expected.std() > 0.1
        for decoder in (ours, packed(ours, ways_for(ours, "on"))):
            logits = decoder.logits(decoder.forward(ids, torch.arange(70), causal))
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_a_tied_model_with_another_head_is_refused(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(FAMILIES["llama-biased-tied"]).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].clone()
    save_file({**tensors, "lm_head.weight": head}, tmp_path / "model.safetensors")
    assert load_decoder(tmp_path, torch.float32, torch.device("cpu")).untied_head is None
    save_file({**tensors, "lm_head.weight": head + 0.1}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModel, match="tie_word_embeddings"):
        load_decoder(tmp_path, torch.float32, torch.device("cpu"))
