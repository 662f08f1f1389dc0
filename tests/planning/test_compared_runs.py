"""The range of a prediction, by a prediction interval worked out here."""

import math

import pytest

from mfu_jax.planning import compared_runs as module
from mfu_jax.planning.compared_runs import ComparedRun, compared_runs, residuals


def _run(measured, platform="tpu", fitted=False):
    return ComparedRun(
        run="r",
        platform=platform,
        step="reference",
        measured_seconds=measured,
        predicted_seconds=1.0,
        bound_seconds=0.5,
        fitted=fitted,
    )


def test_the_range_is_a_prediction_interval_of_the_errors(monkeypatch):
    """Logarithms −2, −1, 1, 2 of ten percent: mean 0, variance 10/3; t of 3 is 2.353."""
    tenth = math.log(1.1)
    runs = [_run(math.exp(k * tenth)) for k in (-2, -1, 1, 2)]
    fitted, other = _run(9.0, fitted=True), _run(9.0, platform="cuda")
    monkeypatch.setattr(module, "compared_runs", lambda: (*runs, fitted, other))
    half = 2.353 * tenth * math.sqrt(10 / 3) * math.sqrt(5 / 4)
    low, high = residuals("tpu")
    assert low == pytest.approx(math.exp(-half))
    assert high == pytest.approx(math.exp(half))
    assert residuals("cuda") is None


def test_no_measured_run_is_faster_than_its_bound():
    runs = compared_runs()
    assert runs
    assert all(run.bound_seconds <= 1.02 * run.measured_seconds for run in runs)
