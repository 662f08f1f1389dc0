"""The journal of a logger without a metrics file: nothing is written."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any


class NoJournal:
    """The methods of `Journal` as no-ops."""

    waited_seconds: Callable[[], float] = float
    has_steps = True
    is_waiting = has_waited = False

    def steps(self, steps: Any) -> None: ...

    def begin(self, name: str, at: Any, last: Any = None) -> None: ...

    def end(self, at: Any) -> None: ...

    def span(self, name: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def restored(self, step: int) -> None: ...

    def went_back(self, step: int) -> None: ...

    def compiling(self, log: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def compiled(self, event: Any) -> None: ...

    def stop(self, how: str) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...
