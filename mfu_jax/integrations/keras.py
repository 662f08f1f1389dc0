"""Keras 3 on JAX: a callback for ``model.fit``."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import keras

import mfu_jax
from mfu_jax.errors import UserError
from mfu_jax.integrations.built_steps import resuming

# Callbacks whose fit() has begun: one that is interrupted does not call on_train_end.
_begun: weakref.WeakSet[MfuCallback] = weakref.WeakSet()


class MfuCallback(keras.callbacks.Callback):
    """Measures every batch of ``model.fit``; validation is not part of a step's time.

    Each epoch's logs, hence the history and the progress bar, get ``mfu`` and ``hfu``: the means of
    the run so far.

    Args:
        **options: of `mfu_jax.instrument`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self._options = options
        self._between = contextlib.ExitStack()
        self.step: Any = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Builds the model's training function anew, around an instrumented step.

        Raises:
            UserError: the step is not compiled by JAX.
        """
        model = self.model
        if keras.backend.backend() != "jax" or model.run_eagerly or not model.jit_compile:
            raise UserError(
                f"MfuCallback on the {keras.backend.backend()} backend, "
                f"run_eagerly={model.run_eagerly}, jit_compile={model.jit_compile}; expected a "
                "step compiled by JAX",
                hint="usually KERAS_BACKEND is not set; set KERAS_BACKEND=jax before keras is "
                "imported, and compile() with jit_compile=True",
            )
        chosen = self._options if self.step is None else resuming(self.step, self._options)
        for callback in list(_begun):
            if callback is self or callback.model is model:
                callback.close()
        _begun.add(self)
        make_loop = model._make_function

        def around_ours(step: Any, **options: Any) -> Any:
            self.step = mfu_jax.instrument(step, **chosen)
            return make_loop(self.step, **options)

        model._make_function = around_ours
        try:
            model.make_train_function(force=True)
        finally:
            del model._make_function

    def on_test_begin(self, logs: Any = None) -> None:
        """Validation begins."""
        if self.step is not None:
            self._between.enter_context(self.step.logger.pause("eval"))

    def on_test_end(self, logs: Any = None) -> None:
        """Validation ends."""
        self._between.close()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Adds the utilisation to the epoch's logs."""
        summary = self.step.logger.summary()  # None if metrics are switched off
        for name in ("mfu", "hfu"):
            if logs is not None and (value := getattr(summary, name, None)) is not None:
                logs[name] = value

    def on_train_end(self, logs: Any = None) -> None:
        """Writes the summary, and leaves the model as it was."""
        self.close()
        self.model.make_train_function(force=True)

    def close(self) -> None:
        """Ends the measurement, also of a fit that was interrupted."""
        _begun.discard(self)
        self._between.close()
        if self.step is not None:
            self.step.close()
            self.step = None
