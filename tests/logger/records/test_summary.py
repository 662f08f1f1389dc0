"""Totals and percentiles against hand arithmetic and NumPy's percentile."""

import json
import math

import numpy as np
import pytest

from mfu_jax.logger.records.step_cost import StepCost, StepRates
from mfu_jax.logger.records.summary import StepStatistics, Summary, percentile, perf_means


def statistics(*steps: dict[str, float]) -> dict[str, float]:
    added = StepStatistics()
    for step in steps:
        added.add_many({name: [value] for name, value in step.items()})
    return added.fields()


def step(seconds: float, **utilisation: float) -> dict[str, float]:
    return {
        "perf/step_time_seconds": seconds,
        "perf/per_device_tokens": 100,
        "perf/per_device_tflops": 3.0,
        **{f"perf/{name}": value for name, value in utilisation.items()},
    }


def test_means_of_records_are_those_of_a_summary() -> None:
    """Two steps of 2 TFLOPs and 100 tokens in 1 and 3 s, one of 6 TFLOPs in 4 s, at 4 TFLOP/s."""
    cost = StepCost(
        model_flops_per_device=2 * 10**12,
        executed_flops_per_device=3 * 10**12,
        tokens_per_device=100,
        peak_flops_per_sec=4e12,
    )
    large = StepCost(model_flops_per_device=6 * 10**12, peak_flops_per_sec=4e12)
    steps = [(1.0, cost), (3.0, cost), (4.0, large)]
    means = perf_means([{**c.rates(s), "learning/loss": 1.0} for s, c in steps])
    assert means == {
        "perf/step_time_seconds": 8 / 3,
        "perf/per_device_tflops": 10 / 3,
        "perf/per_device_tflops_per_sec": 10 / 8,
        "perf/per_device_tokens": 100,
        "perf/per_device_tokens_per_sec": 200 / 4,  # of the steps that tell it
        "perf/mfu": 10 / (8 * 4),
        "perf/hfu": 6 / (4 * 4),
    }
    added = StepStatistics()
    for seconds, each in steps:
        added.add(seconds, StepRates(each))
    fields = added.fields()
    assert means["perf/mfu"] == pytest.approx(fields["mfu"], rel=1e-15)
    assert means["perf/hfu"] == pytest.approx(fields["hfu"], rel=1e-15)
    assert means["perf/per_device_tokens_per_sec"] == fields["tokens_per_sec_per_device"]
    assert perf_means([]) == {}


def test_a_phase_faster_than_its_peak_is_marked() -> None:
    phases = {
        name: {"times": 2, "seconds": 1.0, "tflops_per_sec_per_device": mfu, "mfu": mfu, "hfu": mfu}
        for name, mfu in (("rollout", 0.4), ("update", 6.3))
    }
    rollout, update = (
        row for row in Summary(steps=2, phases=phases).render().splitlines() if "phase" in row
    )
    assert rollout.endswith("MFU 40.0%, HFU 40.0%")
    assert update.endswith("MFU 630.0%, HFU 630.0%, impossible: over 100%")


@pytest.mark.parametrize("count", [1, 2, 7, 100])
@pytest.mark.parametrize("fraction", [0.0, 0.5, 0.9, 0.99, 1.0])
def test_percentiles_are_numpys(count: int, fraction: float) -> None:
    values = sorted(np.random.default_rng(count).lognormal(size=count).tolist())
    expected = np.quantile(values, fraction)
    assert percentile(values, fraction) == pytest.approx(expected, rel=1e-14)


def test_steps_of_several_costs_add_up() -> None:
    """Two steps of 2 TFLOPs and 100 tokens, one of 3 TFLOPs and 50 tokens at another peak."""
    first = StepRates(
        StepCost(model_flops_per_device=2 * 10**12, tokens_per_device=100, peak_flops_per_sec=4e12)
    )
    second = StepRates(
        StepCost(model_flops_per_device=3 * 10**12, tokens_per_device=50, peak_flops_per_sec=2e12)
    )
    added = StepStatistics()
    added.add(1.0, first)
    added.add(2.0, first)
    assert added.fields()["mfu"] == (0.5 + 0.5) / 3.0  # asked in between
    added.add(5.0, second)
    fields = added.fields()
    assert fields["steps"] == 3
    assert fields["tokens_per_sec_per_device"] == 250 / 8.0
    assert fields["tflops_per_sec_per_device"] == 7.0 / 8.0
    assert fields["mfu"] == (0.5 + 0.5 + 1.5) / 8.0
    assert "hfu" not in fields
    added.add(2.0, StepRates(StepCost(model_flops_per_device=None)))
    assert added.fields()["tflops_per_sec_per_device"] == 7.0 / 8.0  # of the steps that tell it
    assert added.fields()["tokens_per_sec_per_device"] == 250 / 8.0
    assert added.fields()["mfu"] == (0.5 + 0.5 + 1.5) / 8.0


