"""MaxText: its own trainer, measured; needs Python 3.12, as MaxText 0.2.5 does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from maxtext.common.metric_logger import MetricLogger as MaxTextLogger
from maxtext.utils import train_utils

import mfu_jax
from mfu_jax.flops.traced.masks.declared import MaskKind
from mfu_jax.integrations.built_steps import add_step, closing


def scalars_of(output: Any) -> dict[str, Any]:
    """The metrics of MaxText's step, ``(state, {"scalar": {"learning/loss": …}})``, by name."""
    return {name.removeprefix("learning/"): value for name, value in output[1]["scalar"].items()}


@contextlib.contextmanager
def instrumented(mask: MaskKind = "causal", **options: Any) -> Iterator[list[Any]]:
    """Measures the steps of ``maxtext.trainers.pre_train.train`` run inside it; evals are pauses.

    Our step 0 is MaxText's "completed step: 0"; its time is not taken from dispatch to dispatch.

    Args:
        mask: of the attention. MaxText masks by segment ids, which a trace does not show.
        **options: of `mfu_jax.instrument`.

    Yields:
        The instrumented steps: one, or more with MaxText's dropless fallback.
    """
    steps: list[Any] = []
    pauses = contextlib.ExitStack()
    jit_steps = train_utils.jit_train_and_eval_step
    start_eval, write = MaxTextLogger.mark_eval_loop_start, MaxTextLogger.buffer_and_write_metrics

    def jit_train_and_eval_step(*args: Any, **kwargs: Any) -> Any:
        train_step, eval_step = jit_steps(*args, **kwargs)
        add_step(steps, train_step, options, metrics=scalars_of)
        return steps[-1], eval_step

    def mark_eval_loop_start(self: Any) -> None:
        pauses.enter_context(steps[0].logger.pause("eval"))
        start_eval(self)

    def buffer_and_write_metrics(self: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("is_training", True):
            pauses.close()
        write(self, *args, **kwargs)

    with (
        mock.patch.object(train_utils, "jit_train_and_eval_step", jit_train_and_eval_step),
        mock.patch.object(MaxTextLogger, "mark_eval_loop_start", mark_eval_loop_start),
        mock.patch.object(MaxTextLogger, "buffer_and_write_metrics", buffer_and_write_metrics),
        mfu_jax.attention_mask(mask),
        closing(steps),
        pauses,  # also of an evaluation that ends the run
    ):
        yield steps
