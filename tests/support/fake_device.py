"""A clock and a device that exist only as numbers: no timing test waits for anything."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np

from mfu_jax.logger.timing.readiness import Watcher, is_ready
from mfu_jax.logger.timing.timed_step import Reading, TimedStep


class FakeClock:
    """Time that passes only through `advance`; the wall clock can jump away from it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.wall_offset = 1_000_000.0
        self.on_advance: list[Callable[[], None]] = []

    def wall(self) -> float:
        return self.now + self.wall_offset

    def monotonic(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds
        for listener in self.on_advance:
            listener()


class FakeArray:
    """A number that a device has computed by `ready_at`."""

    def __init__(self, clock: FakeClock, ready_at: float, value: float) -> None:
        self.clock = clock
        self.ready_at = ready_at
        self.value = value
        self.deleted = False

    def is_ready(self) -> bool:
        return self.clock.now >= self.ready_at

    def is_deleted(self) -> bool:
        return self.deleted

    def block_until_ready(self) -> FakeArray:
        if self.deleted:
            raise RuntimeError("Array has been deleted.")
        if not self.is_ready():
            self.clock.advance(self.ready_at - self.clock.now)
        return self

    def __array__(self, dtype: object = None, copy: object = None) -> np.ndarray:
        return np.asarray(self.value)


class FakeDevice:
    """Runs one step after another; dispatching returns at once."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.free_at = 0.0

    def run(self, seconds: float, loss: float = 1.0) -> dict[str, FakeArray]:
        self.free_at = max(self.free_at, self.clock.now) + seconds
        return {"loss": FakeArray(self.clock, self.free_at, loss)}


class FakeWatcher(Watcher):
    """Stamps steps at the very moment at which they end, as a prompt thread would."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.watched: list[TimedStep] = []
        self.followed: TimedStep | None = None
        clock.on_advance.append(self.look)

    def follow(self, step: TimedStep) -> None:
        self.followed = step
        if is_ready(step.metrics):
            now = self.clock.wall(), self.clock.now
            step.seen = now, now
        else:
            self.begun = self.clock.wall(), self.clock.now

    def watch(self, step: TimedStep) -> None:
        self.watched.append(step)
        if is_ready(step.metrics):
            step.completed = step.completed or (self.clock.wall(), self.clock.now)

    def look(self) -> None:
        for step in self.watched:
            if step.completed is None and (ready := self.ready(step)):
                step.completed = ready
        step = self.followed
        if step is not None and step.seen is None and (ready := self.ready(step)):
            step.seen = self.begun, ready

    def ready(self, step: TimedStep) -> Reading | None:
        """Both clocks when the step ended, if it has."""
        leaves = jax.tree.leaves(dict(step.metrics))
        ready_at = max(getattr(value, "ready_at", 0.0) for value in leaves)
        if ready_at > self.clock.now:
            return None
        return ready_at + self.clock.wall_offset, ready_at

    def close(self) -> None: ...
