"""Keeps Python's garbage collector away from what lives as long as the training loop."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def settled_heap() -> Iterator[None]:
    """Within it, the garbage collector does not look at what exists now.

    JAX and the compiled step are some half a million objects. To look through all of them takes 0.1
    to 0.3 s, several times in a run, in which no thread of the process runs.
    """
    gc.collect()  # what is garbage now would stay until the end
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
