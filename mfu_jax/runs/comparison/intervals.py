"""Whether one run is faster than another: trimmed means, and an interval of their difference.

A run's time is the mean logarithm of its steps without the slowest and the fastest fifth:
outliers do not move it, and its variance is 0.7 of a median's. Its scatter is estimated from
windows of neighbouring steps: each window's value is the mean influence of its steps (clipped at
the ends of what is kept, as in Yuen's interval). Where neighbouring windows are correlated, as when
step times drift, their first-order autocorrelation reduces their effective number.
Logarithms turn the difference of two runs into a ratio; Welch's t interval. With several runs A,
the scatter between them is known, too: B is compared with what another repeat of A would be.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

CONFIDENCE = 0.99  # one false alarm in a hundred verdicts
_MOST_WINDOWS = 64
_STEPS_OF_A_WINDOW = 5
_FEWEST_WINDOWS = 4
_TRIMMED = 0.2  # of the steps, at each end
# Of neighbouring windows. Drift looks like 1, which would leave one window for a whole run.
_HIGHEST_CORRELATION = 0.7
_FEWEST_DEGREES = 2.0


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The change of a positive quantity from run A to run B.

    Attributes:
        a: trimmed mean of run A, of its logarithms; of several runs, the mean of theirs.
        b: the same of run B.
        change: B / A − 1.
        low: lower end of the change's interval; None if there are too few values.
        high: its upper end.
        windows: number of windows of A and of B.
    """

    a: float
    b: float
    change: float
    low: float | None
    high: float | None
    windows: tuple[int, int]

    @property
    def is_known(self) -> bool:
        """Whether there is an interval."""
        return self.low is not None

    @property
    def is_real(self) -> bool:
        """Whether the interval excludes a change of zero."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)

    @property
    def half_width(self) -> float | None:
        """Half the interval's width."""
        if self.low is None or self.high is None:
            return None
        return (self.high - self.low) / 2

    @property
    def inverse(self) -> Difference:
        """The change of 1 / quantity: of speed, if the quantity is a time."""
        low, high = (None if end is None else 1 / (1 + end) - 1 for end in (self.high, self.low))
        return Difference(
            a=1 / self.a,
            b=1 / self.b,
            change=1 / (1 + self.change) - 1,
            low=low,
            high=high,
            windows=self.windows,
        )


def compare_with_repeats(
    runs: Sequence[Sequence[float]],
    b: Sequence[float],
    *,
    rounding: float = 0.0,
) -> Difference:
    """The change from repeats of one run to B.

    Args:
        runs: a value per measured step of each, in order, all above 0; at least one. With two or
            more runs, their scatter widens the interval.
        b: the same for the other run.
        rounding: the values' resolution relative to them: for a log's 0.012 s, 1 / 12.

    >>> difference = compare_with_repeats([[1.0, 1.01, 0.99] * 40], [1.02, 1.03, 1.01] * 40)
    >>> difference.is_real, round(difference.change, 3)
    (True, 0.02)
    >>> runs = [[x, 1.01 * x, 0.99 * x] * 40 for x in (1.0, 1.03, 0.97, 1.02)]
    >>> compare_with_repeats(runs, [1.02, 1.03, 1.01] * 40).is_real
    False
    """
    of_a = _repeated([_estimate(run, rounding) for run in runs])
    of_b = _estimate(b, rounding)
    change = of_b.mean - of_a.mean
    margin = _margin(of_a, of_b)
    return Difference(
        a=math.exp(of_a.mean),
        b=math.exp(of_b.mean),
        change=math.expm1(change),
        low=None if margin is None else math.expm1(change - margin),
        high=None if margin is None else math.expm1(change + margin),
        windows=(of_a.windows, of_b.windows),
    )


@dataclass(frozen=True)
class _MeanLog:
    """A run's mean logarithm, the variance of that mean, and its degrees of freedom."""

    mean: float
    variance: float
    degrees: float
    windows: int


