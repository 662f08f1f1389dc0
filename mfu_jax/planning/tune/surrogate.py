"""A small model of a number over the settings: Gaussian-process regression in plain numpy.

Each axis has an effect of its own, and all of them together an interaction (Rasmussen and Williams,
Gaussian Processes for Machine Learning, 2006, chapters 2 and 5). Numeric axes, such as the batch,
are compared by the logarithm of their value, others by equality.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mfu_jax.planning.tune.space import Point, Space

_Array = NDArray[np.floating[Any]]

_BIAS = 0.5  # standard deviation of the mean
_AMPLITUDE = 0.3  # of the effects, as a logarithm: about 30%
_INTERACTION = 0.3  # its share of their variance
_ALIKE = 0.3  # how alike two points stay for the interaction where an axis differs


class Surrogate:
    """Learns a number, such as the logarithm of a time, from the points where it is known.

    Args:
        space: the points' axes.
        noise: standard deviation of a value.
    """

    def __init__(self, space: Space, noise: float) -> None:
        self._noise = noise
        columns = [axis.positions for axis in space.axes]
        self._numeric = [column is not None for column in columns]
        self._columns = [
            np.arange(size, dtype=float) if column is None else np.array(column)
            for column, size in zip(columns, space.sizes, strict=True)
        ]
        self._points: list[Point] = []

    def fit(self, points: Sequence[Point], values: Sequence[float]) -> None:
        """Takes all known values in place of the earlier ones."""
        self._points = list(points)
        self._mean = float(np.mean(values)) if len(values) else 0.0
        self._values = np.asarray(values, dtype=float) - self._mean
        covariance = self._covariance(self._points, self._points)
        self._factor = np.linalg.cholesky(covariance + self._noise**2 * np.eye(len(points)))
        self._weights = _solved(self._factor, self._values)

    def predict(self, points: Sequence[Point]) -> tuple[_Array, _Array]:
        """Mean and standard deviation at each point."""
        lines = self._lines(points)
        own = _BIAS**2 + _AMPLITUDE**2 * (1 + (lines**2).sum(1))
        if not self._points:
            return np.zeros(len(points)), np.sqrt(own)
        across = self._covariance(points, self._points)
        known = np.linalg.solve(self._factor, across.T)
        spread = np.sqrt(np.maximum(own - (known**2).sum(0), 1e-12))
        return self._mean + across @ self._weights, spread

    def _lines(self, points: Sequence[Point]) -> _Array:
        """log2 of numeric choices, from the middle of their axis, [points, numeric axes]."""
        taken = [
            column[[point[i] for point in points]] - column.mean()
            for i, column in enumerate(self._columns)
            if self._numeric[i]
        ]
        size = math.sqrt(len(self._columns))
        return np.stack(taken, axis=1) / size if taken else np.zeros((len(points), 1))

    def _similarities(self, some: Sequence[Point], others: Sequence[Point]) -> _Array:
        """Similarity of each pair on each axis, [axes, some, others]."""
        each = []
        for i, column in enumerate(self._columns):
            apart = column[[p[i] for p in some]][:, None] - column[[p[i] for p in others]]
            each.append(np.exp(-(apart**2) / 2) if self._numeric[i] else (apart == 0).astype(float))
        return np.stack(each)

    def _covariance(self, some: Sequence[Point], others: Sequence[Point]) -> _Array:
        alike = self._similarities(some, others)
        together = np.prod(_ALIKE + (1 - _ALIKE) * alike, axis=0)
        lines = self._lines(some) @ self._lines(others).T
        effects = (1 - _INTERACTION) * alike.mean(0) + _INTERACTION * together + lines
        return _BIAS**2 + _AMPLITUDE**2 * effects


def _solved(factor: _Array, values: _Array) -> _Array:
    return np.linalg.solve(factor.T, np.linalg.solve(factor, values))
