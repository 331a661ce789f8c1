"""A custom judge: openclaw-rl serve --custom-rm-path examples/custom_judge.py

Rewards answers of at most forty words, and any answer to which the user says "thanks".
"""

MAX_WORDS = 40


class Judge:
    def score(self, prompt: str, response: str, next_state: str) -> float:
        if "thanks" in next_state.lower():
            return 1.0
        return 1.0 if len(response.split()) <= MAX_WORDS else -1.0

    def hint(self, prompt: str, response: str, next_state: str) -> str | None:
        return None if len(response.split()) <= MAX_WORDS else f"Answer in at most {MAX_WORDS} words."
