"""Chooses the next point: where a model of what is known expects to gain most, if it fits.

The model is a Gaussian-process regression in plain numpy: each axis has an effect of its own, and
all of them together an interaction (Rasmussen and Williams, Gaussian Processes for Machine
Learning, 2006, chapters 2 and 5). Numeric axes, such as the batch, are compared by the logarithm
of their value, others by equality.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mfu_jax.planning.tune.evidence import By, Trial, speed
from mfu_jax.planning.tune.space import Point, Space

_NOISE: dict[By, float] = {"run": 0.01, "plan": 0.002}  # of a time and of memory, as a fraction
_WORTH = 0.0005  # the least expected gain, as a fraction, that is worth a trial
_FAILURES = 2  # of a choice, and no success: it is given up
_OCTAVE = 1.0  # log2 of the ratio of two numbers from which on they are not alike
_STEP = 2  # from a batch that fits to the next: a much larger one rarely does
_BIAS = 0.5  # standard deviation of the mean
_AMPLITUDE = 0.3  # of the effects, as a logarithm: about 30%
_INTERACTION = 0.3  # its share of their variance
_FAR = 1e3  # apart, where two words of an axis differ: not alike at all
_ALIKE = 0.3  # how alike two points stay for the interaction where an axis differs

_Array = NDArray[np.floating[Any]]


class TuningSearch:
    """Trials of one kind, plans or runs, and where to look next.

    Args:
        space: what may be chosen.
        by: the kind.
        limit_bytes: memory of a device; 0: not known, then only trials say what fits.
        planned: planned speeds, if runs follow plans: only these points may be chosen, and what is
            learned is the ratio of measured and planned.
        is_valid: asked before a point is chosen.
        seed: of ties.

    Attributes:
        trials: what is known.
    """

    def __init__(
        self,
        space: Space,
        *,
        by: By,
        limit_bytes: int,
        planned: Mapping[Point, float] | None = None,
        is_valid: Callable[[Point], bool] = lambda point: True,
        seed: int = 0,
    ) -> None:
        self.space = space
        self.trials: dict[Point, Trial] = {}
        self._limit = limit_bytes
        self._planned = planned
        self._is_valid = is_valid
        self._rng = random.Random(seed)
        self._times, self._peaks = _Surrogate(space, _NOISE[by]), _Surrogate(space, _NOISE[by])

    def best(self) -> Point | None:
        """The fastest point that fits."""
        ok = [point for point, trial in self.trials.items() if trial.is_ok]
        return max(ok, key=lambda point: speed(self.trials[point]), default=None)

    def next(self) -> Point | None:
        """The point to try next; None if no other is expected to be worth it."""
        best = self.best()
        listed = self._planned or self.space.candidates(
            {self.space.start, best or self.space.start}
        )
        bad, (least, most) = self._given_up(), self._batches()
        points = [
            point
            for point in listed
            if point not in self.trials
            and least <= self.space.batch(point) <= most
            and not bad & set(enumerate(point))
        ]
        self._rng.shuffle(points)
        if not points:
            return None
        self._learn()
        mean, spread = self._expected(points)
        reached = None if best is None else -math.log(speed(self.trials[best]))
        gains = self._chances(points)
        if reached is not None:
            gains = gains * _expected_gain((reached - mean) / spread) * spread
        else:  # first something that fits, rather the fast than the slow
            gains = gains * np.exp(-np.clip(mean - mean.min(), 0, 3) / 3)
        untried = self._untried()
        for i in np.argsort(-gains):
            is_worth = reached is None or gains[i] >= _WORTH or untried & {*enumerate(points[i])}
            if is_worth and self._is_valid(points[i]):
                return points[i]
        return None

    def _untried(self) -> set[tuple[int, int]]:
        """Axis and choice of which nothing is known: no trial had it, or a number within 2×."""
        untried = set()
        for number, (axis, size) in enumerate(zip(self.space.axes, self.space.sizes, strict=True)):
            places = axis.positions or [_OCTAVE * choice for choice in range(size)]
            tried = {places[point[number]] for point in self.trials}
            untried |= {
                (number, choice)
                for choice, place in enumerate(places)
                if all(abs(place - other) >= _OCTAVE for other in tried)
            }
        return untried

    def predicted(self, point: Point) -> float:
        """The speed of a point, expected if it was not tried; 0: not known, or it does not fit."""
        if trial := self.trials.get(point):
            return speed(trial) if trial.is_ok else 0.0
        if self.best() is None or (self._planned is not None and point not in self._planned):
            return 0.0
        self._learn()
        return math.exp(-float(self._expected([point])[0][0]))

    def _learn(self) -> None:
        timed = {  # as if it had fitted; what no plan fits has nothing to compare with
            point: trial
            for point, trial in self.trials.items()
            if trial.step_time_seconds and (not self._planned or point in self._planned)
        }
        self._times.fit(
            list(timed), [-math.log(speed(t)) - self._prior(p) for p, t in timed.items()]
        )
        held = {p: t.memory_peak_bytes for p, t in self.trials.items() if t.memory_peak_bytes}
        self._peaks.fit(list(held), [math.log(size) for size in held.values()])

    def _prior(self, point: Point) -> float:
        return -math.log(self._planned[point]) if self._planned else 0.0

    def _expected(self, points: list[Point]) -> tuple[np.ndarray, np.ndarray]:
        """log of seconds for a token: mean and standard deviation."""
        mean, spread = self._times.predict(points)
        return mean + np.array([self._prior(point) for point in points]), spread

    def _chances(self, points: list[Point]) -> np.ndarray:
        """Probability that a point fits."""
        held = any(trial.memory_peak_bytes for trial in self.trials.values())
        if not (self._limit and held):
            return np.ones(len(points))
        mean, spread = self._peaks.predict(points)
        return _below((math.log(self._limit) - mean) / spread)

    def _batches(self) -> tuple[float, float]:
        """The least and the largest batch to try: where memory ends, near those that fit."""
        if not self._limit and all(trial.fits is not False for trial in self.trials.values()):
            return 0.0, math.inf
        fits = [self.space.batch(p) for p, trial in self.trials.items() if trial.is_ok]
        if not fits:
            return 0.0, self.space.batch(self.space.start)
        return min(fits) / _STEP, max(fits) * _STEP

    def _given_up(self) -> set[tuple[int, int]]:
        """Axis and choice of what failed in every trial, while others do not fail."""
        tried = [(c, t.source == "failed") for p, t in self.trials.items() for c in enumerate(p)]
        failures = Counter(choice for choice, has_failed in tried if has_failed)
        works = {choice for choice, has_failed in tried if not has_failed}
        axes = {axis for axis, _ in works}
        return {
            choice
            for choice, count in failures.items()
            if count >= _FAILURES and choice not in works and choice[0] in axes
        }


def _below(z: np.ndarray) -> np.ndarray:
    """The normal distribution's cumulative probability."""
    return np.array([(1 + math.erf(x / math.sqrt(2))) / 2 for x in z])


