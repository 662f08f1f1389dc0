"""The range of a prediction, by a prediction interval worked out here."""

import math

import pytest

from mfu_jax.planning.step_time import compared_runs as module
from mfu_jax.planning.step_time.compared_runs import ComparedRun, compared_runs, residuals


def _run(measured, platform="tpu", **keys):
    return ComparedRun(
        run="r",
        platform=platform,
        step="reference",
        measured_seconds=measured,
        predicted_seconds=1.0,
        bound_seconds=0.5,
        **keys,
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


def test_a_run_is_judged_by_the_prediction_that_does_not_know_it(monkeypatch):
    run = _run(2.0, left_out_seconds=1.5)
    assert run.error == -0.25
    runs = [_run(2.0 * math.exp(k), left_out_seconds=2.0) for k in (-1, 1, -1, 1)]
    monkeypatch.setattr(module, "compared_runs", lambda: tuple(runs))
    low, high = residuals("tpu")
    assert low * high == pytest.approx(1.0)  # around no error: of 2 s, not of 1 s


def test_models_with_experts_have_a_range_of_their_own(monkeypatch):
    few = [_run(math.exp(k / 10)) for k in (-1, 1, -1, 1)]
    many = [_run(math.exp(k), experts=True) for k in (-1, 1, -1, 1)]
    monkeypatch.setattr(module, "compared_runs", lambda: (*few, *many))
    dense, experts, unknown = (residuals("tpu", of) for of in (False, True, None))
    assert math.log(experts[1]) == pytest.approx(10 * math.log(dense[1]))
    assert dense[1] < unknown[1] < experts[1]


def test_no_measured_run_is_faster_than_its_bound():
    runs = compared_runs()
    assert runs
    assert all(run.bound_seconds <= 1.02 * run.measured_seconds for run in runs)
