"""Comparing floats of two different programs on any CPU."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np

_EPS = float(np.finfo(np.float32).eps)
_MARGIN = 4  # the worst seen on AVX-512, AVX2 and SSE4.2 was 0.6


def assert_close_as_float32(actual: Any, expected: Any, *, terms: int) -> None:
    """Asserts that every leaf of two trees agrees as far as float32 can promise.

    Compilers sum in the order that suits the CPU's vector width, and fuse multiplications with
    additions where the CPU can. The rounding of a sum of n terms grows with √n (Higham, Accuracy
    and Stability of Numerical Algorithms, section 2.8), in proportion to the terms rather than to
    the sum: an element near zero is as far off as the largest. So a leaf may be off by
    4·eps·√terms of its largest element: 1.5e-5 of it for 1,000 terms.

    Args:
      actual: tree of arrays or numbers; computed in float32.
      expected: tree of the same structure and shapes; finite.
      terms: length of the longest sum between the inputs and a leaf.
    """
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for got, want in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
        assert got.shape == want.shape
        assert np.isfinite(want).all()
        tolerance = _MARGIN * _EPS * math.sqrt(terms) * float(np.abs(want).max(initial=0.0))
        np.testing.assert_allclose(got, want, rtol=0, atol=tolerance)
