"""What scheduler, cache, adapters and learner need of a model, whichever code computes it."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from openclaw_rl.engines.local.model.attention import PLAIN, AttentionForm

#: A matrix product of a layer.
Projection = str


class ExpertRows(NamedTuple):
    """Which rows the experts of a layer compute, sorted by expert."""

    tokens: Tensor
    """int64: the token of the run that each row is of."""
    ends: Tensor
    """int32: where the rows of each expert end."""
    experts: Tensor
    """The expert of each row."""


class Adapt(Protocol):
    """The adapters of the tokens of a run."""

    def has(self, layer: int, projection: Projection) -> bool:
        """Whether some token may have an adapter there. Asked before experts are adapted."""

    def __call__(
        self, layer: int, projection: Projection, x: Tensor, y: Tensor, rows: ExpertRows | None = None
    ) -> Tensor:
        """The output `y` of a product of `x`, with the tokens' adapters added. Without `rows`, each row is a token."""


class Attend(Protocol):
    """Attention of the tokens of a run."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, form: AttentionForm = PLAIN) -> Tensor:
        """[tokens, heads, dim] each → [tokens, query heads * dim]"""


class Adaptable(NamedTuple):
    """A linear module that adapters can change, in all layers where it has the same size; or a parameter with a weight
    for each expert of a layer."""

    name: str
    projection: Projection
    """The product that computes it, perhaps together with others."""
    inputs: int
    outputs: int
    columns: slice
    """Its part of that product's result."""
    width: int
    """Of that product's result."""
    paths: Mapping[int, str]
    """Its name in a Transformers model, by layer."""
    experts: int = 0
    """How many experts have a weight each; 0 for a linear module."""
    swapped: bool = False
    """Whether PEFT takes the inputs of the experts for their outputs, so that its factor B is the first one."""

    def factor_shapes(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of PEFT's factors A and B; those of all experts are stacked."""
        inputs, outputs = (self.outputs, self.inputs) if self.swapped else (self.inputs, self.outputs)
        each = (self.experts,) if self.experts else ()
        return (*each, rank, inputs), (*each, outputs, rank)

    def in_order(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """The factors [..., rank, in] and [..., out, rank], from PEFT's A and B."""
        return (b.mT, a.mT) if self.swapped else (a, b)

    @property
    def target(self) -> str:
        """As PEFT and --lora-target-modules name it."""
        return self.name.rpartition(".")[2]


@dataclass(frozen=True, slots=True)
class Sizes(ABC):
    """The sizes of a model."""

    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_context: int

    @property
    def q_size(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    @abstractmethod
    def adaptable(self) -> tuple[Adaptable, ...]:
        """The modules that adapters can change; those of one product are neighbours."""


class LanguageModel(ABC):
    """A model's weights and its forward pass over a flat run of tokens.

    Its caller provides attention (over a paged cache, when sampling) and the function that adds adapters, so a run may
    mix any sequences and adapters.
    """

    shape: Sizes
    mixes_sequences = True
    """Whether a run may mix sequences. If not, it is all of one sequence, or what follows a state of it."""
    embed: Tensor
    """Its device and precision are those of all weights."""

    @property
    @abstractmethod
    def activation_dtype(self) -> torch.dtype:
        """The precision of adapters, keys, values and everything else that is not a weight."""

    @property
    @abstractmethod
    def weight_bytes(self) -> int:
        """Memory of the weights."""

    @abstractmethod
    def forward(self, ids: Tensor, positions: Tensor, attend: Attend, adapt: Adapt | None = None) -> Tensor:
        """Final hidden states [tokens, hidden] of a flat run of tokens [tokens]."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Scores over the vocabulary, at least in float32."""
