"""When outputs are ready: the ends of steps and phases while the training thread is elsewhere.

A step that has a successor ends where the loop comes back, so its outputs need not be watched. But
no loop says which step is its last, or that an evaluation comes next. So one thread looks, every
`LOOK_SECONDS` at most, for the newest step, and waits for its outputs. The training thread only
leaves the step where the thread will find it: waking the thread would cost tens of microseconds.
Phases are few, so it is woken for the end of each.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from mfu_jax.logger.alarm import Alarm
from mfu_jax.logger.records.values import MOST_NUMBERS, is_deleted
from mfu_jax.logger.timing.timed_step import Reading, TimedStep
from mfu_jax.util.failsafe import Boundary, is_interrupt

# A step that is found ready at the first look ended less than this before.
LOOK_SECONDS = 0.02
# A wake-up costs tens of microseconds, so steps that are shorter than that are looked at less
# often: until the loop takes longer for one.
_RARE_LOOK_SECONDS = 0.2
# After this many looks without a new step, the thread sleeps until the next one.
_MOST_LOOKS = 20
# A thread still waiting for the device at interpreter exit would abort the process; but a hung
# device must not hold up the exit forever.
_JOIN_SECONDS = 30.0


class Watcher:
    """Stamps steps when their outputs are ready, on one daemon thread, started when first needed.

    Args:
        read: reads the clocks.

    Attributes:
        waits: the step whose outputs the thread waits for, and both clocks when it began.
    """

    waits: tuple[TimedStep, Reading] | None = None

    def __init__(self, read: Callable[[], Reading]) -> None:
        self._read = read
        # Only the newest, which the timer keeps, too: a step's outputs are not kept alive here.
        self._newest: TimedStep | None = None
        self._watched: deque[TimedStep] = deque()  # in the order in which they will end
        self._taken = 0
        self._alarm = Alarm()
        self._sleeps, self._is_over = True, False
        self._thread = Boundary().thread(
            "mfu_jax watcher", "the time of a step may contain a wait", self._run
        )

    def follow(self, step: TimedStep) -> None:
        """Takes the step just dispatched; sets its `seen`, unless the next one comes before."""
        self._newest = step
        self._taken += 1
        if self._sleeps:
            self._wake()

    def watch(self, step: TimedStep) -> None:
        """Sets `completed` of a step in flight, or of a part of one, which is looked at now."""
        if self._newest is step:
            self._newest = None
        self._watched.append(step)
        self._wake()

    def close(self) -> None:
        """Stops the thread; waits at most half a minute for a hung device."""
        self._is_over = True
        self._alarm.set()
        if self._thread.is_alive():
            self._thread.join(timeout=_JOIN_SECONDS)

    def _wake(self) -> None:
        self._sleeps = False
        if self._thread.ident is None:
            self._thread.start()
        self._alarm.set()

    def _run(self) -> None:
        looks = seen = 0
        while not self._is_over:
            taken, pause = self._taken, LOOK_SECONDS
            looks = 0 if self._newest or self._watched else looks + 1
            while self._watched:
                self._look(self._watched.popleft())
            if taken > seen + 1:  # the loop comes back soon by itself
                pause = _RARE_LOOK_SECONDS
            seen = taken
            step, self._newest = self._newest, None
            if step is not None:
                self._look(step)
                step = None  # keep no outputs alive while the thread waits
            self._sleeps = looks >= _MOST_LOOKS
            if not (self._sleeps and self._newest):  # one may have come before it fell asleep
                self._alarm.wait(None if self._sleeps else pause)

    def _look(self, step: TimedStep) -> None:
        """Waits for a step and stamps it."""
        begun = self._read()
        self.waits = step, begun
        with contextlib.suppress(Exception):  # the training thread hits it, and can handle it
            block_until_ready(step.metrics)
        step.see(begun, self._read())
        self.waits = None


def block_until_ready(metrics: Mapping[str, Any]) -> None:
    """Waits for every array in `metrics`, without copying any to the host.

    An array donated to a later step is not waited for: nobody can read it any more.
    """
    for value in metrics.values():
        try:
            value.block_until_ready()
        except AttributeError:  # asking first would cost each array more than this costs a number
            if hasattr(value, "block_until_ready"):
                raise
            if isinstance(value, Mapping):
                block_until_ready(value)
        except RuntimeError as error:
            if is_interrupt(error) or not is_deleted(value):
                raise


def is_ready(metrics: Mapping[str, Any]) -> bool:
    """True if every array in `metrics` has been computed, or was donated to a later step."""
    for value in metrics.values():
        ready = getattr(value, "is_ready", None)
        if ready is not None:
            # On a deleted array is_ready() ends the process with a segmentation fault (jax 0.10).
            if not (is_deleted(value) or ready()):
                return False
        elif isinstance(value, Mapping) and not is_ready(value):
            return False
    return True


def end_marker(output: Any) -> Any:
    """A small array that is ready when `output` is, and that no later call can donate.

    Args:
        output: what a step returned.
    """
    arrays = [leaf for leaf in jax.tree.leaves(output) if isinstance(leaf, jax.Array)]
    if not arrays:
        return None
    smallest = min(arrays, key=lambda array: array.size)
    # Outputs are often passed to the next call, whose donation deletes them.
    if smallest.size <= MOST_NUMBERS:
        return jnp.copy(smallest)
    is_on_one = len(smallest.sharding.device_set) == 1
    part = smallest if is_on_one else smallest.addressable_data(0)
    if jax.sharding.get_abstract_mesh().empty:
        return _first_number(part)
    with jax.set_mesh(Mesh(np.array(list(part.devices())), ("_one",))):  # not the user's mesh
        return _first_number(part)


@jax.jit
def _first_number(array: jax.Array) -> jax.Array:
    return array[(0,) * array.ndim]
