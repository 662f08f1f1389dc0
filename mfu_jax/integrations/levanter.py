"""levanter (and marin, which trains with it): its ``Trainer``."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import jax
from levanter.checkpoint import Checkpointer

from mfu_jax.integrations.built_steps import add_step, closing, paused, resuming

# The trainer's cached properties, which an attribute of that name replaces: with and without hooks
# inside the step.
_STEPS = ("_jit_train_step_fn", "_jit_train_step_fn_no_hook")
_EVALUATIONS = ("compute_validation_loss", "cb_tagged_lm_evaluate", "cb_tagged_evaluate")


def instrument_trainer(trainer: Any, **options: Any) -> Any:
    """Measures every training step of a levanter trainer; evaluations and checkpoints are pauses.

    Args:
        trainer: a ``levanter.trainer.Trainer``. Call this inside its ``with``, before ``train``.
        **options: of `mfu_jax.instrument`.

    Returns:
        The trainer; the end of ``train`` closes the step, and leaves the trainer as it was. The
        steps of a later ``train`` are numbered on.
    """
    train = trainer.train
    before: list[Any] = []

    def measured_train(*args: Any, **kwargs: Any) -> Any:
        steps: list[Any] = []
        chosen = resuming(before[0], options) if before else options
        with contextlib.ExitStack() as stack:
            stack.enter_context(closing(steps))
            for name in _STEPS:
                add_step(steps, getattr(trainer, name), chosen)
                stack.enter_context(mock.patch.object(trainer, name, _Loggable(steps[-1])))
            before[:] = steps[:1]
            for hook in trainer.hooks.hooks:
                _pause_in(hook.fn, steps[0], stack)
            return train(*args, **kwargs)

    trainer.train = measured_train
    return trainer


class _Loggable:
    """A step that levanter's ``log_jaxprs`` may trace first: a trace calls the bare step.

    So it gets no warning, which is meant for steps inside a program that the loop calls.
    """

    def __init__(self, step: Any) -> None:
        self._step = step

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((args, kwargs)))
        return (self._step.__wrapped__ if traced else self._step)(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._step, name)


def _pause_in(callback: Any, step: Any, stack: contextlib.ExitStack) -> None:
    """Makes a pause of what a callback of levanter does when it is due, until `stack` closes."""
    function: Any = getattr(callback, "fn", None)
    owner = getattr(function, "__self__", None)
    if isinstance(owner, Checkpointer):
        save = paused(owner.save_checkpoint, "checkpoint", step)
        stack.enter_context(mock.patch.object(owner, "save_checkpoint", save))
    elif getattr(function, "__qualname__", "").startswith(_EVALUATIONS):
        stack.enter_context(mock.patch.object(callback, "fn", paused(function, "eval", step)))
