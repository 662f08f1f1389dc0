"""The range of a prediction, by a prediction interval worked out here."""

import dataclasses
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


def test_the_range_is_around_the_mean_of_the_errors(monkeypatch):
    assert _run(2.0).error == -0.5
    runs = [_run(2.0 * math.exp(k)) for k in (-1, 1, -1, 1)]
    monkeypatch.setattr(module, "compared_runs", lambda: tuple(runs))
    low, high = residuals("tpu")
    assert low * high == pytest.approx(4.0)  # runs take twice the prediction


def test_a_newer_compiler_has_a_range_of_its_own(monkeypatch):
    """Its plans are shorter: it hides what the older one waits for."""
    runs = [_run(math.exp(k / 10), newer_seconds=0.5) for k in (-1, 1, -1, 1)]
    monkeypatch.setattr(module, "compared_runs", lambda: tuple(runs))
    older, newer = (
        residuals("tpu", compiled_by=f"jax 0, libtpu 0.0.{number}") for number in ("42.1", "50.1")
    )
    assert newer == pytest.approx([2 * ratio for ratio in older])
    monkeypatch.setattr(module, "compared_runs", lambda: (*runs, _run(9.0)))
    assert residuals("tpu", compiled_by="libtpu 0.0.43") == newer  # one that it has not planned


def test_models_with_experts_have_a_range_of_their_own_and_no_narrower_one_than_all(monkeypatch):
    few = [_run(math.exp(k / 10)) for k in (-1, 1, -1, 1)]
    many = [_run(math.exp(k), experts=True) for k in (-1, 1, -1, 1)]
    monkeypatch.setattr(module, "compared_runs", lambda: (*few, *many))
    dense, experts, unknown = (residuals("tpu", of) for of in (False, True, None))
    assert math.log(experts[1]) == pytest.approx(10 * math.log(dense[1]))
    assert dense[1] < unknown[1] < experts[1]
    other = [dataclasses.replace(run, experts=not run.experts) for run in (*few, *many)]
    monkeypatch.setattr(module, "compared_runs", lambda: tuple(other))
    assert residuals("tpu", True) == pytest.approx(unknown)


def test_ranges_hold_nine_of_ten_runs_of_a_chip_whose_runs_are_left_out(monkeypatch):
    chips = {"ironwood": "tpu7x"}
    groups: dict[str, list[ComparedRun]] = {}
    for run in compared_runs():
        if run.platform == "tpu" and not run.fitted:
            name = run.run.partition("-")[0]
            groups.setdefault(chips.get(name, name), []).append(run)
    held, runs = 0, [run for group in groups.values() for run in group]
    for group in groups.values():
        others = tuple(run for run in runs if run not in group)
        monkeypatch.setattr(module, "compared_runs", lambda others=others: others)
        for run in group:
            low, high = residuals("tpu", run.experts)
            held += low <= run.measured_seconds / run.predicted_seconds <= high
    assert sorted(groups) == ["tpu7x", "v5e", "v5p", "v6e"]
    assert held >= 0.9 * len(runs)


def test_no_measured_run_is_faster_than_its_bound():
    runs = compared_runs()
    assert runs
    assert all(run.bound_seconds <= 1.02 * run.measured_seconds for run in runs)
