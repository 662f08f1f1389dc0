"""Reports of simulated hosts, up to 1,024 of them: who is named, and who is not."""

import dataclasses
import random

import pytest

from mfu_jax.logger.hosts.findings import NONE_YET, HostReport, HostsView, slow_hosts, view_of

STEP = 0.5
PERIOD = 100


def healthy(chooser: random.Random, process: int, **changes: float) -> HostReport:
    """A report of a host that runs ahead of its device, with noise of 20% in all it does."""

    def about(seconds: float) -> float:
        return seconds * chooser.lognormvariate(0.0, 0.2)

    values = {
        "step_time": STEP * chooser.gauss(1.0, 0.001),
        "slack": STEP - about(0.02),
        "data": about(0.005),
        "python": about(0.002),
        "dispatch": about(0.003),
        "gc": about(0.0005),
        "cpu": about(0.3),
        "starved": about(0.005),
        "stopped": 0.0,
        **changes,
    }
    return HostReport(process=process, host=f"node{process}", step=PERIOD, steps=PERIOD, **values)


def job(count: int, seed: int, victim: int = -1, **changes: float) -> list[HostReport]:
    chooser = random.Random(seed)
    return [
        healthy(chooser, process, **(changes if process == victim else {}))
        for process in range(count)
    ]


FAULTS = {
    "data": {"late_data": 0.2, "data": 0.2, "slack": 0.0},
    "python": {"late_python": 0.2, "python": 0.2, "slack": 0.0},
    "dispatch": {"late_dispatch": 0.2, "dispatch": 0.2, "slack": 0.0},
    "gc": {"late_python": 0.2, "python": 0.2, "gc": 0.18, "slack": 0.0},
    "stopped": {"stopped": 0.2},
}


@pytest.mark.parametrize("cause", FAULTS)
@pytest.mark.parametrize("count", [2, 4, 1024])
def test_the_slow_host_is_named_with_its_cause(cause: str, count: int) -> None:
    for seed in range(20 if count < 1024 else 3):
        victim = seed % count
        (slow,) = slow_hosts(job(count, seed, victim, **FAULTS[cause]), compares_cpu=False)
        assert (slow.process, slow.cause, slow.host) == (victim, cause, f"node{victim}")


def test_a_wait_that_is_no_part_of_its_own_step_is_part_of_the_jobs() -> None:
    late = {"step_time": 0.1, "data": 0.4, "late_data": 0.4, "slack": 0.0}
    reports = job(2, 0, 1, **late)
    reports[0] = healthy(random.Random(0), 0, starved=0.2, cpu=0.3)  # no tenth of 0.5 s by itself
    (slow,) = slow_hosts(reports, compares_cpu=False)
    assert (slow.process, slow.step_time) == (1, pytest.approx(0.5, rel=0.01))


def test_several_slow_hosts_are_named_slowest_first() -> None:
    reports = job(1024, 0)
    for process, seconds in ((7, 0.1), (900, 0.3), (33, 0.2)):
        late = {"late_data": seconds, "data": seconds, "slack": 0.0}
        reports[process] = healthy(random.Random(1), process, **late)
    found = slow_hosts(reports, compares_cpu=False)
    assert [slow.process for slow in found] == [900, 33, 7]
    assert found[0].seconds == 0.3


def test_a_delay_that_the_host_runs_ahead_of_is_none() -> None:
    assert slow_hosts(job(4, 0, 2, data=0.2, python=0.2), compares_cpu=False) == []


def test_a_job_that_is_slow_everywhere_has_no_slow_host() -> None:
    late = {"late_data": 0.3, "data": 0.3, "slack": 0.0}
    reports = [healthy(random.Random(process), process, **late) for process in range(8)]
    assert slow_hosts(reports, compares_cpu=False) == []


def test_more_work_of_its_own_counts_where_the_processor_is_the_device() -> None:
    reports = job(4, 0, 1, cpu=1.2)
    (slow,) = slow_hosts(reports, compares_cpu=True)
    assert (slow.process, slow.cause) == (1, "compute")
    assert slow_hosts(reports, compares_cpu=False) == []


