"""A tiny real model and adapters for it."""

import json
import shutil
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
)

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


#: ChatML that knows tools, writes Hermes calls, and can open a reasoning block itself.
TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}<tools>
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}</tools><|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for message in messages %}{% if not (loop.first and message.role == 'system') %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking %}<think>
{% endif %}{% endif %}"""


def tiny_tokenizer() -> Tokenizer:
    """Byte-level BPE over a few sentences: every text has ids, few words are one token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    words = "the quick brown fox jumps over the lazy dog; hello world, what is the answer? user assistant system"
    tokenizer.train_from_iterator([words] * 4, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in CONTROL])
    return tokenizer


def save_tiny_model(folder: Path, seed: int = 0, tied: bool = False, context: int = 512, head_size: int = 16) -> Path:
    """A two-layer Llama with large random weights and the tokenizer above; `tied`: its embedding is also its head."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tiny_tokenizer(),
        eos_token="<|im_end|>",
        bos_token="<|im_start|>",
        pad_token="<|endoftext|>",
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_size,
        max_position_embeddings=context,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.bos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.2,
        tie_word_embeddings=tied,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def save_tiny_gemma(llama: Path, folder: Path) -> Path:
    """A model of the same size and tokenizer whose family Transformers' code computes."""
    caps = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 10.0}
    return save_tiny_other(llama, folder, Gemma2Config, sliding_window=24, query_pre_attn_scalar=16, **caps)


def save_tiny_mixture(llama: Path, folder: Path) -> Path:
    """The same with experts."""
    return save_tiny_other(
        llama, folder, Qwen3MoeConfig, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
    )


def save_tiny_other(llama: Path, folder: Path, family: type[PreTrainedConfig], **settings: object) -> Path:
    shutil.copytree(llama, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    torch.manual_seed(0)
    sizes = json.loads((llama / "config.json").read_text())
    kept = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim")
    tokens = ("num_key_value_heads", "max_position_embeddings", "eos_token_id", "bos_token_id", "pad_token_id")
    config = family(**{name: sizes[name] for name in (*kept, *tokens)}, initializer_range=0.2, **settings)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def save_adapter(model: Path, folder: Path, seed: int, rank: int = 4) -> Path:
    """A PEFT adapter that changes what the tiny model says."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    base = AutoModelForCausalLM.from_pretrained(model)
    config = LoraConfig(r=rank, lora_alpha=2 * rank + 1, target_modules="all-linear", init_lora_weights=False)
    get_peft_model(base, config).save_pretrained(folder)
    return folder


def save_adapters(model: Path, folder: Path) -> list[Path]:
    """Three adapters, one of another rank."""
    return [save_adapter(model, folder / str(seed), seed, rank) for seed, rank in ((1, 4), (2, 4), (3, 2))]
