"""A training loop of the smallest kind, on a fake clock and device, around a `StepTimer`."""

import threading

from mfu_jax.logger.timing.compile_events import CompileEvent
from mfu_jax.logger.timing.timed_step import TimedStep
from mfu_jax.logger.timing.timer import StepTimer
from tests.support.fake_device import FakeArray, FakeClock, FakeDevice, FakeWatcher


class Loop:
    """A training loop of the smallest kind around a `StepTimer`."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.device = FakeDevice(self.clock)
        self.watcher = FakeWatcher(self.clock)
        self.timer = StepTimer(
            clock=self.clock.wall,
            monotonic=self.clock.monotonic,
            watcher=self.watcher,
        )
        self.done: list[TimedStep] = []
        self.number = 0

    def step(self, seconds: float, *, host: float = 0.0) -> TimedStep:
        return self.take(self.device.run(seconds), host=host)

    def call(self, seconds: float, *, compiling: float = 0.0) -> TimedStep:
        """A step whose call is announced, as an instrumented step does it."""
        self.timer.begin_call()
        if compiling:
            self.compile(compiling)
        return self.step(seconds)

    def take(self, metrics: dict[str, FakeArray], *, host: float = 0.0) -> TimedStep:
        taken = TimedStep()
        taken.step, taken.metrics = self.number, metrics
        self.number += 1
        self.clock.advance(host)
        self.keep(self.timer.dispatched(taken))
        return taken

    def wait(self, seconds: float) -> None:
        idle_since = self.timer.begin_wait()
        self.clock.advance(seconds)
        self.keep(self.timer.end_wait("data_wait", idle_since))

    def pause(self, seconds: float) -> None:
        self.keep(self.timer.drain())
        start = self.timer.read()
        self.clock.advance(seconds)
        self.timer.cut("eval", start, self.timer.read())

    def compile(self, seconds: float) -> None:
        """JAX reports the trace first, and the compilation when it is over."""
        self.timer.compiling(compile_event("trace", 0.0))
        self.clock.advance(seconds)
        self.timer.compiling(compile_event("compile", seconds))

    def keep(self, step: TimedStep | None) -> None:
        if step is not None:
            step.measure()
            self.done.append(step)

    def seconds(self) -> list[float]:
        self.keep(self.timer.drain())
        return [step.seconds for step in self.done]


def compile_event(stage: str, seconds: float) -> CompileEvent:
    """An event of this thread, of the function ``jit(step)``."""
    return CompileEvent(
        stage=stage,
        function="jit(step)",
        seconds=seconds,
        own_seconds=seconds,
        thread_id=threading.get_ident(),
    )