def test_milliseconds_of_the_processor_in_a_short_window_are_noise() -> None:
    """Windows of 12 steps of 11 ms, in which a healthy process had 8 ms more."""
    window = {"steps": 12, "step_time": 0.011, "starved": 0.0}

    def reports(cpu: float) -> list[HostReport]:
        others = job(4, 0, 1, cpu=0.003 + cpu)
        return [
            dataclasses.replace(r, cpu=r.cpu if r.process == 1 else 0.003, **window) for r in others
        ]

    assert slow_hosts(reports(0.008 / 12), compares_cpu=True) == []
    assert slow_hosts(reports(0.040 / 12), compares_cpu=True) == []
    (slow,) = slow_hosts(reports(0.060 / 12), compares_cpu=True)
    assert (slow.process, slow.cause) == (1, "compute")


@pytest.mark.parametrize(("cpu", "cause"), [(0.3, "starved"), (0.9, "compute")])
def test_waiting_for_a_core_is_blamed_on_more_work_if_there_is(cpu: float, cause: str) -> None:
    # 0.9 s of work beside 0.3 ± 20% is within five deviations of so few hosts at some seeds.
    for seed in range(10):
        (slow,) = slow_hosts(job(4, seed, 2, cpu=cpu, starved=2.0), compares_cpu=True)
        assert (slow.process, slow.cause) == (2, cause)
    assert slow_hosts(job(4, 0, 2, starved=0.2), compares_cpu=True) == []


def views(jobs: list[list[HostReport]], count: int) -> HostsView:
    view = NONE_YET
    for reports in jobs:
        view = view_of(reports, count=count, period=PERIOD, compares_cpu=False, before=view)
    return view


def test_healthy_hosts_are_never_named() -> None:
    for seed in range(1000):
        assert views([job(4, 2 * seed), job(4, 2 * seed + 1)], 4).notes == ()
    assert views([job(1024, 1), job(1024, 2)], 1024).notes == ()


def test_a_host_is_named_after_two_exchanges_once_and_when_it_recovers() -> None:
    slow, well = job(4, 0, 3, **FAULTS["data"]), job(4, 1)
    first = view_of(slow, count=4, period=PERIOD, compares_cpu=False)
    assert first.notes == ()
    second = view_of(slow, count=4, period=PERIOD, compares_cpu=False, before=first)
    assert [note[:42] for note in second.notes] == ["process 3 (node3) is slow: 0.200 s of a st"]
    assert second.scalars()["hosts/slowest"] == 3
    assert second.scalars()["hosts/slowest_data_seconds"] == 0.2
    third = view_of(slow, count=4, period=PERIOD, compares_cpu=False, before=second)
    assert third.notes == ()
    fourth = view_of(well, count=4, period=PERIOD, compares_cpu=False, before=third)
    assert fourth.notes == ("process 3 is no longer slow",)
    assert fourth.scalars()["hosts/slow"] == 0


def test_the_process_that_compares_is_not_missing_however_late_its_report() -> None:
    ahead = [dataclasses.replace(r, step=5 * PERIOD) for r in job(3, 0) if r.process]
    view = view_of([job(3, 0)[0], *ahead], count=3, period=PERIOD, compares_cpu=False)
    assert (view.missing, view.notes) == ((), ())


def test_missing_hosts_are_named_once() -> None:
    reports = [r for r in job(1024, 0) if r.process not in (5, 77)]
    first = view_of(reports, count=1024, period=PERIOD, compares_cpu=False)
    assert first.missing == (5, 77)
    assert first.scalars()["hosts/missing"] == 2
    (note,) = first.notes
    assert note.startswith("processes 5 (never heard), 77 (never heard) not heard")
    again = view_of(reports, count=1024, period=PERIOD, compares_cpu=False, before=first)
    assert again.notes == ()
