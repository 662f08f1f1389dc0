"""HFU and the tensor cores' counter, over the same seconds."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from mfu_jax.logger.health.cross_check import CountCheck, TensorActivity
from mfu_jax.logger.records.step_cost import StepCost
from mfu_jax.logger.timing.timed_step import TimedStep
from mfu_jax.sinks import StepRecord

COUNT = "hardware/tensor_active_by_count"


def record(end: float, seconds: float, hfu: float | None) -> StepRecord:
    scalars = {"perf/step_time_seconds": seconds}
    if hfu is not None:
        scalars["perf/hfu"] = hfu
    return StepRecord(step=0, unix_seconds=end, scalars=scalars)


def compared(
    check: CountCheck,
    steps: list[StepRecord],
    waits: dict[float, float] | None = None,
    cost: StepCost | None = None,
) -> Iterator[tuple[dict[str, float], list[str]]]:
    """What each step completes; `waits`: end of a step → seconds of data that it waited for."""
    for found in steps:
        step = TimedStep()
        step.cost = cost
        if waits and found.unix_seconds in waits:
            step.spans = {"data_wait": waits[found.unix_seconds]}
        yield check.on_step(step, found)


def test_steps_count_by_their_part_in_the_interval() -> None:
    """0.4 for 1 of 4 s, 0.8 for 2 of them, 0.2 for the last: (0.4 + 1.6 + 0.2) / 4 = 0.55."""
    check = CountCheck()
    check.add_interval(TensorActivity(1.0, 5.0, 0.6))
    steps = [record(2.0, 2.0, 0.4), record(4.0, 2.0, 0.8), record(8.0, 4.0, 0.2)]
    nothing, _, (scalars, notes) = compared(check, steps)
    assert nothing == ({}, [])
    assert scalars == {"hardware/tensor_active": 0.6, COUNT: pytest.approx(0.55)}
    assert notes == []


def test_a_slower_clock_is_busy_for_longer() -> None:
    """1,464 of 1,830 MHz is 0.8: the work of 40% of the cycles at the peak's clock takes 50%."""
    check = CountCheck()
    check.add_interval(TensorActivity(0.0, 2.0, 0.5, clock=1464 / 1830))
    (found,) = compared(check, [record(2.0, 2.0, 0.4)])
    assert found[0][COUNT] == pytest.approx(0.5)


def test_waits_for_data_are_idle_and_other_pauses_are_not_compared() -> None:
    check = CountCheck()
    check.add_interval(TensorActivity(0.0, 4.0, 0.3))
    check.add_interval(TensorActivity(4.0, 8.0, 0.3))
    steps = [record(2.0, 2.0, 0.6), record(4.0, 1.0, 0.6), record(8.0, 1.0, 0.6)]
    found = list(compared(check, steps, waits={4.0: 1.0}))
    assert found[1][0][COUNT] == pytest.approx(0.6 * 3 / 4)
    assert found[2] == ({}, [])  # three seconds were an evaluation


def test_steps_without_executed_flops_are_not_compared() -> None:
    check = CountCheck()
    check.add_interval(TensorActivity(0.0, 2.0, 0.3))
    assert list(compared(check, [record(1.0, 1.0, 0.6), record(2.0, 1.0, None)])) == [({}, [])] * 2


def notes_of(
    counter: Callable[[int], float],
    times: int = 40,
    cost: StepCost | None = None,
    *,
    is_tpu: bool = False,
) -> list[str]:
    """The notes of a run with an HFU of 40%; of GPUs without tiles if no cost is given."""
    check = CountCheck(is_tpu=is_tpu)
    cost = cost or cost_with(None)
    count = 0.4
    steps = []
    for i in range(times):
        check.add_interval(TensorActivity(10.0 * i, 10.0 * i + 10, counter(i)))
        steps += [record(10.0 * i + 5, 5.0, count), record(10.0 * i + 10, 5.0, count)]
    return list(itertools.chain(*(notes for _, notes in compared(check, steps, cost=cost))))


def test_what_tiles_explain_is_not_told() -> None:
    assert notes_of(lambda _: 0.4 * 1.09) == []
    assert notes_of(lambda _: 0.4 * 0.91) == []


def cost_with(tiles: int | None) -> StepCost:
    """Of 100 executed FLOPs, for which the device runs so many."""
    return StepCost(
        model_flops_per_device=100, executed_flops_per_device=100, hardware_flops_per_device=tiles
    )