def window_ends(steps: int) -> list[int]:
    """Start of each window, and end of the last; with few steps, each is its own window."""
    fewest = min(_FEWEST_WINDOWS, steps)
    count = min(_MOST_WINDOWS, max(steps // _STEPS_OF_A_WINDOW, fewest))
    return [steps * i // count for i in range(count + 1)]


def _estimate(values: Sequence[float], rounding: float) -> _MeanLog:
    steps = len(values)
    cut = int(_TRIMMED * steps)
    kept = sorted(values)[cut : steps - cut]
    mean = _mean_log(kept)
    windows = _influences(values, kept[0], kept[-1], steps / len(kept))
    count = len(windows)
    if count < _FEWEST_WINDOWS:
        return _MeanLog(mean, math.nan, 0.0, count)
    squares = math.fsum(window**2 for window in windows)
    stretch = _stretch(windows, squares)
    variance = squares / (count * (count - 1)) * stretch + _rounded(kept, rounding)
    return _MeanLog(mean, variance, max(count / stretch - 1, 1.0), count)


def _mean_log(values: Sequence[float]) -> float:
    return math.fsum(map(math.log, values)) / len(values)


def _influences(values: Sequence[float], low: float, high: float, weight: float) -> list[float]:
    """How far each window pulls the trimmed mean from its centre.

    Args:
        values: of all steps.
        low: the smallest kept value.
        high: the largest kept value.
        weight: number of all steps / number of kept steps.
    """
    clipped = [low if x < low else high if x > high else x for x in values]
    means = [_mean_log(clipped[i:j]) for i, j in pairwise(window_ends(len(values)))]
    center = math.fsum(means) / len(means)
    return [weight * (mean - center) for mean in means]


def _repeated(runs: Sequence[_MeanLog]) -> _MeanLog:
    """The mean of repeats; the variance is that of its difference from one more repeat.

    Each mean scatters by its run's own variance, and by the differences between repeats. The latter
    count once more for the other run, whose own variance is added separately.
    """
    count = len(runs)
    if count == 1:
        return runs[0]
    means = [run.mean for run in runs]
    windows = sum(run.windows for run in runs)
    own = math.fsum(run.variance for run in runs) / count
    scatter = statistics.variance(means)
    if math.isnan(own) or scatter > own:
        variance, degrees = scatter / count + (scatter - own), count - 1.0
    else:
        variance, degrees = own / count, math.fsum(run.degrees for run in runs)
    return _MeanLog(math.fsum(means) / count, variance, degrees, windows)


def _rounded(kept: Sequence[float], rounding: float) -> float:
    """Variance of rounding that shifts all steps alike; scatter in step times averages it out."""
    if not rounding:
        return 0.0
    spread = statistics.pstdev(map(math.log, kept))
    scatter = math.exp(-((2 * math.pi * spread / rounding) ** 2))
    return rounding**2 / 12 * scatter


def _stretch(windows: Sequence[float], squares: float) -> float:
    """How many windows are worth one independent window: (1 + ρ) / (1 − ρ), at least 1."""
    if squares <= 0:
        return 1.0
    found = math.fsum(x * y for x, y in pairwise(windows)) / squares
    found += (1 + 4 * found) / len(windows)  # its bias correction (Kendall, 1954)
    correlation = min(max(found, 0.0), _HIGHEST_CORRELATION)
    return (1 + correlation) / (1 - correlation)


def _margin(a: _MeanLog, b: _MeanLog) -> float | None:
    """Half the interval of the logarithms' difference (Welch and Satterthwaite)."""
    variance = a.variance + b.variance
    if math.isnan(variance):
        return None
    if variance == 0:
        return 0.0
    degrees = variance**2 / (a.variance**2 / a.degrees + b.variance**2 / b.degrees)
    quantile = _student_quantile(0.5 + CONFIDENCE / 2, max(degrees, _FEWEST_DEGREES))
    return quantile * math.sqrt(variance)


def _student_quantile(probability: float, degrees: float) -> float:
    """Student's t by its expansion around the normal (Abramowitz and Stegun, 26.7.5).

    >>> round(_student_quantile(0.995, 10), 3), round(_student_quantile(0.975, 30), 3)
    (3.169, 2.042)
    """
    z = statistics.NormalDist().inv_cdf(probability)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + math.fsum(term / degrees**power for power, term in enumerate(terms, 1))
