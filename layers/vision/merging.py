"""Ways to merge an image's patches into fewer tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from ..building import Builder


@dataclass(frozen=True, kw_only=True)
class MergeSpec:
    """How a square of `side` × `side` patches becomes one token.

    Attributes:
        kind: ``mean`` (Gemma 3, arXiv 2503.19786, section 2.1); ``standardized``: the mean,
            shifted and scaled by learned values (Gemma 4); ``joined``: concatenated (Qwen3-VL);
            ``shuffled``: concatenated, then an MLP (Llama 4: pixel shuffle).
        hidden, out: widths of the MLP.
    """

    side: int
    kind: Literal["mean", "standardized", "joined", "shuffled"]
    hidden: int = 0
    out: int = 0

    def width(self, before: int) -> int:
        """Width of a token merged from patches of width `before`."""
        return self.out or (before * self.side**2 if self.kind == "joined" else before)


class PatchMerge(nnx.Module):
    """See `MergeSpec`; `build.emb_dim` is the tower's width."""

    def __init__(self, spec: MergeSpec, build: Builder) -> None:
        if spec.kind == "standardized":
            self.shift = build.vector((build.emb_dim,), 0.0, ("norm",))
            self.scale = build.vector((build.emb_dim,), 1.0, ("norm",))
        if spec.kind == "shuffled":
            joined = build.emb_dim * spec.side**2
            self.fc1 = build.dense((joined,), (spec.hidden,), ("embed", "mlp"))
            self.fc2 = build.dense((spec.hidden,), (spec.out,), ("mlp", "embed"))
        self.spec = spec

    def __call__(self, x: jax.Array) -> jax.Array:
        """[images, rows, columns, width] → [images, tokens, another width]."""
        kind, side = self.spec.kind, self.spec.side
        if kind == "mean":
            return _squares(x, side).mean(axis=2)
        if kind == "standardized":  # (√width · mean − shift) · scale, in float32
            mean = _squares(x.astype(jnp.float32), side).mean(axis=2)
            standard = (math.sqrt(x.shape[-1]) * mean - self.shift[...]) * self.scale[...]
            return standard.astype(x.dtype)
        squares = _squares(x, side)
        joined: jax.Array = squares.reshape(*squares.shape[:2], -1)
        if kind == "shuffled":
            for fc in (self.fc1, self.fc2):
                joined = jax.nn.gelu(fc(joined), approximate=False)
        return joined


def _squares(x: jax.Array, side: int) -> Any:
    """[images, rows, columns, width] → [images, squares, side · side, width], row by row."""
    count, rows, columns, width = x.shape
    cut = x.reshape(count, rows // side, side, columns // side, side, width).swapaxes(2, 3)
    return cut.reshape(count, -1, side * side, width)