def test_the_tiles_of_the_ledger_are_in_the_count() -> None:
    """A matmul of 4000 x 1111 x 777 runs 9,663,676,416 FLOPs for 6,905,976,000: 1.40 times."""
    check = CountCheck()
    check.add_interval(TensorActivity(0.0, 2.0, 0.56))
    (found,) = compared(check, [record(2.0, 2.0, 0.4)], cost=cost_with(140))
    assert found[0][COUNT] == pytest.approx(0.56)
    assert notes_of(lambda _: 0.56, cost=cost_with(140)) == []
    assert notes_of(lambda _: 0.56, cost=cost_with(None))


def test_with_the_tiles_of_the_ledger_less_is_left_to_explain() -> None:
    assert notes_of(lambda _: 0.4 * 1.04, cost=cost_with(100)) == []
    assert notes_of(lambda _: 0.4 * 1.06, cost=cost_with(100))
    assert notes_of(lambda _: 0.4 * 1.06, cost=cost_with(None)) == []


def test_at_its_power_limit_a_clock_is_not_known_well() -> None:
    """What NVML read of healthy steps of Llama 3.2 1B on an H200: 71.5% by counter, 62.2% by count.

    By the same numbers a GPU below its limit has a wrong count.
    """
    noted = []
    for at_limit in (True, False):
        check = CountCheck()
        for i in range(40):
            check.add_interval(TensorActivity(10.0 * i, 10.0 * i + 10, 0.715, 1.0, at_limit))
        steps = [record(10.0 * i + 10, 10.0, 0.622) for i in range(40)]
        found = compared(check, steps, cost=cost_with(100))
        noted.append([note for _, notes in found for note in notes])
    assert noted[0] == []
    assert len(noted[1]) == 1


def test_twice_as_much_is_first_of_all_a_dtype_and_told_once() -> None:
    (note,) = notes_of(lambda _: 0.8)
    assert note.startswith(
        "the tensor cores are active 80.0% of the time by their counter, 40.0% by the executed "
        "FLOPs, 2.00 times; usually a peak of a dtype"
    )
    (note,) = notes_of(lambda _: 0.2)
    assert "0.50 times; usually a peak of a dtype" in note


def test_more_and_fewer_have_their_own_causes() -> None:
    (more,) = notes_of(lambda _: 0.56)  # 1.40: Triton's tiles of 4000 x 1111 x 777
    assert "1.40 times; usually a kernel without FLOPs" in more
    (fewer,) = notes_of(lambda _: 0.3)
    assert "0.75 times; usually FLOPs of the whole job" in fewer


def test_noise_is_not_a_disagreement() -> None:
    """A TPU's tensor core is seen for 10 µs of every second: on or off, and on 40% of the time."""
    assert notes_of(lambda i: float(i % 5 in (0, 3)), is_tpu=True) == []
    assert notes_of(lambda i: 0.7 + 0.2 * (i % 2))
    assert notes_of(lambda i: 0.7 + 0.2 * (i % 2), is_tpu=True)


def test_equal_readings_are_no_proof() -> None:
    """Three samples of 10 µs are all on in 6% of the runs that are active for 40% of the time."""
    assert notes_of(lambda _: 1.0, times=29, is_tpu=True) == []
    assert notes_of(lambda _: 1.0, times=30, is_tpu=True)
    assert notes_of(lambda _: 0.8, times=9) == []
    assert notes_of(lambda _: 0.8, times=10)
    # 6% more in ten readings, each known to 2 percent points, is noise; in forty it is not.
    assert notes_of(lambda _: 0.4 * 1.06, times=10, cost=cost_with(100)) == []


@pytest.mark.parametrize("is_tpu", [False, True])
def test_correct_counts_are_not_told_in_an_hour(*, is_tpu: bool) -> None:
    """360 readings of 100 runs: a TPU's core on or off, a GPU with 3 percent points of noise."""
    random = np.random.default_rng(0)
    told = 0
    for _ in range(100):
        noise = random.binomial(1, 0.4, 360) if is_tpu else random.normal(0.4, 0.03, 360)
        told += bool(notes_of(lambda i, noise=noise: float(noise[i]), times=360, is_tpu=is_tpu))
    assert told == 0


def test_a_step_before_its_count_is_done_says_nothing_about_tiles() -> None:
    check = CountCheck()
    uncounted = StepCost(model_flops_per_device=100)
    assert list(compared(check, [record(0.0, 1.0, None)], cost=uncounted)) == [({}, [])]
    found = []
    for i in range(40):
        check.add_interval(TensorActivity(10.0 * i, 10.0 * i + 10, 0.4 * 1.06))
        found += compared(check, [record(10.0 * i + 10, 10.0, 0.4)], cost=cost_with(100))
    assert sum(bool(notes) for _, notes in found) == 1  # 6% are more than 5%, known with tiles