def test_rates_are_totals_over_total_time_not_means_of_rates() -> None:
    fields = statistics(step(1.0, mfu=0.8, hfu=1.0), step(3.0, mfu=0.4, hfu=0.5))
    assert fields["steps"] == 2
    assert fields["tokens_per_sec_per_device"] == 200 / 4.0
    assert fields["tflops_per_sec_per_device"] == 6.0 / 4.0
    assert fields["mfu"] == pytest.approx((0.8 * 1.0 + 0.4 * 3.0) / 4.0)
    assert fields["hfu"] == pytest.approx((1.0 * 1.0 + 0.5 * 3.0) / 4.0)
    assert "mbu" not in fields
    assert fields["median_seconds"] == fields["mean_seconds"] == 2.0


def test_a_logger_and_a_reader_of_its_file_have_the_same_rates() -> None:
    """The batch grows, and one step's tokens are not told."""
    costs = [
        StepCost(model_flops_per_device=flops, tokens_per_device=tokens, peak_flops_per_sec=4e12)
        for flops, tokens in ((2 * 10**12, 100), (None, 0), (3 * 10**12, 150))
    ]
    added, lines = StepStatistics(), []
    for seconds, cost in zip((1.0, 2.0, 4.0), costs, strict=True):
        added.add(seconds, StepRates(cost))
        lines.append(StepRates(cost).at(seconds))
    assert "perf/per_device_tokens" not in lines[1]
    assert "perf/per_device_tokens_per_sec" not in lines[1]
    assert statistics(*lines) == added.fields()
    assert added.fields()["tokens_per_sec_per_device"] == 250 / 5.0


def test_without_tokens_there_is_no_rate_of_tokens() -> None:
    added = StepStatistics()
    added.add(1.0, StepRates(StepCost(model_flops_per_device=10**12)))
    assert "tokens_per_sec_per_device" not in added.fields()


def test_shares_add_up_to_one() -> None:
    uses = {"train": 6.0, "eval": 1.0, "data_wait": 0.5, "other": 0.5}
    summary = Summary(steps=1, total_seconds=8.0, seconds_by_use=uses)
    assert summary.shares == {"train": 0.75, "eval": 0.125, "data_wait": 0.0625, "other": 0.0625}
    assert summary.train_fraction == 0.75


def test_the_text_tells_what_was_measured_and_what_was_left_out() -> None:
    text = Summary(
        **statistics(step(0.5, mfu=0.4, hfu=0.5), step(0.5, mfu=0.4, hfu=0.5)),
        warmup_steps=1,
        compile_steps=2,
        last_loss=2.5,
        compile_seconds=4.0,
        compile_count=3,
        total_seconds=8.0,
        seconds_by_use={"train": 6.0, "compile": 2.0},
        flags={"mfu_over_1": 1},
    ).render()
    assert "2 measured steps (2 compile and 1 warm-up steps excluded)" in text
    assert "mean 0.500 s, median 0.500 s, p90 0.500 s, p99 0.500 s" in text
    assert "mean 6.000 TFLOP/s/device, 200.0 tokens/s/device" in text
    assert "mean MFU 40.0%, HFU 50.0%" in text
    assert "2.5000" in text
    assert "4.000 s for 3 executables" in text
    assert "8.000 s of this process: train 75.0%, compile 25.0%" in text
    assert text.endswith("mfu_over_1 in 1 step")


def test_printing_a_summary_shows_the_text_with_a_readable_loss() -> None:
    summary = Summary(**statistics(step(0.5, mfu=0.4)), last_loss=205603758669824.0)
    assert str(summary) == summary.render()
    assert "last loss    2.05604e+14" in str(summary).splitlines()[-1]


def test_a_run_without_a_measured_step_has_a_summary_too() -> None:
    summary = Summary(steps=0, warmup_steps=2)
    assert summary.render() == "summary: 0 measured steps (2 warm-up steps excluded)"
    assert summary.shares == {}
    assert summary.train_fraction is None


def test_json_has_every_field_and_is_valid_with_a_nan_loss() -> None:
    summary = Summary(
        **statistics(step(1.0, mfu=0.5)),
        last_loss=math.nan,
        total_seconds=2.0,
        seconds_by_use={"train": 1.0, "other": 1.0},
    )
    values = json.loads(json.dumps(summary.to_json(), allow_nan=False))
    assert values["median_seconds"] == 1.0
    assert values["mfu"] == 0.5
    assert values["hfu"] is None
    assert values["last_loss"] == "nan"
    assert values["shares"] == {"train": 0.5, "other": 0.5}
    assert values["train_fraction"] == 0.5


@pytest.mark.parametrize(
    ("compiled", "warm", "text"),
    [
        (1, 0, " (1 compile step excluded)"),
        (0, 2, " (2 warm-up steps excluded)"),
        (1, 1, " (1 compile and 1 warm-up steps excluded)"),
        (0, 0, ""),
    ],
)
def test_one_step_is_no_steps(compiled: int, warm: int, text: str) -> None:
    summary = Summary(steps=0, compile_steps=compiled, warmup_steps=warm)
    assert summary.render() == f"summary: 0 measured steps{text}"
