"""A custom generation function: openclaw-rl serve --custom-generate-function-path examples/custom_generate.py

Samples four answers and returns the one with the highest mean log-prob per token.
"""

from collections import defaultdict
from dataclasses import replace
from statistics import fmean

from openclaw_rl.engines.base import Sampler
from openclaw_rl.types import SampledToken, SampleRequest

SAMPLES = 4


async def generate(request: SampleRequest, sampler: Sampler) -> list[SampledToken]:
    answers: dict[int, list[SampledToken]] = defaultdict(list)
    async for tokens in sampler.sample(replace(request, n=SAMPLES * request.n)):
        for token in tokens:
            answers[token.index].append(token)
    likeliest = sorted(answers.values(), key=lambda answer: fmean(token.logprob for token in answer), reverse=True)
    return [replace(token, index=index) for index, answer in enumerate(likeliest[: request.n]) for token in answer]
