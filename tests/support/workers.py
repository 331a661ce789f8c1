"""A sampling worker in this process: requests for it, and what it answers."""

import pytest
import torch

from openclaw_rl.engines.local.process.sampler_worker import Worker
from openclaw_rl.engines.local.process.worker_messages import Add, LoadPolicy, PolicyLoaded
from openclaw_rl.types import SampledToken, SampleRequest, SamplingParams

#: Where there is a GPU, a worker on it must give the same answers as a worker on the CPU.
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
on_every_device = pytest.mark.parametrize("device", DEVICES)

Answers = dict[tuple[int, int], list[SampledToken]]


def request(prompt: list[int], n: int = 1, **params: object) -> SampleRequest:
    return SampleRequest(prompt, SamplingParams(**{"max_tokens": 12, "temperature": 0.0, **params}), n=n)


def run(worker: Worker, arrivals: list[tuple[int, Add]]) -> Answers:
    """Give the worker each request at its step, and run it until every request is answered."""
    answers: Answers = {}
    step = 0
    arrivals = sorted(arrivals, key=lambda arrival: arrival[0])
    while arrivals or not worker.scheduler.idle:
        while arrivals and (arrivals[0][0] <= step or worker.scheduler.idle):
            worker.obey(arrivals.pop(0)[1])
        for id, tokens in worker.step().tokens.items():
            for token in tokens:
                answers.setdefault((id, token.index), []).append(token)
        step += 1
    return answers


def load(worker: Worker, command: LoadPolicy) -> PolicyLoaded:
    """Load a policy, all of its pieces one after another."""
    answer = worker.obey(command)
    while answer is None:
        answer = worker.load_on()
    assert isinstance(answer, PolicyLoaded)
    return answer


def ids(tokens: list[SampledToken]) -> list[int]:
    return [token.token_id for token in tokens]


def transformers_greedy(model: torch.nn.Module, prompt: list[int]) -> list[int]:
    """The twelve tokens that Transformers generates greedily after the prompt."""
    out = model.eval().generate(
        input_ids=torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt)),
        max_new_tokens=12,
        do_sample=False,
        eos_token_id=-1,
    )
    return out[0, len(prompt) :].tolist()
