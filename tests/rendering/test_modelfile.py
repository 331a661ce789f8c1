"""Ollama writes the same prompts as the model's chat template, or is given no template."""

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer, processors

from openclaw_rl.rendering.chat import ChatRenderer
from openclaw_rl.rendering.modelfile import modelfile, ollama_template

SYSTEM, ONE, ANSWER, TWO = (
    {"role": role, "content": text}
    for role, text in (("system", "Be kind."), ("user", "Hi"), ("assistant", "Hello!"), ("user", "And?"))
)
#: The shapes of the templates of Llama 3, Mistral, and Qwen 2.5, which has a system text of its own.
LLAMA = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>\n\n{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set first = messages[0].content + '\n\n' %}"
    "{% set messages = messages[1:] %}{% endif %}{% for m in messages %}{% if m.role == 'user' %}"
    "[INST] {% if loop.first %}{{ first }}{% endif %}{{ m.content }}[/INST]{% else %}{{ m.content }}{{ eos_token }}"
    "{% endif %}{% endfor %}"
)
QWEN = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are Qwen.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
#: It says how many messages there are, which Ollama cannot.
COUNTING = "{{ messages | length }}{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"


#: The tokenizer puts it before every text, if the template does.
BOS = "<|im_start|>"


def renderer(model: Path, folder: Path, template: str) -> ChatRenderer:
    shutil.copytree(model, folder)
    (folder / "chat_template.jinja").write_text(template)
    if "bos_token" in template:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        bos = (BOS, tokenizer.token_to_id(BOS))
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[bos])
        tokenizer.save(str(folder / "tokenizer.json"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))
    return ChatRenderer(folder)


@pytest.mark.parametrize("template", [LLAMA, MISTRAL, QWEN, None])
def test_conversations_are_written_as_the_template_writes_them(
    template: str | None, tiny_model: Path, tmp_path: Path
) -> None:
    chat = renderer(tiny_model, tmp_path / "model", template) if template else ChatRenderer(tiny_model)
    found = ollama_template(chat)
    assert found is not None
    first = chat.default_system
    begin = BOS if template in (LLAMA, MISTRAL) else ""
    begins = [SYSTEM] if not first else [{**SYSTEM, "content": first}]
    for messages in ([SYSTEM, ONE], [SYSTEM, ONE, ANSWER, TWO], [*begins, ONE, ANSWER, TWO, ANSWER, ONE]):
        assert begin + found.render(messages) == chat.text(messages)
    if not first:
        assert begin + found.render([ONE, ANSWER, TWO]) == chat.text([ONE, ANSWER, TWO])
    assert f'SYSTEM """{first}' in modelfile(chat, ["FROM x"], ["Be brief."], {})
    assert ("SYSTEM" in modelfile(chat, ["FROM x"], [], {})) == bool(first)


def test_a_template_that_ollama_cannot_say_is_left_out(tiny_model: Path, tmp_path: Path) -> None:
    chat = renderer(tiny_model, tmp_path / "model", COUNTING)
    assert ollama_template(chat) is None
    assert "TEMPLATE" not in modelfile(chat, ["FROM x"], [], {})
