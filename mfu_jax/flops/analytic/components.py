"""A model as the counts see it: a model has layers, and a layer has components.

A component states its multiply-adds (per token, or per attended pair), its weights, and what its
backward pass needs. FLOPs, parameters and breakdown all come from the same components.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple, Self, TypeVar

from mfu_jax.flops.exact import Number
from mfu_jax.flops.masks import Mask, PairCounting

ComponentKind = Literal["weight", "attention"]
KindOfLayer = TypeVar("KindOfLayer", bound=Hashable)


class Cache(NamedTuple):
    """What serving caches of a sequence for one component.

    Attributes:
        width: values per key that a token sees (its key and value, or a latent of both).
        state: values per sequence (a recurrent state, the last inputs of a convolution).
        borrowed: whether another layer owns them: they are read here, not written.
        decode_macs: multiply-adds per pair in decoding, if different from training.
    """

    width: int = 0
    state: int = 0
    borrowed: bool = False
    decode_macs: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Component:
    """One matrix multiplication of one layer, or a few that always occur together.

    Attributes:
        name: its name in the breakdown.
        kind: ``weight`` if one operand is a weight, ``attention`` if both are activations.
        macs: multiply-adds per token, or per (query, key) pair if there is a mask.
        mask: which pairs an attention component computes; None: it works token by token.
        tokens: tokens of one sequence that it processes; None: all of them.
        parameters: number of its weights (including biases, norms and tables, used in no matmul).
        active_parameters: number of weights that one token uses; None: all of them.
        table: whether the parameters are a lookup table (token, position) that no matmul reads.
        left_gradient: whether the gradient of the left operand, the input, is needed (False:
            nothing below it trains).
        right_gradient: whether the gradient of the right operand is needed: the weights (False:
            frozen), or keys and values.
        cache: what serving keeps for it between tokens.
        inputs, outputs: of a dense layer, ``[inputs, outputs]``; 0 for anything else.
    """

    name: str
    kind: ComponentKind = "weight"
    macs: Number = 0
    mask: Mask | None = None
    tokens: int | None = None
    parameters: int = 0
    active_parameters: int | None = None
    table: bool = False
    left_gradient: bool = True
    right_gradient: bool = True
    cache: Cache | None = None
    inputs: int = 0
    outputs: int = 0

    def forward_flops(self, length: int, counting: PairCounting) -> Number:
        """FLOPs of one forward pass over one sequence of `length` tokens: 2 per multiply-add."""
        if self.mask is not None:
            return 2 * self.macs * self.mask.pairs(length, counting)
        return 2 * self.macs * (length if self.tokens is None else self.tokens)

    @property
    def backward_multiple(self) -> int:
        """Backward FLOPs as a multiple of the forward: one matmul per operand's gradient."""
        return self.left_gradient + self.right_gradient

    def replace(self, **changes: object) -> Self:
        """A copy with some attributes changed."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """The components of one layer, and how often the model repeats it."""

    name: str
    components: tuple[Component, ...]
    repeats: int = 1

    def each(self, change: Callable[[Component], Iterable[Component]]) -> Self:
        """A copy with the components that `change` makes of each."""
        parts = tuple(new for part in self.components for new in change(part))
        return dataclasses.replace(self, components=parts)


# Every layer of a model or of a tower, in order.
Layers = tuple[Layer, ...]


def layer(name: str, *components: Component, repeats: int = 1) -> Layer:
    """A layer with these components."""
    return Layer(name=name, components=components, repeats=repeats)


def layers_of(
    kinds: Iterable[KindOfLayer], block: Callable[[KindOfLayer], tuple[str, tuple[Component, ...]]]
) -> Layers:
    """Builds each kind of layer once and counts its repeats, in order of first appearance.

    Args:
        kinds: the kind of every layer of the model, from first to last, or a `Counter` of them.
        block: kind → the layer's name and components.

    >>> layers = layers_of("aab", lambda kind: (f"layers_{kind}", (Component(name="x"),)))
    >>> [(layer.name, layer.repeats) for layer in layers]
    [('layers_a', 2), ('layers_b', 1)]
    """
    layers = []
    for kind, repeats in Counter(kinds).items():
        name, components = block(kind)
        layers.append(layer(name, *components, repeats=repeats))
    return tuple(layers)
