"""Rotary positions, and how they are stretched for sequences longer than in pretraining.

Adding a stretch: a class here, a row of `_STRETCHED` in families/blocks.py, and its name in
mfu_jax/trainer/config/keys.yml.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

# meta-llama/Llama-3.1-8B, config.json, rope_scaling: low_freq_factor, high_freq_factor.
_LLAMA3_TURNS = (1.0, 4.0)


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary position embedding (RoFormer, arXiv 2104.09864, section 3.4.2), halves paired.

    Here, every pair is slowed by the factor (arXiv 2306.15595).

    Attributes:
        timescale: the wavelength of the slowest pair, over 2π.
        factor: by which positions are stretched; 1: no stretch.
        pretrained: tokens per sequence before the stretch.
        sections: numbers of pairs rotated by time, by row and by column, interleaved (Qwen3-VL:
            interleaved M-RoPE); empty: all by the position.
    """

    timescale: float
    factor: float = 1.0
    pretrained: int = 0
    sections: tuple[int, ...] = ()

    def frequencies(self, pairs: int) -> np.ndarray:
        """Radians per token of each pair, fastest first, [pairs] in float64."""
        return self.plain(pairs) / self.factor

    def plain(self, pairs: int, growth: float = 1.0) -> np.ndarray:
        """The frequencies without a stretch; `growth`: of the timescale."""
        return (self.timescale * growth) ** -(np.arange(pairs, dtype=np.float64) / pairs)

    def slowed(self, pairs: int, share: np.ndarray) -> np.ndarray:
        """Frequencies, each slowed by a share of the factor, from 0 to 1."""
        return self.plain(pairs) * (1 - (1 - 1 / self.factor) * share)

    def axes(self, pairs: int) -> np.ndarray:
        """Which of its positions rotates each pair, [pairs]."""
        numbers = np.arange(pairs)
        turn = numbers % 3
        return np.where(numbers < 3 * np.asarray(self.sections)[turn], turn, 0)

    @property
    def output_scale(self) -> float:
        """The factor on rotated queries and keys."""
        return 1.0


@dataclass(frozen=True, kw_only=True)
class Llama3Rope(Rope):
    """Slows pairs whose wavelength is long relative to `pretrained` (Llama 3.1)."""

    def frequencies(self, pairs: int) -> np.ndarray:
        """See `Rope`."""
        low, high = _LLAMA3_TURNS
        turns = self.pretrained * self.plain(pairs) / (2 * math.pi)
        return self.slowed(pairs, 1 - np.clip((turns - low) / (high - low), 0, 1))


@dataclass(frozen=True, kw_only=True)
class YarnRope(Rope):
    """YaRN (arXiv 2309.00071, section 3.2).

    Attributes:
        fast, slow: pairs that turn more than `fast` times in `pretrained` tokens are unchanged,
            those that turn less than `slow` times are slowed by the factor, others lie in between.
        truncate: whether the two boundaries are rounded to whole pairs.
        scales_output: whether queries and keys are scaled by 0.1 · ln(factor) + 1.
    """

    fast: float = 32.0
    slow: float = 1.0
    truncate: bool = True
    scales_output: bool = False

    def frequencies(self, pairs: int) -> np.ndarray:
        """See `Rope`."""
        first, last = (
            pairs * math.log(self.pretrained / (2 * math.pi * turns)) / math.log(self.timescale)
            for turns in (self.fast, self.slow)
        )
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * pairs - 1)
        share = np.clip((np.arange(pairs) - first) / max(last - first, 1e-3), 0, 1)
        return self.slowed(pairs, share)

    @property
    def output_scale(self) -> float:
        """See `yarn_scale`."""
        return yarn_scale(self.factor) if self.scales_output else 1.0


@dataclass(frozen=True, kw_only=True)
class DynamicNtkRope(Rope):
    """The timescale grows for sequences beyond `pretrained` (transformers: ``dynamic``).

    Attributes:
        length: tokens per sequence.
    """

    length: int

    def frequencies(self, pairs: int) -> np.ndarray:
        """See `Rope`."""
        beyond = max(self.length, self.pretrained) / self.pretrained
        growth = (self.factor * beyond - (self.factor - 1)) ** (pairs / (pairs - 1))
        return self.plain(pairs, growth)


@dataclass(frozen=True, kw_only=True)
class LongRope(Rope):
    """LongRoPE (arXiv 2402.13753): every pair has its own factor, found by a search.

    Attributes:
        factors: of each pair.
    """

    factors: tuple[float, ...]

    def frequencies(self, pairs: int) -> np.ndarray:
        """See `Rope`."""
        return self.plain(pairs) / np.asarray(self.factors, np.float64)

    @property
    def output_scale(self) -> float:
        """√(1 + ln factor / ln pretrained) (section 3.3)."""
        if self.factor <= 1:
            return 1.0
        return math.sqrt(1 + math.log(self.factor) / math.log(self.pretrained))


def yarn_scale(factor: float, weight: float = 1.0) -> float:
    """YaRN's temperature (section 3.3): 0.1 · weight · ln(factor) + 1."""
    return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0


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
    pairs = rotary_dim // 2
    by_pair = positions[..., rope.axes(pairs)] if rope.sections else positions[..., None]
    angle = by_pair[:, :, None].astype(jnp.float32) * rope.frequencies(pairs).astype(np.float32)
    sin, cos = (rope.output_scale * f(angle) for f in (jnp.sin, jnp.cos))
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)
