"""OpenAI's legacy completions: a text is continued as it is, without the chat template."""

from collections.abc import AsyncIterator, Mapping
from itertools import accumulate
from typing import Annotated, Any

from pydantic import ConfigDict, Field
from pydantic_core import to_json
from tokenizers import Tokenizer

from openclaw_rl.api.completion import Completion
from openclaw_rl.api.errors import ApiError
from openclaw_rl.api.wire import (
    MAX_CHOICES,
    MAX_TEMPERATURE,
    CaptureFields,
    ChatMessage,
    ChatRequest,
    ListOf,
    StreamOptions,
    TextRequest,
    parse,
)
from openclaw_rl.api.wires.base import DONE, EVENTS, data_event, refuse_fields, same_fields
from openclaw_rl.rendering.tokenizer import token_bytes
from openclaw_rl.types import SampledToken

#: How long an answer may be if the request does not say; OpenAI has the same number.
DEFAULT_MAX_TOKENS = 16
#: The most likeliest tokens that are listed at each position; OpenAI has the same limit.
MAX_LOGPROBS = 5
#: Fields that are refused, and what to do instead.
REFUSED = {
    "suffix": "put it into the prompt, as the model expects it",
    "echo": "leave it out",
    "presence_penalty": "leave it out or set it to 0",
    "frequency_penalty": "leave it out or set it to 0",
    "logit_bias": "leave it out",
}
NAMES: Mapping[str, str] = {"messages": "prompt"}


class CompletionsRequest(CaptureFields):
    """The body of POST /v1/completions."""

    model_config = ConfigDict(strict=True)

    prompt: str | ListOf[int] | ListOf[str] | ListOf[list[int]]
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=MAX_TEMPERATURE)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    seed: int | None = None
    stop: str | ListOf[str] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    best_of: int | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    suffix: Any = None
    echo: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    logit_bias: Any = None


def parse_completions(body: bytes) -> CompletionsRequest:
    """Read a request; raises 400 for what is not supported."""
    request = parse(CompletionsRequest, body)
    refuse_fields(request, REFUSED)
    if request.best_of not in (None, 1, request.n):
        raise ApiError(400, "best_of is not supported; leave it out.", param="best_of")
    return request


def the_prompt(request: CompletionsRequest) -> str | list[int]:
    """The one prompt of a request, as text or token ids. Raises ApiError."""
    prompt: Any = request.prompt
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        if len(prompt) > 1:
            raise ApiError(
                400, "Several prompts in one request are not supported; send one request each.", param="prompt"
            )
        prompt = prompt[0]
    if not prompt:
        raise ApiError(400, "The prompt must not be empty.", param="prompt")
    given: str | list[int] = prompt
    return given


class CompletionsWire:
    """Implements `Wire`."""

    id_prefix = "cmpl-"
    names = NAMES
    media_type = EVENTS
    request: CompletionsRequest

    def __init__(self, model: str, tokenizer: Tokenizer | None) -> None:
        """Without a tokenizer, prompts are text and answers have no log-probs."""
        self.model = model
        self.tokenizer = tokenizer

    def parse(self, body: bytes) -> ChatRequest:
        request = self.request = parse_completions(body)
        prompt = the_prompt(request)
        text = prompt if isinstance(prompt, str) else self._text(prompt)
        return TextRequest(
            **same_fields(request),
            messages=[ChatMessage(role="user", content=text)],
            prompt=prompt,
            stream=bool(request.stream),
            max_tokens=request.max_tokens or DEFAULT_MAX_TOKENS,
            logprobs=request.logprobs is not None or None,
            top_logprobs=request.logprobs,
        )

    def _text(self, ids: list[int]) -> str:
        if self.tokenizer is None:
            raise ApiError(400, "The tokens of this model are not known here: give the prompt as text.", param="prompt")
        size = self.tokenizer.get_vocab_size()
        if not all(0 <= id < size for id in ids):
            raise ApiError(400, f"The prompt's token ids must be from 0 to {size - 1}.", param="prompt")
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    async def whole(self, completion: Completion) -> bytes:
        async for _update in completion:
            pass
        choices = [
            choice_entry(
                index, choice.message.body()["content"], choice.finish_reason, self._logprobs(choice.tokens, 0)
            )
            for index, choice in enumerate(completion.choices)
        ]
        head = completion.head("text_completion", self.model)
        return to_json({**head, "choices": choices, "usage": completion.usage()})

    async def events(self, completion: Completion) -> AsyncIterator[bytes]:
        head = completion.head("text_completion", self.model)
        usage = self.request.stream_options is not None and self.request.stream_options.include_usage
        offsets = [0] * len(completion.choices)
        try:
            async for update in completion:
                logprobs = self._logprobs(update.tokens, offsets[update.index])
                offsets[update.index] += sum(len(self._token(token.token_id)) for token in update.tokens)
                text = "".join(delta for delta in update.deltas if isinstance(delta, str))
                if text or logprobs or update.finish_reason:
                    entry = choice_entry(update.index, text, update.finish_reason, logprobs)
                    yield data_event({**head, "choices": [entry]})
        except ApiError as error:
            yield data_event(error.body())
            return
        if usage:
            yield data_event({**head, "choices": [], "usage": completion.usage()})
        yield DONE

    def _logprobs(self, tokens: list[SampledToken], offset: int) -> dict[str, Any] | None:
        """The log-probs of tokens, the first of which begins at the character `offset` of the answer."""
        if self.request.logprobs is None:
            return None
        texts = [self._token(token.token_id) for token in tokens]
        *starts, _end = accumulate(map(len, texts), initial=offset)
        top = [{self._token(id): value for id, value in token.top[: self.request.logprobs]} for token in tokens]
        values = [token.logprob for token in tokens]
        return {"tokens": texts, "token_logprobs": values, "top_logprobs": top, "text_offset": starts}

    def _token(self, id: int) -> str:
        assert self.tokenizer is not None
        return token_bytes(self.tokenizer, id).decode(errors="replace")


def choice_entry(
    index: int, text: str, finish_reason: str | None, logprobs: Mapping[str, Any] | None
) -> dict[str, Any]:
    return {"index": index, "text": text, "finish_reason": finish_reason, "logprobs": logprobs}
