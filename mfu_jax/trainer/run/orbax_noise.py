"""Reduces Orbax's failures to the exception that it raises.

When a write fails, Orbax also logs the stacks of several threads, TensorStore prints tracebacks of
callbacks into a closed event loop, and unfinished coroutines complain when they are freed.
"""

from __future__ import annotations

import functools
import logging
import sys
import traceback
import warnings
from typing import Any


@functools.cache  # once per process
def silence_orbax() -> None:
    """From here on, failures inside Orbax and TensorStore are raised, not printed."""
    hook = sys.unraisablehook

    def on_unraisable(unraisable: Any) -> None:
        if not _is_left_over(unraisable):
            hook(unraisable)

    sys.unraisablehook = on_unraisable
    # A coroutine that never began has no frame to know it by, only its name.
    never = r"coroutine 'async_serialize\w*\.<locals>\.\w+' was never awaited"
    warnings.filterwarnings("ignore", never, RuntimeWarning)
    logging.getLogger("absl").addFilter(_is_no_stack)
    logging.getLogger("asyncio").addFilter(_is_no_task)


def _is_left_over(unraisable: Any) -> bool:
    """A coroutine of Orbax, or a callback of TensorStore into a closed event loop."""
    code = getattr(unraisable.object, "cr_code", None)
    is_callback = unraisable.object is None and str(unraisable.exc_value) == "Event loop is closed"
    return is_callback or (code is not None and "orbax" in code.co_filename)


def _is_no_stack(record: logging.LogRecord) -> bool:
    return not (record.exc_info and "orbax" in record.pathname)


def _is_no_task(record: logging.LogRecord) -> bool:
    trace = record.exc_info[2] if record.exc_info else None
    frames = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(trace)]
    return not any("orbax" in text for text in (record.getMessage(), *frames))
