"""An Ollama Modelfile: how Ollama writes prompts for a model that was learned here, and what it tells the model first.

Ollama does not read the chat template of most GGUF files: it knows some templates, and takes the text as it is
otherwise. So the template is translated, by looking at what it writes. A translation that would write something else is
left out. It has no tools.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from openclaw_rl.rendering.chat import ChatError, ChatRenderer, Message
from openclaw_rl.rendering.context import with_notes

#: Stand for the texts of a conversation. Unicode noncharacters, which no template contains.
SYSTEM, USER, ANSWER, AGAIN = "\ufdd0", "\ufdd1", "\ufdd2", "\ufdd3"
QUOTES = '"""'


@dataclass(frozen=True, slots=True)
class OllamaTemplate:
    """What stands around the texts of a conversation. Ollama writes it once for each question and its answer."""

    before_system: str
    after_system: str
    before_user: str
    """Where no system text stands before."""
    after_user: str
    after_answer: str

    @property
    def text(self) -> str:
        return (
            f"{{{{ if .System }}}}{self.before_system}{{{{ .System }}}}{self.after_system}{{{{ else }}}}"
            f"{self.before_user}{{{{ end }}}}{{{{ .Prompt }}}}{self.after_user}{{{{ .Response }}}}{self.after_answer}"
        )

    def render(self, messages: Sequence[Message]) -> str:
        """What Ollama writes for a conversation that ends with a question."""
        written = ""
        before = self.before_user
        for message in messages:
            text = message["content"]
            if message["role"] == "system":
                before = f"{self.before_system}{text}{self.after_system}"
            elif message["role"] == "user":
                written += f"{before}{text}{self.after_user}"
                before = self.before_user
            else:
                written += f"{text}{self.after_answer}"
        return written


def modelfile(
    renderer: ChatRenderer, lines: Sequence[str], notes: Sequence[str], parameters: Mapping[str, float]
) -> str:
    """The text of a Modelfile that begins with `lines`, with notes in the system text."""
    system = with_notes([], notes, renderer.default_system)[0]["content"] if notes else renderer.default_system
    template = ollama_template(renderer)
    ends = [renderer.tokenizer.backend.id_to_token(id) for id in sorted(renderer.tokenizer.eos_ids)]
    return "\n".join(
        (
            *lines,
            *([f"TEMPLATE {quoted(template.text)}"] if template else []),
            *([f"SYSTEM {quoted(system)}"] if system else []),
            *(f"PARAMETER stop {quoted(end)}" for end in ends if end),
            *(f"PARAMETER {name} {value:g}" for name, value in parameters.items()),
            "",
        )
    )


def quoted(text: str) -> str:
    """A text in quotes that it cannot end: what follows them would be instructions to Ollama."""
    return f"{QUOTES}{text.replace(QUOTES, chr(39) * 3)}{QUOTES}"


def ollama_template(renderer: ChatRenderer) -> OllamaTemplate | None:
    """The model's chat template in Ollama's language; None if that cannot say the same."""
    system, user, answer, again = (
        {"role": role, "content": text}
        for role, text in (("system", SYSTEM), ("user", USER), ("assistant", ANSWER), ("user", AGAIN))
    )
    # The plain text is not the first of a chat for the model, and has no beginning of its own.
    conversations = ([system, user], [system, user, answer, again], [user], [user, answer, again])
    try:
        texts = [without_beginning(renderer, renderer.text(messages)) for messages in conversations]
    except ChatError:
        return None
    whole = re.fullmatch(f"(.*){SYSTEM}(.*){USER}(.*){ANSWER}(.*){AGAIN}(.*)", texts[1], re.DOTALL)
    if whole is None:
        return None
    before_system, after_system, after_user, between, _ = whole.groups()
    before_user = texts[2].partition(USER)[0]
    if renderer.default_system:
        # It never begins with a question. What it writes before a later one comes after the end of the answer.
        pairs = zip(after_system[::-1], between[::-1], strict=False)
        shared = "".join(one for one, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))[::-1]
        before_user = re.sub(rf"\A{re.escape(renderer.tokenizer.special_tokens.get('eos_token', ''))}\s*", "", shared)
    template = OllamaTemplate(before_system, after_system, before_user, after_user, between.removesuffix(before_user))
    given = conversations[:2] if renderer.default_system else conversations
    fits = all(template.render(messages) == text for messages, text in zip(given, texts, strict=False))
    return template if fits and "{{" not in "".join(texts) else None


def without_beginning(renderer: ChatRenderer, text: str) -> str:
    """A rendered chat without the token that llama.cpp puts before every text itself."""
    beginning = renderer.tokenizer.backend.decode(renderer.tokenizer.beginning, skip_special_tokens=False)
    return text.removeprefix(beginning)
