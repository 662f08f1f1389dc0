"""Keeps Python's garbage collector away from what lives as long as the training loop."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def settled_heap() -> Iterator[Callable[[], None]]:
    """Gives a function after which the garbage collector does not look at what exists by then.

    JAX and the compiled step are some half a million objects. To look through all of them takes 0.1
    to 0.3 s, several times in a run, in which no thread of the process runs.
    """
    try:
        yield _settle
    finally:
        gc.unfreeze()


def _settle() -> None:
    gc.collect()  # what is garbage now would stay until the end
    gc.freeze()
