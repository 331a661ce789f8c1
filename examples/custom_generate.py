"""An answer of one's own: openclaw-rl serve --custom-generate-function-path examples/custom_generate.py

Draws four answers and gives the one that the model finds likeliest, token for token.
"""

from collections import defaultdict
from dataclasses import replace
from statistics import fmean

from openclaw_rl.engines.base import Sampler
from openclaw_rl.types import SampledToken, SampleRequest

DRAWS = 4


async def generate(request: SampleRequest, sampler: Sampler) -> list[SampledToken]:
    drawn: dict[int, list[SampledToken]] = defaultdict(list)
    async for tokens in sampler.sample(replace(request, n=DRAWS * request.n)):
        for token in tokens:
            drawn[token.index].append(token)
    likeliest = sorted(drawn.values(), key=lambda own: fmean(token.logprob for token in own), reverse=True)
    return [replace(token, index=index) for index, own in enumerate(likeliest[: request.n]) for token in own]
