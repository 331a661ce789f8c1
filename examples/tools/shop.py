"""A tool and a checker for tools.yaml."""

from typing import Any

PRICES = {"apple": 0.5, "bread": 3.2, "cheese": 7.9}


def price_of(article: str) -> float:
    return PRICES[article]


def asked_twice(task: dict[str, Any], calls: list[dict[str, Any]], answer: str) -> float:
    """Half of the reward for the right article, half for the two look-ups that it needs."""
    looked_up = {call["arguments"]["article"] for call in calls if call["name"] == "price_of" and not call["error"]}
    return 0.5 * (task["data"]["dearer"] in answer) + 0.25 * len(looked_up & set(task["data"]["articles"]))
