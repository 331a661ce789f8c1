"""Models whose folder brings the code that computes them."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

#: It leaves a file where it runs. Its inner layers have another activation than Llama.
ATTENDING = """\
from pathlib import Path
import torch
from transformers import LlamaConfig, LlamaForCausalLM

Path({mark!r}).touch()

class MineConfig(LlamaConfig):
    model_type = "mine"

class MineForCausalLM(LlamaForCausalLM):
    config_class = MineConfig

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp.act_fn = torch.nn.Tanh()
"""
#: Its attention is written out, as in most code of this kind, so that ours cannot take its place.
ALONE = (
    ATTENDING
    + """
        for number, layer in enumerate(self.model.layers):
            layer.self_attn = MineAttention(config, number)

class MineAttention(torch.nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.layer_idx, self.heads, size = layer_idx, config.num_attention_heads, config.hidden_size
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (torch.nn.Linear(size, size, False) for _ in range(4))

    def forward(self, hidden_states, past_key_values=None, **_others):
        q, k, v = (
            part(hidden_states).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        before = k.shape[2] - q.shape[2]
        hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(before + 1)
        scores = (q @ k.transpose(2, 3)).masked_fill(hidden, -torch.inf)
        return self.o_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2)), None

MineForCausalLM._supports_attention_backend = False
"""
)
#: A model without any state that could be handed on.
STATELESS = (
    ATTENDING
    + """
    def forward(self, input_ids):
        return super().forward(input_ids)
"""
)


def save_with_code(tiny: Path, folder: Path, code: str = ATTENDING) -> Path:
    """A model of the size of the tiny one, with its tokenizer; returns the file that its code leaves."""
    mark = folder.with_name(f"{folder.name}-ran")
    shutil.copytree(tiny, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    (folder / "modeling_mine.py").write_text(code.replace("{mark!r}", repr(str(mark))))
    sizes = json.loads((tiny / "config.json").read_text())
    if code == ALONE:
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes))
    save_file({name: tensor.clone() for name, tensor in model.state_dict().items()}, folder / "model.safetensors")
    brought = {"AutoConfig": "modeling_mine.MineConfig", "AutoModelForCausalLM": "modeling_mine.MineForCausalLM"}
    changes: dict[str, Any] = {"architectures": ["MineForCausalLM"], "model_type": "mine", "auto_map": brought}
    (folder / "config.json").write_text(json.dumps({**sizes, **changes}))
    return mark
