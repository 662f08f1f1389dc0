"""Whether one run is faster than another: medians of windows, and an interval of their difference.

A run is cut into windows of equal length. The median of a window ignores its outliers. The trimmed
mean of all medians is the run's time, and their scatter its uncertainty, wider where neighbours are
alike: step times that drift say less than independent ones. Logarithms make it a difference of
ratios. Welch's t interval with Yuen's trimmed means; the autocorrelation of first order shrinks the
number of windows, as in batch means. Of several runs A, the scatter between them is known, too:
B is compared with what another one of them would be.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.99  # one verdict in a hundred is a false alarm
_MOST_WINDOWS = 64
_STEPS_OF_A_WINDOW = 5
_FEWEST_WINDOWS = 4
_TRIMMED = 0.1
# Of neighbouring windows. A drift looks like 1, which would leave one window of a whole run.
_HIGHEST_CORRELATION = 0.7
_FEWEST_DEGREES = 2.0


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The change of a positive quantity from run A to run B.

    Attributes:
        a: median of run A, of all its values; of several runs, the median of theirs.
        b: median of run B.
        change: B / A − 1, of the windows' medians.
        low: lower end of the change's interval; None if there are too few values for one.
        high: its upper end.
        windows: how many windows of A and of B.
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
        """Whether the interval excludes no change."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)

    @property
    def half_width(self) -> float | None:
        """Half of the interval."""
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


def compare(
    a: Sequence[float], b: Sequence[float], *, confidence: float = CONFIDENCE
) -> Difference:
    """The change from A to B.

    Args:
        a: of each measured step, in their order, above 0; at least one.
        b: the same of the other run.
        confidence: of the interval.

    >>> difference = compare([1.0, 1.01, 0.99] * 40, [1.02, 1.03, 1.01] * 40)
    >>> difference.is_real, round(difference.change, 3)
    (True, 0.02)
    """
    return compare_with_repeats([a], b, confidence=confidence)


def compare_with_repeats(
    runs: Sequence[Sequence[float]], b: Sequence[float], *, confidence: float = CONFIDENCE
) -> Difference:
    """The change from repeats of one run to B.

    Args:
        runs: each as `compare` takes A; of two or more, their scatter widens the interval.
        b: as `compare` takes it.
        confidence: of the interval.

    >>> runs = [[x, 1.01 * x, 0.99 * x] * 40 for x in (1.0, 1.03, 0.97, 1.02)]
    >>> compare_with_repeats(runs, [1.02, 1.03, 1.01] * 40).is_real
    False
    """
    of_a, of_b = _repeated([_estimate(run) for run in runs]), _estimate(b)
    change = of_b.mean - of_a.mean
    margin = _margin(of_a, of_b, confidence)
    return Difference(
        a=statistics.median(map(statistics.median, runs)),
        b=statistics.median(b),
        change=math.expm1(change),
        low=None if margin is None else math.expm1(change - margin),
        high=None if margin is None else math.expm1(change + margin),
        windows=(of_a.windows, of_b.windows),
    )


@dataclass(frozen=True)
class _Estimate:
    """A run's mean logarithm, the variance of that mean, and its degrees of freedom."""

    mean: float
    variance: float
    degrees: float
    windows: int


def window_medians(values: Sequence[float]) -> list[float]:
    """The median of each window; fewer than four values are windows of their own."""
    fewest = min(_FEWEST_WINDOWS, len(values))
    count = min(_MOST_WINDOWS, max(len(values) // _STEPS_OF_A_WINDOW, fewest))
    ends = [len(values) * i // count for i in range(count + 1)]
    return [statistics.median(values[ends[i] : ends[i + 1]]) for i in range(count)]


def _estimate(values: Sequence[float]) -> _Estimate:
    medians = [math.log(median) for median in window_medians(values)]
    count = len(medians)
    cut = int(_TRIMMED * count)
    kept = sorted(medians)[cut : count - cut]
    mean = math.fsum(kept) / len(kept)
    if count < _FEWEST_WINDOWS:
        return _Estimate(mean, math.nan, 0.0, count)
    winsorized = [min(max(median, kept[0]), kept[-1]) for median in medians]
    center = math.fsum(winsorized) / count
    squares = math.fsum((median - center) ** 2 for median in winsorized)
    stretch = _stretch(winsorized, center, squares)
    variance = squares / (len(kept) * (len(kept) - 1)) * stretch
    return _Estimate(mean, variance, max(len(kept) / stretch - 1, 1.0), count)


def _repeated(runs: Sequence[_Estimate]) -> _Estimate:
    """The mean of repeats; the variance is that of its difference from one more repeat.

    Each mean scatters by its run's own variance, and by what differs between repeats. The latter
    counts once more for the other run, whose own variance comes on top.
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
    return _Estimate(math.fsum(means) / count, variance, degrees, windows)


def _stretch(medians: Sequence[float], center: float, squares: float) -> float:
    """How many windows say as much as one independent one: (1 + ρ) / (1 − ρ), 1 or above."""
    if squares <= 0:
        return 1.0
    products = ((x - center) * (y - center) for x, y in itertools.pairwise(medians))
    found = math.fsum(products) / squares
    found += (1 + 4 * found) / len(medians)  # its bias (Kendall, 1954)
    correlation = min(max(found, 0.0), _HIGHEST_CORRELATION)
    return (1 + correlation) / (1 - correlation)


def _margin(a: _Estimate, b: _Estimate, confidence: float) -> float | None:
    """Half of the interval of the logarithms' difference (Welch and Satterthwaite)."""
    variance = a.variance + b.variance
    if math.isnan(variance):
        return None
    if variance == 0:
        return 0.0
    degrees = variance**2 / (a.variance**2 / a.degrees + b.variance**2 / b.degrees)
    quantile = _student_quantile(0.5 + confidence / 2, max(degrees, _FEWEST_DEGREES))
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
