"""How long a training step takes on n GPUs: computed from numbers measured on one H200. See docs/results/scale.md."""

from dataclasses import dataclass

#: Bytes of a number.
BF16, FP32 = 2, 4


@dataclass(frozen=True, slots=True)
class Model:
    """A model's size and the speed that was measured for it."""

    name: str
    parameters: float
    adapter: float
    """Parameters of a LoRA adapter of rank 32 on all linear layers."""
    rate: float
    """Tokens a second of one GPU inside a step, forward and backward."""
    fixed_seconds: float
    """Of each step, whatever its size."""


#: From 8 x 576 tokens in 0.259 s and 16 x 1,024 tokens at 26.4k tokens a second.
QWEN3_4B = Model("Qwen3-4B", 4.02e9, 66.1e6, 32_600.0, 0.118)


@dataclass(frozen=True, slots=True)
class Network:
    """Assumed, not measured: bytes a second that each GPU sends, and the delay of one collective call."""

    node: int = 8
    """GPUs in one machine."""
    inside: float = 300e9
    between: float = 40e9
    delay: float = 50e-6

    def bandwidth(self, gpus: int) -> float:
        return self.inside if gpus <= self.node else self.between


NETWORK = Network()


@dataclass(frozen=True, slots=True)
class StepTime:
    """The parts of a step's seconds."""

    compute: float
    communication: float
    fixed: float

    @property
    def seconds(self) -> float:
        return self.compute + self.communication + self.fixed


def step_time(
    model: Model,
    gpus: int,
    tokens: int,
    *,
    full: bool,
    sharded: bool,
    micro_batch: int = 4096,
    net: Network = NETWORK,
) -> StepTime:
    """A step of so many tokens. `full` trains all weights, `sharded` splits them over the GPUs (FSDP).

    Every GPU runs whole micro-batches, so a step has at least one on each: more GPUs than micro-batches do not help.
    """
    passes = max(1, -(-tokens // (micro_batch * gpus)))
    read = passes * min(micro_batch, tokens)
    trained = model.parameters if full else model.adapter
    share = (gpus - 1) / gpus
    # Gradients are summed in float32 for an adapter, and in bfloat16 for all weights.
    gradients = 2 * share * trained * (BF16 if full else FP32)
    # Sharded weights are gathered for the forward and the backward pass of each micro-batch.
    weights = 2 * passes * share * model.parameters * BF16 if sharded else 0.0
    calls = (1 + 2 * passes * 36 * sharded) if gpus > 1 else 0
    communication = (gradients + weights) / net.bandwidth(gpus) + calls * net.delay
    # FSDP gathers the next layer while it computes this one: what is hidden does not count.
    hidden = min(weights / net.bandwidth(gpus), read / model.rate) if sharded else 0.0
    return StepTime(read / model.rate, communication - hidden, model.fixed_seconds)


def memory(model: Model, gpus: int, *, full: bool, sharded: bool) -> float:
    """GiB of weights, gradients and optimiser on each GPU; activations come on top."""
    split = gpus if sharded else 1
    base = model.parameters * BF16 / split
    trained = model.parameters / split if full else model.adapter
    # Gradient, a float32 copy and two moments.
    return (base + trained * (BF16 + 3 * FP32)) / 2**30
