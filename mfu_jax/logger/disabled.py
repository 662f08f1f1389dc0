"""The logger used when metrics are switched off: its methods do nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self


class DisabledScope:
    """A step, phase, pause or wait of a `DisabledLogger`."""

    def log(self, metrics: Any = None, /, **more: Any) -> None: ...

    def wait_for(self, outputs: Any) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None: ...


DISABLED_SCOPE = DisabledScope()


class DisabledLogger:
    """The methods of `MetricLogger` as no-ops."""

    next_step = 0
    calls_per_step = 1
    setup: Mapping[str, Mapping[str, Any]] = {}

    def _nothing(self, *args: Any, **options: Any) -> None: ...

    def _no(self, *args: Any) -> bool:
        return False

    def _scope(self, *args: Any, **options: Any) -> DisabledScope:
        return DISABLED_SCOPE

    begin_call = record = record_eval = add_numbers = raise_interrupt = _nothing
    suppress_recompile_notes = write_setup = write_text = flush = summary = close = _nothing
    observe_call = defer_interrupt = _no
    pause = own_pause = waiting = step = phase = _scope

    def __enter__(self) -> Self:
        return self

    __exit__ = _nothing
