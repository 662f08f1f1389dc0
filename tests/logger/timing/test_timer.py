"""Step times on a fake clock; expected values are the durations that the fake device was given."""

import threading

import pytest

from mfu_jax.logger.timing.readiness import Watcher
from mfu_jax.logger.timing.timed_step import Reading, TimedStep
from mfu_jax.logger.timing.timer import SHORT_WAITS
from tests.support.fake_device import FakeArray, FakeClock
from tests.support.timer_loop import Loop
from tests.support.work import HANG_SECONDS


def test_device_bound_steps_take_the_devices_time() -> None:
    loop = Loop()
    for seconds in (2.0, 1.0, 4.0, 1.0):
        loop.step(seconds, host=0.25)
    assert loop.seconds() == [2.0, 1.0, 4.0, 1.0]


def test_host_bound_steps_take_the_hosts_time() -> None:
    loop = Loop()
    for _ in range(3):
        loop.clock.advance(1.0)
        loop.step(0.25)
    loop.clock.advance(1.0)
    # Seen to end when the host comes back, which is once a second; the first began a second late.
    assert loop.seconds() == [2.0, 1.0, 1.0]


def test_a_step_seen_to_have_ended_before_the_next_call_ends_there() -> None:
    loop = Loop()
    for _ in range(3):
        loop.call(0.25)
        loop.clock.advance(1.0)
    assert loop.seconds() == [1.0, 1.0, 1.0]


def test_a_call_does_not_wait_for_the_step_in_flight() -> None:
    loop = Loop()
    loop.step(5.0)
    loop.timer.begin_call()
    assert loop.clock.now == 0.0
    loop.step(1.0)
    assert loop.seconds() == [5.0, 1.0]


def test_no_step_asks_for_a_watcher() -> None:
    loop = Loop()
    for host in (0.0, 3.0, 0.0, 3.0):
        loop.timer.begin_call()
        loop.step(1.0, host=host)
    assert loop.watcher.watched == []


def test_a_wait_asks_for_a_watcher_only_while_the_device_is_busy() -> None:
    loop = Loop()
    busy = loop.step(4.0)
    loop.wait(1.0)
    loop.step(1.0)
    loop.clock.advance(1.0)
    loop.wait(1.0)
    assert loop.watcher.watched == [busy]


def test_the_step_just_dispatched_is_never_waited_for() -> None:
    loop = Loop()
    loop.step(5.0)
    assert loop.clock.now == 0.0
    second = loop.step(5.0)
    assert loop.clock.now == 5.0
    assert not second.metrics["loss"].is_ready()


def test_time_waited_for_the_device_is_reported() -> None:
    loop = Loop()
    loop.step(5.0)
    assert loop.timer.waited_seconds == 0.0
    loop.step(5.0, host=2.0)
    assert loop.timer.waited_seconds == 3.0


@pytest.mark.parametrize("jump", [3600.0, -3600.0, 0.5])
def test_a_jump_of_the_wall_clock_is_reported_and_excluded_from_the_step(jump: float) -> None:
    loop = Loop()
    loop.step(1.0)
    loop.clock.wall_offset += jump
    loop.step(1.0)
    assert loop.seconds() == [1.0, 1.0]
    assert [step.clock_jump_seconds for step in loop.done] == [jump, None]
    assert loop.done[0].ended_at == 1_000_001.0 + jump


def test_a_slewing_wall_clock_is_the_measure() -> None:
    loop = Loop()
    loop.step(8.0)
    loop.clock.wall_offset += 0.00390625  # 488 ppm of eight seconds
    loop.step(8.0)
    assert loop.seconds() == [8.00390625, 8.0]
    assert loop.done[0].clock_jump_seconds is None


def test_a_pause_lets_the_step_end_and_is_no_part_of_any() -> None:
    loop = Loop()
    loop.step(1.0)
    loop.pause(10.0)
    loop.step(2.0)
    assert loop.seconds() == [1.0, 2.0]
    assert loop.done[1].spans == {"eval": 10.0}


def test_two_pauses_in_a_row_are_both_cut_out() -> None:
    loop = Loop()
    loop.step(1.0)
    loop.pause(10.0)
    loop.clock.advance(0.5)  # what the host does between them stays in the next step
    loop.pause(20.0)
    loop.step(2.0)
    assert loop.seconds() == [1.0, 2.5]
    assert loop.done[1].spans == {"eval": 30.0}


def test_a_clock_jump_inside_of_a_pause_touches_no_step() -> None:
    loop = Loop()
    loop.step(1.0)
    loop.keep(loop.timer.drain())
    start = loop.timer.read()
    loop.clock.advance(10.0)
    loop.clock.wall_offset += 3600.0
    loop.timer.cut("eval", start, loop.timer.read())
    loop.step(2.0)
    assert loop.seconds() == [1.0, 2.0]
    assert loop.done[1].clock_jump_seconds is None


