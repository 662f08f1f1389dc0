"""How rotary positions are stretched for sequences longer than in pretraining.

Frequencies are in radians per token, one per pair, fastest first, [pairs] in float64.

Adding one: a class here, a row of `_ROPE_SCALINGS` in families/blocks.py, and its name in
mfu_jax/trainer/config/model_keys.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

# meta-llama/Llama-3.1-8B, config.json, rope_scaling: low_freq_factor, high_freq_factor.
_LLAMA3_TURNS = (1.0, 4.0)


class RopeScaling(Protocol):
    """A kind of stretch; `base` is the timescale of `Rope`, other parameters are its own."""

    def frequencies(self, base: float, pairs: int, factor: float, pretrained: int) -> np.ndarray:
        """The frequency of each pair."""
        ...

    def output_scale(self, factor: float, pretrained: int) -> float:
        """The factor on rotated queries and keys."""
        ...


def plain_frequencies(base: float, pairs: int) -> np.ndarray:
    """Without any stretch (RoFormer, arXiv 2104.09864, section 3.4.2)."""
    return base ** -(np.arange(pairs, dtype=np.float64) / pairs)


class Unscaled:
    """Rotations that keep the length of queries and keys."""

    def output_scale(self, factor: float, pretrained: int) -> float:
        """One."""
        return 1.0


@dataclass(frozen=True, kw_only=True)
class Linear(Unscaled):
    """Every pair is slowed by the factor (arXiv 2306.15595)."""

    def frequencies(self, base: float, pairs: int, factor: float, pretrained: int) -> np.ndarray:
        """See `RopeScaling`."""
        return plain_frequencies(base, pairs) / factor


@dataclass(frozen=True, kw_only=True)
class Llama3(Unscaled):
    """Slows pairs whose wavelength is long relative to `pretrained` (Llama 3.1)."""

    def frequencies(self, base: float, pairs: int, factor: float, pretrained: int) -> np.ndarray:
        """See `RopeScaling`."""
        plain = plain_frequencies(base, pairs)
        low, high = _LLAMA3_TURNS
        turns = pretrained * plain / (2 * math.pi)
        return _slowed(plain, factor, 1 - np.clip((turns - low) / (high - low), 0, 1))


@dataclass(frozen=True, kw_only=True)
class Yarn:
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

    def frequencies(self, base: float, pairs: int, factor: float, pretrained: int) -> np.ndarray:
        """See `RopeScaling`."""
        first, last = (
            pairs * math.log(pretrained / (2 * math.pi * turns)) / math.log(base)
            for turns in (self.fast, self.slow)
        )
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * pairs - 1)
        share = np.clip((np.arange(pairs) - first) / max(last - first, 1e-3), 0, 1)
        return _slowed(plain_frequencies(base, pairs), factor, share)

    def output_scale(self, factor: float, pretrained: int) -> float:
        """See `yarn_scale`."""
        return yarn_scale(factor) if self.scales_output else 1.0


@dataclass(frozen=True, kw_only=True)
class DynamicNtk(Unscaled):
    """The timescale grows for sequences beyond `pretrained` (transformers: ``dynamic``).

    Attributes:
        length: tokens per sequence.
    """

    length: int

    def frequencies(self, base: float, pairs: int, factor: float, pretrained: int) -> np.ndarray:
        """See `RopeScaling`."""
        beyond = max(self.length, pretrained) / pretrained
        growth = (factor * beyond - (factor - 1)) ** (pairs / (pairs - 1))
        return plain_frequencies(base * growth, pairs)


@dataclass(frozen=True, kw_only=True)
class LongRope:
    """LongRoPE (arXiv 2402.13753): every pair has its own factor, found by a search.

    Attributes:
        factors: of each pair.
    """

    factors: tuple[float, ...]

    def frequencies(self, base: float, pairs: int, factor: float, pretrained: int) -> np.ndarray:
        """See `RopeScaling`."""
        return plain_frequencies(base, pairs) / np.asarray(self.factors, np.float64)

    def output_scale(self, factor: float, pretrained: int) -> float:
        """√(1 + ln factor / ln pretrained) (section 3.3)."""
        return math.sqrt(1 + math.log(factor) / math.log(pretrained)) if factor > 1 else 1.0


def yarn_scale(factor: float, weight: float = 1.0) -> float:
    """YaRN's temperature (section 3.3): 0.1 · weight · ln(factor) + 1."""
    return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0


def _slowed(plain: np.ndarray, factor: float, share: np.ndarray) -> np.ndarray:
    """Frequencies, each slowed by a share of the factor, from 0 to 1."""
    return plain * (1 - (1 - 1 / factor) * share)
