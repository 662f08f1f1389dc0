"""Comparing floats of two different programs on any CPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

_EPS = float(np.finfo(np.float32).eps)
_MARGIN = 4  # the worst seen on AVX-512, AVX2 and SSE4.2 was 0.6
_ROUNDINGS = 8
_ROUNDING_MARGIN = 4  # the worst row of 20 models was 1.3, with and without LLVM's optimisation


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


def assert_differs_by_rounding(
    function: Callable[[Any], Any], weights: Any, expected: np.ndarray
) -> None:
    """Asserts that `function(weights)` agrees with `expected`, computed by another program.

    A program that rounds every operation returns the exact result of inputs a few eps away
    (Higham, section 1.5). How far that moves the result depends on the model: a token whose norm
    divides by little is off by a hundred times more than its neighbours. So it is measured, row by
    row, as the largest change over eight roundings, each of which moves every weight by ±eps.

    Args:
      function: computes in float32; returns [..., features].
      weights: tree of float32 arrays.
      expected: [..., features], finite.
    """
    assert np.isfinite(expected).all()
    got = np.asarray(function(weights))
    moved = [
        np.abs(np.asarray(function(_rounded(weights, seed))) - got).max(-1)
        for seed in range(_ROUNDINGS)
    ]
    off = np.abs(got - expected).max(-1)
    assert got.shape == expected.shape
    np.testing.assert_array_less(off, _ROUNDING_MARGIN * np.max(moved, axis=0))


def _rounded(weights: Any, seed: int) -> Any:
    """The tree with each number off by ±eps of itself, at random."""
    generator = np.random.default_rng(seed)

    def off(leaf: Any) -> np.ndarray:
        signs = generator.choice(np.array([-1, 1], np.float32), np.shape(leaf))
        return np.asarray(leaf) * (1 + np.float32(_EPS) * signs)

    return jax.tree.map(off, weights)
