"""The logger used when metrics are switched off: its methods do nothing."""

from __future__ import annotations

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

    def begin_call(self) -> None: ...

    def observe_call(self, name: str, metrics: Any, cost: Any, output: Any) -> bool:
        return False

    def own_pause(self, name: str) -> DisabledScope:
        return DISABLED_SCOPE

    def add_numbers(self, numbers: Any) -> None: ...

    def raise_interrupt(self) -> None: ...

    def defer_interrupt(self, error: BaseException) -> bool:
        return False

    def suppress_recompile_notes(self, functions: Any) -> None: ...

    def record(self, step: int, metrics: Any, **options: Any) -> None: ...

    def record_eval(self, step: int, metrics: Any) -> None: ...

    def pause(self, name: str, **options: Any) -> DisabledScope:
        return DISABLED_SCOPE

    def waiting(self, name: str = "data") -> DisabledScope:
        return DISABLED_SCOPE

    def step(self, number: int | None = None) -> DisabledScope:
        return DISABLED_SCOPE

    def phase(self, name: str, **options: Any) -> DisabledScope:
        return DISABLED_SCOPE

    def write_setup(self, values: Any = None, texts: Any = None) -> None: ...

    def write_text(self, tag: str, text: str) -> None: ...

    def flush(self) -> None: ...

    def summary(self) -> None: ...

    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None: ...
