"""Rotary positions."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from .rope_scaling import Linear, RopeScaling

_LINEAR = Linear()


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary position embedding (RoFormer, arXiv 2104.09864, section 3.4.2), halves paired.

    Attributes:
        timescale: the wavelength of the slowest pair, over 2π.
        factor: by which positions are stretched; 1: no stretch.
        pretrained: tokens per sequence before the stretch.
        scaling: the kind of stretch.
        sections: numbers of pairs rotated by time, by row and by column, interleaved (Qwen3-VL:
            interleaved M-RoPE); empty: all by the position.
    """

    timescale: float
    factor: float = 1.0
    pretrained: int = 0
    scaling: RopeScaling = _LINEAR
    sections: tuple[int, ...] = ()

    def frequencies(self, rotary_dim: int) -> np.ndarray:
        """Radians per token of each pair, [rotary_dim / 2], in float32."""
        of_pairs = self.scaling.frequencies(
            self.timescale, rotary_dim // 2, self.factor, self.pretrained
        )
        return of_pairs.astype(np.float32)

    def axes(self, rotary_dim: int) -> np.ndarray:
        """Which of its positions rotates each pair, [rotary_dim / 2]."""
        pairs = np.arange(rotary_dim // 2)
        turn = pairs % 3
        return np.where(pairs < 3 * np.asarray(self.sections)[turn], turn, 0)

    @property
    def output_scale(self) -> float:
        """The factor on rotated queries and keys."""
        return self.scaling.output_scale(self.factor, self.pretrained)


def apply_rope(x: jax.Array, positions: jax.Array, rope: Rope, *, rotary_dim: int = 0) -> jax.Array:
    """Rotates queries or keys by their positions.

    Args:
        x: [batch, sequence, heads, head_dim].
        positions: the position of each token in its document, [batch, sequence]; negative ones
            rotate backwards. With `sections`, three per token, [batch, sequence, 3].
        rotary_dim: number of a head's leading values that are rotated; 0: all.
    """
    rotary_dim = rotary_dim or x.shape[-1]
    if rotary_dim < x.shape[-1]:
        rotated, rest = jnp.split(x, [rotary_dim], axis=-1)
        return jnp.concatenate([apply_rope(rotated, positions, rope), rest], axis=-1)
    by_pair = positions[..., rope.axes(rotary_dim)] if rope.sections else positions[..., None]
    angle = by_pair[:, :, None].astype(jnp.float32) * rope.frequencies(rotary_dim)
    sin, cos = (rope.output_scale * f(angle) for f in (jnp.sin, jnp.cos))
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)
