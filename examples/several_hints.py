"""The built-in rules with several hints per turn, for topk-select to choose from:

openclaw-rl serve --method topk-select --custom-rm-path examples/several_hints.py

The built-in rules find one hint in a reply; the votes of an LLM judge give several. This judge words the same wish in
three ways: as an instruction, in the user's words, and both. It is for conversations without tools, because a custom
judge does not learn whether a user or a tool replied.
"""

from openclaw_rl.judge.judges.base import ABOUT_FORM, READINGS
from openclaw_rl.judge.rules import Reading, instruct, read_reply


class Judge:
    def score(self, prompt: str, response: str, next_state: str) -> float | None:
        return READINGS.get(read(prompt, response, next_state).kind)

    def hint(self, prompt: str, response: str, next_state: str) -> list[str]:
        reading = read(prompt, response, next_state)
        if READINGS.get(reading.kind) != -1.0 or not reading.hint:
            return []
        words = reading.hint
        instruction = instruct(words, response) if reading.kind in ABOUT_FORM else words
        ways = [instruction, words] if instruction.startswith(words) else [instruction, words, f"{words} {instruction}"]
        return list(dict.fromkeys(ways))


def read(prompt: str, response: str, next_state: str) -> Reading:
    return read_reply(prompt, response, [{"role": "user", "content": next_state}])