def test_a_wait_that_the_device_works_through_costs_nothing() -> None:
    loop = Loop()
    loop.step(4.0)
    loop.wait(3.0)
    loop.step(4.0)
    assert loop.seconds() == [4.0, 4.0]
    assert loop.done[1].spans == {"data_wait": 0.0}


def test_only_the_exposed_part_of_a_wait_is_cut_out() -> None:
    loop = Loop()
    loop.step(4.0)
    loop.wait(7.0)
    loop.step(5.0)
    assert loop.seconds() == [4.0, 5.0]
    assert loop.done[1].spans == {"data_wait": 3.0}


def test_a_wait_does_not_wait_for_the_device() -> None:
    loop = Loop()
    loop.step(4.0)
    loop.wait(1.0)
    assert loop.clock.now == 1.0


def test_a_wait_of_an_idle_device_is_exposed_from_its_start() -> None:
    loop = Loop()
    loop.step(1.0)
    loop.clock.advance(2.0)  # the device has been idle for a second when the wait begins
    loop.wait(3.0)
    loop.step(5.0)
    assert loop.seconds() == [2.0, 5.0]  # nobody saw the step end before the wait began
    assert loop.done[1].spans == {"data_wait": 3.0}


def short_waits(loop: Loop, count: int) -> None:
    for _ in range(count):
        loop.step(1.0)
        loop.wait(0.0005)


def test_after_short_waits_no_watcher_is_asked() -> None:
    loop = Loop()
    short_waits(loop, SHORT_WAITS + 5)
    assert len(loop.watcher.watched) == SHORT_WAITS
    loop.step(1.0)
    loop.wait(0.25)  # a long one: from here on waits may be long
    loop.step(1.0)
    loop.wait(0.25)
    assert len(loop.watcher.watched) == SHORT_WAITS + 1
    assert set(loop.seconds()) == {1.0}


def test_the_exposed_part_of_an_unexpected_wait_follows_from_the_step_before() -> None:
    loop = Loop()
    short_waits(loop, SHORT_WAITS + 5)
    loop.step(1.0)
    loop.wait(3.0)
    last = loop.step(1.0)
    assert loop.seconds() == [1.0] * (SHORT_WAITS + 7)
    assert last.spans == {"data_wait": 2.0}


def test_the_wait_before_the_first_step_is_no_part_of_it() -> None:
    loop = Loop()
    loop.wait(30.0)
    loop.step(1.0)
    assert loop.seconds() == [1.0]
    assert loop.done[0].spans == {"data_wait": 30.0}


def test_a_second_wait_before_the_same_step_is_cut_out_too() -> None:
    loop = Loop()
    loop.step(1.0)
    loop.wait(2.0)
    loop.clock.advance(0.5)
    loop.wait(4.0)
    loop.step(1.0)
    assert loop.seconds() == [1.0, 1.5]
    assert loop.done[1].spans == {"data_wait": 5.0}


def test_a_watcher_that_is_late_lets_the_step_end_with_the_wait() -> None:
    loop = Loop()
    loop.watcher.look = lambda: None  # type: ignore[method-assign]
    loop.clock.on_advance.clear()
    loop.step(1.0)
    loop.wait(1.25)
    loop.step(1.0)
    assert loop.seconds() == [1.25, 1.0]
    assert loop.done[1].spans == {"data_wait": 0.0}


def test_a_metric_in_the_donated_state_is_not_waited_for() -> None:
    loop = Loop()
    first = loop.step(1.0)
    first.metrics["loss"].deleted = True
    loop.timer.begin_call()
    loop.step(1.0)
    assert len(loop.seconds()) == 2


@pytest.mark.parametrize("seconds", [0.5, 2.0, 8.0])
def test_the_last_step_ends_when_its_outputs_are_ready(seconds: float) -> None:
    loop = Loop()
    for _ in range(3):
        loop.step(2.0)
    last = loop.step(seconds)
    loop.clock.advance(3600.0)  # an evaluation, a save
    loop.clock.wall_offset += 60.0
    assert loop.timer.drain(is_last=True) is last
    assert (last.seconds, last.ended_monotonic) == (seconds, 6.0 + seconds)
    assert (last.ended_at, last.clock_jump_seconds) == (1_000_006.0 + seconds, None)


def test_a_last_step_that_is_not_done_is_waited_for() -> None:
    loop = Loop()
    loop.step(2.0)
    last = loop.step(4.0)
    loop.timer.drain(is_last=True)
    assert (last.seconds, last.ended_monotonic) == (4.0, 6.0)


