"""Ways to merge an image's patches into fewer tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from ..building import Builder

Merge = Callable[[jax.Array], jax.Array]
"""[images, rows, columns, width] → [images, tokens, another width]."""


class MergeSpec(Protocol):
    """How a square of `side` × `side` patches becomes one token."""

    @property
    def side(self) -> int:
        """Side of the square in patches."""
        ...

    def width(self, before: int) -> int:
        """Width of a token merged from patches of width `before`."""
        ...

    def make(self, build: Builder) -> Merge:
        """Builds the part, in the tower's width `build.emb_dim`."""
        ...


@dataclass(frozen=True, kw_only=True)
class PoolSpec:
    """The mean of a square of patches (Gemma 3, arXiv 2503.19786, section 2.1)."""

    side: int

    def width(self, before: int) -> int:
        """Unchanged."""
        return before

    def make(self, build: Builder) -> Merge:
        """Nothing to train."""
        return lambda x: _squares(x, self.side).mean(axis=2)


@dataclass(frozen=True, kw_only=True)
class StandardizedPoolSpec:
    """The mean of a square of patches, shifted and scaled by learned values (Gemma 4)."""

    side: int

    def width(self, before: int) -> int:
        """Unchanged."""
        return before

    def make(self, build: Builder) -> StandardizedPool:
        """The learned values."""
        return StandardizedPool(self, build)


class StandardizedPool(nnx.Module):
    """``(√width · mean − shift) · scale``, in float32."""

    def __init__(self, spec: StandardizedPoolSpec, build: Builder) -> None:
        self.shift = build.vector((build.emb_dim,), 0.0, ("norm",))
        self.scale = build.vector((build.emb_dim,), 1.0, ("norm",))
        self.side = spec.side

    def __call__(self, x: jax.Array) -> jax.Array:
        """[images, rows, columns, width] → [images, tokens, width]."""
        mean = _squares(x.astype(jnp.float32), self.side).mean(axis=2)
        standard = (math.sqrt(x.shape[-1]) * mean - self.shift[...]) * self.scale[...]
        return standard.astype(x.dtype)


@dataclass(frozen=True, kw_only=True)
class JoinSpec:
    """A square of patches concatenated (Qwen3-VL)."""

    side: int

    def width(self, before: int) -> int:
        """Of all patches of the square."""
        return before * self.side**2

    def make(self, build: Builder) -> Merge:
        """Nothing to train."""
        return lambda x: _joined(x, self.side)


@dataclass(frozen=True, kw_only=True)
class ShuffleSpec:
    """A square of patches concatenated, then an MLP (Llama 4: pixel shuffle).

    Attributes:
        hidden, out: widths of the MLP.
    """

    side: int
    hidden: int
    out: int

    def width(self, before: int) -> int:
        """The MLP's."""
        return self.out

    def make(self, build: Builder) -> Shuffle:
        """The MLP's weights."""
        return Shuffle(self, build)


class Shuffle(nnx.Module):
    """``gelu(gelu(x · fc1) · fc2)`` of concatenated patches."""

    def __init__(self, spec: ShuffleSpec, build: Builder) -> None:
        joined = build.emb_dim * spec.side**2
        self.fc1 = build.dense((joined,), (spec.hidden,), ("embed", "mlp"))
        self.fc2 = build.dense((spec.hidden,), (spec.out,), ("mlp", "embed"))
        self.side = spec.side

    def __call__(self, x: jax.Array) -> jax.Array:
        """[images, rows, columns, width] → [images, tokens, out]."""
        joined = _joined(x, self.side)
        for fc in (self.fc1, self.fc2):
            joined = jax.nn.gelu(fc(joined), approximate=False)
        return joined


def _joined(x: jax.Array, side: int) -> jax.Array:
    """[images, rows, columns, width] → [images, squares, side · side · width]."""
    squares: jax.Array = _squares(x, side)
    return squares.reshape(*squares.shape[:2], -1)


def _squares(x: jax.Array, side: int) -> Any:
    """[images, rows, columns, width] → [images, squares, side · side, width], row by row."""
    count, rows, columns, width = x.shape
    cut = x.reshape(count, rows // side, side, columns // side, side, width).swapaxes(2, 3)
    return cut.reshape(count, -1, side * side, width)
