"""A custom rollout: openclaw-rl serve --rollout-function-path examples/custom_rollout.py

Asks for sums through the API, and rewards answers that contain the right number.
"""

import random
from typing import Any

import httpx

TASKS = 200


async def rollout(base_url: str, config: dict[str, Any]) -> None:
    rng = random.Random(config["seed"])
    async with httpx.AsyncClient(base_url=base_url, timeout=300) as client:
        for _ in range(TASKS):
            await one_task(client, rng.randint(2, 20), rng.randint(2, 20))


async def one_task(client: httpx.AsyncClient, a: int, b: int) -> None:
    question = {"role": "user", "content": f"What is {a} + {b}? Answer with the number alone."}
    answer = (await client.post("/chat/completions", json={"messages": [question], "max_tokens": 16})).json()
    right = str(a + b) in answer["choices"][0]["message"]["content"].split()
    verdict = {"id": answer["id"], "score": 1 if right else -1, "source": "environment"}
    await client.post("/feedback", json=verdict)
