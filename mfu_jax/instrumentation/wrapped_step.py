"""The wrapper that behaves like the step it wraps, and the one that only calls it."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, NoReturn, Self

from mfu_jax.errors import UserError
from mfu_jax.instrumentation.jitting import name_of
from mfu_jax.logger.disabled import DisabledLogger
from mfu_jax.settings import Settings

_LIKE_IT = ("__module__", "__qualname__", "__annotations__")


class WrappedStep:
    """Looks like the wrapped step; attributes that it lacks are looked up there.

    Copying returns the same object, as for a function; pickling, the wrapped step without logging.

    Args:
        step_fn: the step.
        settings: kept for the user to read.

    Attributes:
        settings: the settings for the metrics.
    """

    def __init__(self, step_fn: Callable[..., Any], settings: Settings) -> None:
        self.settings = settings
        functools.update_wrapper(self, step_fn, _LIKE_IT, updated=())  # type: ignore[arg-type]
        self.__name__ = name_of(step_fn)
        self.__doc__ = getattr(step_fn, "__doc__", None)

    def __repr__(self) -> str:
        return f"<{self.__name__}, {type(self).__name__}>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.__wrapped__, name)

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """In a class body it becomes a method if the wrapped function would."""
        bind = getattr(type(self.__wrapped__), "__get__", None)
        if instance is None or bind is None:
            return self
        is_bound = bind(self.__wrapped__, instance, owner) is not self.__wrapped__
        call: Any = self
        return types.MethodType(call, instance) if is_bound else self

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any]]:
        return _bare, (self.__wrapped__,)

    def __enter__(self) -> Self:
        return self

    def _not_called(self, asked: str) -> UserError:
        return UserError(
            f"{self.__name__}.{asked} was asked for, but the step has logged no call; expected at "
            f"least one before",
            hint="usually the loop calls the function that was wrapped, or enable_mfu is false; "
            "use what instrument() returned in the loop",
        )


def _bare(step_fn: Callable[..., Any]) -> Callable[..., Any]:
    return step_fn


class DisabledStep(WrappedStep):
    """What `instrument` returns with ``enable_mfu=False``: calls the step and does nothing else.

    It has the interface of `InstrumentedStep`; anything that needs a logged call is an error.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the step."""
        return self.__wrapped__(*args, **kwargs)

    def __exit__(self, *error: object) -> None: ...

    @property
    def logger(self) -> DisabledLogger:
        """A logger whose methods do nothing."""
        return DisabledLogger()

    @property
    def flops(self) -> NoReturn:
        """Not available.

        Raises:
            UserError: always.
        """
        raise self._not_called("flops")

    @property
    def ledger(self) -> NoReturn:
        """Not available.

        Raises:
            UserError: always.
        """
        raise self._not_called("ledger")

    def summary(self) -> NoReturn:
        """Not available.

        Raises:
            UserError: always.
        """
        raise self._not_called("summary()")

    def close(self) -> None:
        """Does nothing."""
