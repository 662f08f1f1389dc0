"""A/B verdicts on simulated runs whose difference is known."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence

import pytest
import scipy.stats

from mfu_jax.runs.comparison.gate import GateCheck
from mfu_jax.runs.comparison.intervals import Difference, compare_with_repeats, window_ends
from mfu_jax.runs.comparison.runs import STEP_TIME, MetricChange, result
from tests.campaigns.comparisons import campaign
from tests.support.run_noise import KINDS, UNSEEN_KINDS, step_times


def compare(a: Sequence[float], b: Sequence[float]) -> Difference:
    return compare_with_repeats([a], b)


def test_verdicts_on_pairs_of_runs_with_realistic_noise() -> None:
    """Of 200 steps; the whole campaign is run by hand."""
    found = campaign(15, 200, seed=1, kinds={**KINDS, **UNSEEN_KINDS})
    pairs = sum(counts.pairs for counts in found.values())
    assert pairs == 255
    assert sum(counts.false_alarms for counts in found.values()) <= 0.03 * pairs
    assert sum(counts.gate_alarms for counts in found.values()) <= 0.03 * pairs
    assert sum(counts.detected for counts in found.values()) >= 0.95 * pairs
    assert sum(counts.gate_detected for counts in found.values()) >= 0.95 * pairs


def test_windows_are_cut_without_gap_or_overlap() -> None:
    assert window_ends(103)[-3:] == [92, 97, 103]  # 103 / 5: 20 windows; 103 · 19 // 20 = 97
    assert len(window_ends(103)) == 20 + 1
    assert len(window_ends(1030)) == 64 + 1
    assert window_ends(4) == [0, 1, 2, 3, 4]
    assert window_ends(3) == [0, 1, 2, 3]


def test_the_change_is_that_of_the_middle_three_fifths() -> None:
    """Of ten steps the two fastest and the two slowest do not count."""
    a = [9.0, 1.0, 2.0, 4.0, 0.1, 2.0, 1.0, 4.0, 0.2, 7.0]
    b = [3.0 * value for value in a[:9]] + [1000.0]
    middle = math.prod([1.0, 1.0, 2.0, 2.0, 4.0, 4.0]) ** (1 / 6)
    assert compare([middle] * 10, a).change == pytest.approx(0.0)
    assert compare(a, b).change == pytest.approx(2.0)


def test_the_interval_of_independent_steps_is_yuens() -> None:
    """As SciPy computes it, of steps whose windows are not alike by chance."""
    rng = random.Random(8)
    a, b = ([math.exp(rng.gauss(0, 0.02)) for _ in range(320)] for _ in range(2))
    found = compare(a, b)
    logs = [[math.log(x) for x in run] for run in (a, b)]
    yuen = scipy.stats.ttest_ind(logs[1], logs[0], equal_var=False, trim=0.2)
    low, high = yuen.confidence_interval(0.99)
    assert found.change == pytest.approx(math.expm1((low + high) / 2))
    assert found.half_width is not None
    assert 0.9 < found.half_width / ((high - low) / 2) < 1.4  # of 64 windows instead of 320 steps


def test_the_interval_is_welchs_where_windows_are_single_steps() -> None:
    a, b = [1.0, 1.2, 1.1, 1.3], [1.3, 1.1, 1.4, 1.2]
    found = compare(a, b)
    means = [statistics.fmean(map(math.log, values)) for values in (a, b)]
    assert found.change == pytest.approx(math.exp(means[1] - means[0]) - 1)
    # Neighbours of both runs are unlike each other, so nothing widens the interval.
    variances = [statistics.variance(map(math.log, values)) / 4 for values in (a, b)]
    degrees = sum(variances) ** 2 / sum(v**2 / 3 for v in variances)
    assert degrees == pytest.approx(5.9, abs=0.15)
    assert found.low is not None
    margin = means[1] - means[0] - math.log1p(found.low)
    # Student's t at 0.995, from its table: 4.032 for 5 degrees, 3.707 for 6.
    assert 3.70 < margin / math.sqrt(sum(variances)) < 3.78


def test_a_run_that_remembers_is_known_less_well() -> None:
    rng = random.Random(3)
    independent = [math.exp(rng.gauss(0, 0.01)) for _ in range(320)]
    slow = [1 + 0.015 * math.sin(i / 30) + 0.001 * rng.gauss(0, 1) for i in range(320)]
    known, unknown = compare(independent, independent), compare(slow, slow)
    windows = [
        [statistics.fmean(run[i : i + 5]) for i in range(0, 320, 5)] for run in (independent, slow)
    ]
    spreads = [statistics.stdev(means) for means in windows]
    assert known.half_width is not None
    assert unknown.half_width is not None
    assert unknown.half_width / known.half_width > 1.8 * spreads[1] / spreads[0]


def test_outliers_and_a_burst_do_not_move_the_median() -> None:
    rng = random.Random(5)
    calm = [math.exp(rng.gauss(0, 0.005)) for _ in range(400)]
    rough = [value * (8.0 if i % 50 == 0 else 1.0) for i, value in enumerate(calm)]
    rough[100:125] = [1.5 * value for value in rough[100:125]]
    assert abs(compare(calm, rough).change) < 0.002


def test_the_inverse_of_a_time_is_a_speed() -> None:
    rng = random.Random(7)
    a, b = (step_times(KINDS["independent"], 200, rng, mean=m) for m in (2.0, 1.0))
    speed = compare(a, b).inverse
    assert speed.change == pytest.approx(1.0, abs=0.03)
    assert speed.low is not None
    assert speed.high is not None
    assert speed.low < speed.change < speed.high
    assert speed.a == pytest.approx(1 / statistics.median(a), rel=0.01)


def test_the_change_is_the_ratio_of_the_two_numbers_shown() -> None:
    """Also where most steps are fast and a third are slow, so that the medians say otherwise."""
    rng = random.Random(8)
    a = [rng.choice([1.0, 1.1, 5.0]) for _ in range(300)]
    b = [rng.choice([1.05, 1.2, 2.0]) for _ in range(300)]
    for found in (compare(a, b), compare(a, b).inverse):
        assert found.change == pytest.approx(found.b / found.a - 1, rel=1e-12)
    assert compare(a, b).change < 0 < statistics.median(b) / statistics.median(a) - 1
    repeats = compare_with_repeats([a, a[::2]], b)
    assert repeats.change == pytest.approx(repeats.b / repeats.a - 1, rel=1e-12)


def test_two_or_three_steps_have_no_interval_and_equal_ones_an_interval_of_zero() -> None:
    few = compare([1.0, 1.1, 1.2], [2.0] * 50)
    assert not few.is_known
    assert not few.is_real
    assert few.half_width is None
    even = compare([1.0] * 30, [1.02] * 30)
    assert even.is_real
    assert even.half_width == 0
    assert even.change == pytest.approx(0.02)
    assert not compare([1.0] * 30, [1.0] * 30).is_real


def test_of_a_short_run_a_larger_change_is_asked() -> None:
    """Of 50 steps √3 × 1%, as of 150 there are three times as many windows."""
    base = [1.0, 1.001, 0.999, 1.0, 1.0]
    for steps, factor, called in (
        (50, 1.015, "same"),
        (50, 1.02, "slower"),
        (150, 1.015, "slower"),
    ):
        runs = [[factor_of * x for x in base] * (steps // 5) for factor_of in (1.0, factor)]
        assert result(compare(*runs).inverse) == called
    few, many = (compare(base * n, [1.015 * x for x in base] * n) for n in (10, 30))
    checks = [
        GateCheck(row=MetricChange(metric=STEP_TIME, difference=d), threshold=0.01)
        for d in (few, many)
    ]
    assert [check.has_failed for check in checks] == [False, True]


def test_repeats_that_differ_are_no_regression_and_a_large_one_is_found() -> None:
    """Repeats scatter by 2%: of one baseline, most verdicts are wrong; of six, next to none."""
    rng = random.Random(0)

    def repeat(factor: float = 1.0) -> list[float]:
        mean = factor * (1 + rng.gauss(0, 0.02))
        return step_times(KINDS["independent"], 60, rng, mean=mean)

    alarms = {1: 0, 6: 0}
    detected, trials = 0, 60
    for _ in range(trials):
        runs, again = [repeat() for _ in range(6)], repeat()
        for count in alarms:
            alarms[count] += result(compare_with_repeats(runs[:count], again).inverse) != "same"
        detected += result(compare_with_repeats(runs, repeat(1.2)).inverse) == "slower"
    assert alarms[1] > trials / 3
    assert alarms[6] <= 0.05 * trials
    assert detected >= 0.95 * trials


def test_one_baseline_given_alone_is_the_comparison_of_two() -> None:
    rng = random.Random(1)
    a, b = (step_times(KINDS["heavy"], 200, rng) for _ in range(2))
    assert compare_with_repeats([a], b) == compare(a, b)


def test_repeats_that_are_alike_narrow_the_interval() -> None:
    """Four runs of the same mean say as much as one of four times the length."""
    rng = random.Random(2)
    a, b = (step_times(KINDS["independent"], 400, rng) for _ in range(2))
    one, four = compare(a, b), compare_with_repeats([a] * 4, b)
    assert one.half_width is not None
    assert four.half_width is not None
    assert four.half_width < one.half_width
    assert four.windows == (4 * 64, 64)