def _expected_gain(z: np.ndarray) -> np.ndarray:
    """Expected improvement of a normal variable, in standard deviations."""
    return z * _below(z) + np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)


class _Surrogate:
    """Learns a number, such as the logarithm of a time, from the points where it is known.

    Args:
        space: the points' axes.
        noise: standard deviation of a value.
    """

    def __init__(self, space: Space, noise: float) -> None:
        self._noise = noise
        known = [axis.positions for axis in space.axes]
        # Numbers lie on a line; words are far from each other.
        self._places = [
            _FAR * np.arange(size) if line is None else np.array(line)
            for line, size in zip(known, space.sizes, strict=True)
        ]
        self._lines = [
            np.zeros(size) if line is None else np.array(line) - np.mean(line)
            for line, size in zip(known, space.sizes, strict=True)
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
        own = _BIAS**2 + _AMPLITUDE**2 * (1 + (self._on_lines(points) ** 2).sum(1))
        if not self._points:
            return np.zeros(len(points)), np.sqrt(own)
        across = self._covariance(points, self._points)
        known = np.linalg.solve(self._factor, across.T)
        spread = np.sqrt(np.maximum(own - (known**2).sum(0), 1e-12))
        return self._mean + across @ self._weights, spread

    def _on_lines(self, points: Sequence[Point]) -> _Array:
        """log2 of numeric choices, from the middle of their axis, [points, axes]."""
        return _columns(self._lines, points) / math.sqrt(len(self._lines))

    def _covariance(self, some: Sequence[Point], others: Sequence[Point]) -> _Array:
        apart = _columns(self._places, some)[:, None] - _columns(self._places, others)
        alike = np.exp(-(apart**2) / 2)  # on each axis, [some, others, axes]
        together = np.prod(_ALIKE + (1 - _ALIKE) * alike, axis=-1)
        lines = self._on_lines(some) @ self._on_lines(others).T
        effects = (1 - _INTERACTION) * alike.mean(-1) + _INTERACTION * together + lines
        return _BIAS**2 + _AMPLITUDE**2 * effects


def _columns(of_axes: Sequence[_Array], points: Sequence[Point]) -> _Array:
    """The numbers of the points' choices, [points, axes]."""
    chosen = np.array(points, dtype=int).reshape(-1, len(of_axes))
    return np.stack([column[chosen[:, i]] for i, column in enumerate(of_axes)], axis=1)


def _solved(factor: _Array, values: _Array) -> _Array:
    return np.linalg.solve(factor.T, np.linalg.solve(factor, values))
