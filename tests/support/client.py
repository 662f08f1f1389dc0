"""A loop that knows nothing of this package, run bare and observed."""

from __future__ import annotations

import contextlib
import gc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

import mfu_jax
from mfu_jax.sinks import Sink
from tests.support.sinks import ListSink

STEPS = 4

# Shape and dtype of each array that is alive, and how many there are.
Alive = Counter[tuple[tuple[int, ...], str]]


class Bare:
    """What a loop asks for, without an observer: the step itself."""

    def wrap(self, step: Callable[..., Any]) -> Any:
        """The step that the loop calls."""
        return step

    def together(self) -> contextlib.AbstractContextManager[Any]:
        """A block in which all calls are parts of one step."""
        return contextlib.nullcontext()

    def settle(self) -> None:
        """Waits until nothing of earlier steps is pending."""


class Observed(Bare):
    """Instruments what the loop wraps; records go to `memory`.

    Args:
        shares_logger: the loop's steps are parts of one step of a shared logger.
        sinks: where records go, too.
        **options: of `mfu_jax.instrument`.
    """

    def __init__(
        self, *, shares_logger: bool = False, sinks: Sequence[Sink] = (), **options: Any
    ) -> None:
        self.memory = ListSink()
        self.steps: list[Any] = []
        self.options = options
        self.sinks = [self.memory, *sinks]
        self.logger = mfu_jax.MetricLogger(sinks=self.sinks) if shares_logger else None

    def wrap(self, step: Callable[..., Any]) -> Any:
        """The instrumented step."""
        where: Any = {"sinks": self.sinks} if self.logger is None else {"logger": self.logger}
        self.steps.append(mfu_jax.instrument(step, **where, **self.options))
        return self.steps[-1]

    def together(self) -> contextlib.AbstractContextManager[Any]:
        """One step of the shared logger."""
        assert self.logger is not None
        return self.logger.step()

    def settle(self) -> None:
        """Waits for the counts and the writer."""
        for step in self.steps:
            assert step.flops is not None
        (self.logger or self.steps[0].logger).flush()

    def close(self) -> None:
        """Ends every step, and the shared logger."""
        for step in self.steps:
            step.close()
        if self.logger is not None:
            self.logger.close()


@dataclass(frozen=True, kw_only=True)
class Client:
    """One kind of training loop.

    Attributes:
        name: what its users call it.
        loop: yields what each step returned, for ever, and keeps what such a loop keeps.
        flops: model FLOPs of one step on one device, by hand; the executed ones, too.
        shares_logger: see `Observed`.
        package: what has to be installed for it.
        views: most one-element shards that JAX keeps with an output once one of them was read.
    """

    name: str
    loop: Callable[[Bare], Iterator[Any]]
    flops: int
    shares_logger: bool = False
    package: str = "jax"
    views: int = 0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a loop did in `STEPS` steps.

    Attributes:
        outputs: of each step, on the host.
        alive: arrays that the loop made and that are alive after each step.
        settled: the same at the end, once nothing is pending.
    """

    outputs: list[Any]
    alive: list[Alive]
    settled: Alive


def run_loop(loop: Callable[[Bare], Iterator[Any]], observer: Bare) -> Outcome:
    """Runs `STEPS` steps of a loop and looks at them from outside."""
    with _collecting_what_is_new():
        before = _alive()
        steps = loop(observer)
        outputs, alive = [], []
        for _ in range(STEPS):
            outputs.append(jax.tree.map(lambda leaf: np.array(leaf), _data(next(steps))))
            alive.append(_alive() - before)
        observer.settle()
        settled = _alive() - before
        steps.close()  # type: ignore[attr-defined]  # it is a generator
    return Outcome(outputs=outputs, alive=alive, settled=settled)


@contextlib.contextmanager
def _collecting_what_is_new() -> Iterator[None]:
    """Collections within it pass over what is alive already: most of the time, modules."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _data(output: Any) -> Any:
    """Typed keys as their data, which NumPy understands."""
    return jax.tree.map(lambda leaf: jax.random.key_data(leaf) if _is_key(leaf) else leaf, output)


def _is_key(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _alive() -> Alive:
    gc.collect()
    return Counter((array.shape, str(array.dtype)) for array in jax.live_arrays())
