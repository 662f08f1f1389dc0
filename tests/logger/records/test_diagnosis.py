"""Impossible numbers are flagged with the cause that the numbers point to."""

import pytest

from mfu_jax.logger.metric_logger import MetricLogger
from mfu_jax.logger.records.step_cost import StepCost, diagnose
from tests.support.sinks import ListSink


def flags(seconds: float, **cost: float) -> dict[str, str]:
    step = StepCost(peak_flops_per_sec=1000.0, **cost)  # type: ignore[arg-type]
    return diagnose(step, step.rates(seconds))


def test_a_possible_step_has_no_flag() -> None:
    assert flags(1.0, model_flops_per_device=400, executed_flops_per_device=1000) == {}


def test_the_last_promille_of_a_peak_is_no_miracle() -> None:
    assert flags(1.0, model_flops_per_device=400, executed_flops_per_device=1004) == {}


def test_hardware_faster_than_its_peak_points_at_the_peak_first() -> None:
    found = flags(1.0, model_flops_per_device=1000, executed_flops_per_device=1500)
    assert list(found) == ["hfu_over_1"]
    text = found["hfu_over_1"]
    assert "HFU 150.0%" in text
    assert text.index("the peak is that of a lower precision") < text.index("of the whole job")


def test_many_times_the_peak_points_at_the_whole_jobs_flops_first() -> None:
    text = flags(1.0, model_flops_per_device=1000, executed_flops_per_device=8000)["hfu_over_1"]
    assert text.index("of the whole job") < text.index("the peak is that of a lower precision")


def test_an_mfu_over_1_with_a_possible_hfu_points_at_the_model_count() -> None:
    found = flags(1.0, model_flops_per_device=1600, executed_flops_per_device=800)
    assert list(found) == ["mfu_over_1", "hfu_below_mfu"]
    assert "the model FLOPs are too high" in found["mfu_over_1"]


def test_an_mfu_over_1_is_flagged_without_an_hfu() -> None:
    assert list(flags(1.0, model_flops_per_device=1600)) == ["mfu_over_1"]


def test_an_hfu_below_mfu_names_the_pairs_that_kernels_skip() -> None:
    found = flags(1.0, model_flops_per_device=800, executed_flops_per_device=600)
    assert list(found) == ["hfu_below_mfu"]
    assert "HFU 60.0%, MFU 80.0%: the program runs 0.75 × the model's" in found["hfu_below_mfu"]
    assert "convention=dense" in found["hfu_below_mfu"]


def test_equal_flops_over_different_peaks_are_no_alarm() -> None:
    # bf16 in the model, float32 in the program: its optimal time is longer or shorter.
    for seconds in (0.1, 0.9):
        assert not flags(
            1.0,
            model_flops_per_device=400,
            executed_flops_per_device=400,
            optimal_model_seconds=0.4,
            optimal_executed_seconds=seconds,
        )


def test_fewer_flops_are_an_alarm_even_if_a_lower_peak_makes_hfu_look_right() -> None:
    found = flags(
        1.0,
        model_flops_per_device=800,
        executed_flops_per_device=400,
        optimal_executed_seconds=0.9,
    )
    assert list(found) == ["hfu_below_mfu"]


def test_work_that_the_compiler_removed_is_no_alarm() -> None:
    cost = {"model_flops_per_device": 800, "executed_flops_per_device": 600}
    assert flags(1.0, **cost, removed_flops_per_device=200) == {}
    assert list(flags(1.0, **cost, removed_flops_per_device=100)) == ["hfu_below_mfu"]


def test_an_mfu_above_hfu_by_the_compilers_savings_is_explained_once() -> None:
    sink = ListSink()
    cost = StepCost(
        model_flops_per_device=600,
        executed_flops_per_device=400,
        removed_flops_per_device=200,
        peak_flops_per_sec=1000.0,
    )
    logger = MetricLogger(cost=cost, warmup_steps=1, sinks=[sink])
    for step in range(4):
        logger.record(step, {"loss": 1.0}, step_time_seconds=1.0)
    logger.close()
    (note,) = [note for record in sink.records for note in record.notes]
    assert "MFU is above HFU: the program runs 66.7% of the model's FLOPs" in note
    assert "saves 33.3%" in note
    assert sink.records[1].notes == (note,)
    assert [record.flags for record in sink.records] == [()] * 4


def test_bytes_faster_than_the_memory_are_flagged() -> None:
    found = flags(1.0, model_flops_per_device=1, bytes_per_device=200, peak_bytes_per_sec=100.0)
    assert list(found) == ["mbu_over_1"]


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_a_step_that_takes_no_time_is_flagged_and_has_no_rates(seconds: float) -> None:
    assert list(flags(seconds, model_flops_per_device=400)) == ["step_time_not_positive"]
    cost = StepCost(model_flops_per_device=400, tokens_per_device=5, peak_flops_per_sec=1000.0)
    rates = cost.rates(seconds)
    assert set(rates) == {
        "perf/step_time_seconds",
        "perf/per_device_tflops",
        "perf/per_device_tokens",
    }


def test_a_diagnosis_is_shown_once_but_every_step_is_marked_and_nothing_clipped() -> None:
    sink = ListSink()
    logger = MetricLogger(
        model_flops_per_device=3000, peak_flops_per_sec=1000.0, warmup_steps=1, sinks=[sink]
    )
    for step in range(4):
        logger.record(step, {"loss": 1.0}, step_time_seconds=1.0)
    summary = logger.close()
    assert sink.scalar("perf/mfu") == [3.0, 3.0, 3.0, 3.0]
    assert [record.flags for record in sink.records] == [(), *[("mfu_over_1",)] * 3]
    assert [len(record.notes) for record in sink.records] == [0, 1, 0, 0]
    assert summary.mfu == 3.0
    assert summary.flags == {"mfu_over_1": 3}
