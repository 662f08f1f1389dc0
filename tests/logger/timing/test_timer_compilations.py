"""Compilations between two steps, on a fake clock: which step they are charged to."""

from tests.support.timer_loop import Loop, compile_event


def test_a_recompile_is_charged_to_the_step_that_needed_it() -> None:
    loop = Loop()
    loop.step(1.0)
    loop.compile(10.0)
    loop.step(2.0)
    loop.step(2.0)
    assert loop.seconds() == [1.0, 11.0, 2.0]
    assert [step.is_compile for step in loop.done] == [False, True, False]


def test_a_recompile_that_the_device_works_through_is_marked_all_the_same() -> None:
    loop = Loop()
    loop.step(5.0)
    loop.compile(1.0)
    loop.step(2.0)
    assert loop.seconds() == [5.0, 2.0]
    assert [step.is_compile for step in loop.done] == [False, True]


def test_a_step_that_ended_unseen_before_a_recompile_is_marked_too() -> None:
    loop = Loop()
    loop.step(1.0)
    loop.step(1.0)  # the device is busy, so nobody watches this one
    loop.clock.advance(3.0)
    loop.compile(10.0)
    loop.step(2.0)
    assert loop.seconds() == [1.0, 3.0, 12.0]
    assert [step.is_compile for step in loop.done] == [False, True, True]


def test_a_recompile_in_an_announced_call_marks_only_its_own_step() -> None:
    loop = Loop()
    loop.call(1.0)
    loop.call(1.0)
    loop.clock.advance(3.0)
    loop.call(2.0, compiling=10.0)
    assert loop.seconds() == [1.0, 3.0, 12.0]
    assert [step.is_compile for step in loop.done] == [False, False, True]


def test_a_step_that_ends_during_a_recompile_is_seen_to_end() -> None:
    loop = Loop()
    loop.call(4.0)
    loop.call(2.0, compiling=10.0)
    assert loop.seconds() == [4.0, 8.0]
    assert [step.is_compile for step in loop.done] == [False, True]


def test_tracing_without_a_new_executable_marks_no_step() -> None:
    loop = Loop()
    loop.timer.compiling(compile_event("trace", 0.5))
    loop.step(1.0)
    assert not loop.done
    loop.seconds()
    assert not loop.done[0].is_compile
