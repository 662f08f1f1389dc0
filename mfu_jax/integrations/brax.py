"""brax: training loops that are one call, such as ``brax.training.agents.ppo.train.train``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from brax.training.acting import Evaluator

from mfu_jax.integrations.built_steps import instrumented_jit, paused


@contextlib.contextmanager
def instrumented(**options: Any) -> Iterator[list[Any]]:
    """Measures every epoch that an agent of brax trains inside it; evaluations are pauses.

    A step here is brax's ``training_epoch``: acting and all updates between two evaluations.

    Args:
        **options: of `mfu_jax.instrument`.

    Yields:
        The instrumented epochs, one per call of ``train``; their steps are numbered on.
    """
    evaluate = Evaluator.run_evaluation

    def run_evaluation(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = paused(evaluate, "eval", steps[-1]) if steps else evaluate
        return call(self, *args, **kwargs)

    with (
        instrumented_jit("training_epoch", **options) as steps,
        mock.patch.object(Evaluator, "run_evaluation", run_evaluation),
    ):
        yield steps
