"""Rotary positions, and how they are stretched for sequences longer than those of pretraining."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

# meta-llama/Llama-3.1-8B, config.json, rope_scaling: low_freq_factor, high_freq_factor.
_LLAMA3_TURNS = (1.0, 4.0)


@dataclass(frozen=True, kw_only=True)
class Yarn:
    """YaRN (arXiv 2309.00071, section 3.2).

    Attributes:
        fast, slow: pairs that turn more than `fast` times in `pretrained` tokens stay as they are,
            those that turn less than `slow` times are slowed by the factor, the rest lies between.
        truncate: the two ends lie on whole pairs.
        scales_output: what is rotated is scaled by 0.1 · ln(factor) + 1.
    """

    fast: float = 32.0
    slow: float = 1.0
    truncate: bool = True
    scales_output: bool = False


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary position embedding (RoFormer, arXiv 2104.09864, section 3.4.2), halves paired.

    Attributes:
        timescale: the wavelength of the slowest pair, over 2π.
        factor: by which positions are stretched; 1: they are not.
        pretrained: tokens of a sequence before the stretch, for `kind`.
        kind: ``linear`` slows all pairs by the factor (arXiv 2306.15595), ``llama3.1`` those whose
            wave is long against `pretrained`; else YaRN.
    """

    timescale: float
    factor: float = 1.0
    pretrained: int = 0
    kind: str | Yarn = "linear"

    def frequencies(self, rotary_dim: int) -> np.ndarray:
        """Radians per token of each pair, [rotary_dim / 2], in float32."""
        half = rotary_dim // 2
        plain = self.timescale ** -(np.arange(half, dtype=np.float64) / half)
        if self.factor == 1:
            return plain.astype(np.float32)
        return (plain * (1 - (1 - 1 / self.factor) * self._slowed(plain))).astype(np.float32)

    @property
    def output_scale(self) -> float:
        """Of the rotated queries and keys."""
        is_scaled = isinstance(self.kind, Yarn) and self.kind.scales_output
        return yarn_scale(self.factor) if is_scaled else 1.0

    def _slowed(self, plain: np.ndarray) -> np.ndarray:
        """How much of the factor each pair takes, from 0 to 1."""
        if self.kind == "linear":
            return np.ones_like(plain)
        turns = self.pretrained * plain / (2 * math.pi)
        if self.kind == "llama3.1":
            low, high = _LLAMA3_TURNS
            return 1 - np.clip((turns - low) / (high - low), 0, 1)
        assert isinstance(self.kind, Yarn)
        first, last = (
            self._pair_that_turns(n, len(plain)) for n in (self.kind.fast, self.kind.slow)
        )
        if self.kind.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * len(plain) - 1)
        return np.clip((np.arange(len(plain)) - first) / max(last - first, 1e-3), 0, 1)

    def _pair_that_turns(self, times: float, pairs: int) -> float:
        """The number of the pair that turns so often in `pretrained` tokens."""
        wave = self.pretrained / (2 * math.pi * times)
        return pairs * math.log(wave) / math.log(self.timescale)


def yarn_scale(factor: float, weight: float = 1.0) -> float:
    """YaRN's temperature (section 3.3): 0.1 · weight · ln(factor) + 1."""
    return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0


def apply_rope(x: jax.Array, positions: jax.Array, rope: Rope, *, rotary_dim: int = 0) -> jax.Array:
    """Rotates queries or keys by their positions.

    Args:
        x: [batch, sequence, heads, head_dim].
        positions: the position of each token in its document, [batch, sequence]; negative ones
            turn back.
        rotary_dim: how many of the first values of a head are rotated; 0: all.
    """
    rotary_dim = rotary_dim or x.shape[-1]
    if rotary_dim < x.shape[-1]:
        rotated, rest = jnp.split(x, [rotary_dim], axis=-1)
        return jnp.concatenate([apply_rope(rotated, positions, rope), rest], axis=-1)
    angle = positions[..., None, None].astype(jnp.float32) * rope.frequencies(rotary_dim)
    sin, cos = (rope.output_scale * f(angle) for f in (jnp.sin, jnp.cos))
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)
