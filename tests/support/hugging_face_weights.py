"""Weights that depend on their name and shape alone, so that two frameworks can make the same."""

from __future__ import annotations

import math
import zlib

import numpy as np


def named_weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Normal numbers scaled by the last dimension; about 1 in norms."""
    generator = np.random.default_rng(zlib.crc32(name.encode()))
    values = generator.normal(size=shape)
    if "norm" in name or ".ln_" in name:
        return (1 + 0.1 * values).astype(np.float32)
    if len(shape) == 1:
        return (0.3 * values).astype(np.float32)
    return (values / math.sqrt(shape[-1])).astype(np.float32)