def test_a_step_before_a_pause_is_timed_until_the_pause() -> None:
    loop = Loop()
    loop.step(2.0)
    loop.clock.advance(3.0)
    loop.pause(10.0)
    loop.step(2.0)
    assert loop.seconds() == [3.0, 2.0]


@pytest.mark.parametrize("reads", [False, True])
def test_what_the_loop_does_for_long_before_a_pause_is_no_part_of_the_step(reads: bool) -> None:
    loop = Loop()
    for _ in range(3):
        metrics = loop.device.run(0.5)
        if reads:
            metrics["loss"].block_until_ready()
        loop.take(metrics)
    loop.clock.advance(20.0)
    loop.pause(10.0)
    assert loop.done[-1].seconds == 0.5
    loop.step(0.5)
    # Of a loop that reads its loss the first step ends when the host comes back, a step late.
    assert loop.seconds() == [1.0 if reads else 0.5, 0.5, 0.5, 20.0]


@pytest.mark.parametrize("late", [0.0, 1.0, 3600.0])
def test_a_last_step_that_ended_before_it_was_recorded_takes_the_time_of_the_one_before(
    late: float,
) -> None:
    loop = Loop()
    for _ in range(4):
        metrics = loop.device.run(2.0)
        metrics["loss"].block_until_ready()
        last = loop.take(metrics)
    loop.clock.advance(late)
    loop.timer.drain(is_last=True)
    assert (last.seconds, last.ended_monotonic) == (2.0, 8.0)


def test_a_compilation_is_no_measure_of_the_last_step() -> None:
    loop = Loop()
    metrics = loop.device.run(2.0)
    loop.compile(60.0)
    loop.take(metrics)
    metrics = loop.device.run(2.0)
    metrics["loss"].block_until_ready()
    last = loop.take(metrics)
    loop.clock.advance(5.0)
    loop.timer.drain(is_last=True)
    assert (last.seconds, last.ended_monotonic) == (0.0, 62.0)


def test_a_last_step_seen_late_takes_the_time_of_the_one_before() -> None:
    loop = Loop()
    for _ in range(3):
        loop.step(2.0)
    last = loop.take(loop.device.run(2.0))
    last.seen = ((1_000_010.0, 10.0), (1_000_010.0, 10.0))
    loop.clock.advance(60.0)
    loop.timer.drain(is_last=True)
    assert (last.seconds, last.ended_monotonic) == (2.0, 8.0)


def test_a_last_step_that_was_over_when_the_loop_came_back_late_has_a_time() -> None:
    loop = Loop()
    for _ in range(3):
        loop.step(2.0)
    last = loop.take(loop.device.run(2.0))
    assert loop.timer._mark[1] == 6.0
    last.seen = ((1_000_005.0, 5.0), (1_000_005.9, 5.9))  # by another thread, which woke earlier
    loop.clock.advance(60.0)
    loop.timer.drain(is_last=True)
    assert (last.seconds, last.ended_monotonic) == (2.0, 6.0)


def test_a_last_step_seen_by_a_thread_that_lost_its_turn_between_two_clocks_has_a_time() -> None:
    loop = Loop()
    for _ in range(3):
        loop.step(2.0)
    last = loop.take(loop.device.run(2.0))
    assert loop.timer._mark == (1_000_006.0, 6.0)
    last.seen = ((1_000_005.5, 5.5), (1_000_006.0 - 2**-12, 6.0 + 2**-12))
    loop.clock.advance(60.0)
    loop.timer.drain(is_last=True)
    assert (last.seconds, last.clock_jump_seconds) == (2**-12, None)


def synced(loop: Loop, seconds: float) -> TimedStep:
    """A step of a loop that reads its loss, announced as an instrumented one is."""
    loop.timer.begin_call()
    metrics = loop.device.run(seconds)
    taken = loop.take(metrics)
    metrics["loss"].block_until_ready()
    return taken


@pytest.mark.parametrize("is_last", [False, True])
def test_a_step_that_the_watcher_still_waits_for_ended_just_now(is_last: bool) -> None:
    loop = Loop()
    for _ in range(3):
        synced(loop, 0.5)
    loop.timer.begin_call()
    metrics = loop.device.run(4.0)
    slow = loop.take(metrics)
    loop.watcher.followed, loop.watcher.waits = None, (slow, loop.timer.read())
    metrics["loss"].block_until_ready()  # the loop woke first
    loop.timer.drain(is_last=is_last)
    assert slow.seconds == 4.0


def test_a_last_step_that_its_call_compiled_has_the_time_of_the_compilation() -> None:
    loop = Loop()
    for _ in range(3):
        loop.call(2.0)
    loop.timer.begin_call()
    loop.compile(60.0)
    metrics = loop.device.run(2.0)
    metrics["loss"].block_until_ready()
    last = loop.take(metrics)
    loop.clock.advance(5.0)
    loop.timer.drain(is_last=True)
    assert (last.seconds, last.is_compile) == (60.0, True)  # from the end of the one before


