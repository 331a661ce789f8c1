"""A custom generation without a model: `--custom-generate-function-path` of this file answers at once."""

from openclaw_rl.engines.base import Sampler
from openclaw_rl.types import FinishReason, SampledToken, SampleRequest

#: Ids that every tokenizer of the tests has.
WORDS = (40, 41, 42, 43)


async def generate(request: SampleRequest, _sampler: Sampler) -> list[SampledToken]:
    """The same few tokens for every request, and the end token where `max_tokens` has room for it."""
    params = request.params
    ids = [*WORDS, *sorted(params.stop_token_ids)[:1]][: params.max_tokens]
    finish = FinishReason.STOP if len(ids) > len(WORDS) else FinishReason.LENGTH
    top = tuple((id, -1.0 - id) for id in range(params.top_logprobs))
    return [
        SampledToken(index, id, -0.5, top, finish if place == len(ids) - 1 else None)
        for index in range(request.n)
        for place, id in enumerate(ids)
    ]