def test_a_short_last_step_begins_no_earlier_than_its_call() -> None:
    loop = Loop()
    for _ in range(3):
        synced(loop, 2.0)
    last = synced(loop, 0.125)
    last.seen = loop.timer.read(), loop.timer.read()  # the watcher was late
    loop.clock.advance(60.0)
    loop.timer.drain(is_last=True)
    assert (last.seconds, last.ended_monotonic) == (0.125, 6.125)


class Gated(FakeArray):
    """An array that is ready when its event is set."""

    def __init__(self) -> None:
        super().__init__(FakeClock(), 0.0, 1.0)
        self.begun, self.ended = threading.Event(), threading.Event()

    def block_until_ready(self) -> FakeArray:
        self.begun.set()
        assert self.ended.wait(HANG_SECONDS)
        return self


def gated_steps(count: int) -> tuple[list[TimedStep], list[Gated]]:
    gates = [Gated() for _ in range(count)]
    steps = []
    for gate in gates:
        steps.append(step := TimedStep())
        step.step, step.metrics = 0, {"loss": gate}
    return steps, gates


def test_the_watchers_thread_sees_the_newest_step_end() -> None:
    clock = FakeClock()
    watcher = Watcher(lambda: (clock.wall(), clock.now))
    steps, gates = gated_steps(3)
    watcher.follow(steps[0])
    assert gates[0].begun.wait(HANG_SECONDS)
    watcher.follow(steps[1])  # while it waits for the one before
    watcher.follow(steps[2])
    clock.advance(7.0)
    gates[0].ended.set()
    assert gates[2].begun.wait(HANG_SECONDS)
    clock.advance(1.0)
    gates[2].ended.set()
    watcher.close()
    begun, first, last = ((1_000_000.0 + now, now) for now in (0.0, 7.0, 8.0))
    assert [step.seen for step in steps] == [(begun, first), None, (first, last)]
    assert [step.completed for step in steps] == [None] * 3


def test_the_watchers_thread_looks_at_the_newest_of_many_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mfu_jax.logger.timing.readiness._RARE_LOOK_SECONDS", 10 * HANG_SECONDS)
    watcher = Watcher(lambda: (0.0, 0.0))
    steps, gates = gated_steps(5)
    watcher.follow(steps[0])
    assert gates[0].begun.wait(HANG_SECONDS)
    for step in steps[1:]:
        watcher.follow(step)
    gates[0].ended.set()
    assert gates[4].begun.wait(HANG_SECONDS)
    assert watcher.waits == (steps[4], (0.0, 0.0))
    gates[4].ended.set()
    watcher.close()
    assert watcher.waits is None


def test_the_watchers_thread_falls_asleep_and_is_woken_by_the_next_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mfu_jax.logger.timing.readiness.LOOK_SECONDS", 0.0)
    watcher = Watcher(lambda: (0.0, 0.0))
    steps, gates = gated_steps(2)
    for step, gate in zip(steps, gates, strict=True):
        watcher.follow(step)
        assert gate.begun.wait(HANG_SECONDS)
        gate.ended.set()
        while not watcher._sleeps:
            pass
    watcher.close()
    assert all(step.seen for step in steps)


def test_the_watchers_thread_stamps_a_step_when_it_ends() -> None:
    clock = FakeClock()
    begun, ended, stamped = threading.Event(), threading.Event(), threading.Event()

    class Gate(FakeArray):
        def block_until_ready(self) -> FakeArray:
            begun.set()
            ended.wait(HANG_SECONDS)
            return self

    def read() -> Reading:
        stamped.set()
        return clock.wall(), clock.now

    watcher = Watcher(read)
    step = TimedStep()
    step.step, step.metrics, step.watched = 0, {"loss": Gate(clock, 0.0, 1.0)}, True
    watcher.watch(step)
    assert begun.wait(HANG_SECONDS)
    assert step.completed is None
    clock.advance(7.0)
    ended.set()
    assert stamped.wait(HANG_SECONDS)
    watcher.close()
    while step.completed is None:  # the assignment follows the reading at once
        pass
    assert step.completed[1] == 7.0


def test_the_watchers_thread_stamps_all_that_are_watched_in_order() -> None:
    clock = FakeClock()
    watcher = Watcher(lambda: (clock.wall(), clock.now))
    steps, gates = gated_steps(4)
    for step in steps:
        step.watched = True
        watcher.watch(step)  # while it waits for the first
    for gate in gates:
        assert gate.begun.wait(HANG_SECONDS)
        clock.advance(1.0)
        gate.ended.set()
    watcher.close()
    assert [step.completed[1] for step in steps if step.completed] == [1.0, 2.0, 3.0, 4.0]
