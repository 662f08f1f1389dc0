"""kauldron: every ``Trainer.train``, by its ``TrainStep``."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import numpy as np
from kauldron.evals.evaluators import EvaluatorBase
from kauldron.train.train_step import TrainStep
from kauldron.utils.chrono_utils import Chrono, Pause

from mfu_jax.integrations.built_steps import add_step, closing


def scalars_of(output: Any) -> dict[str, Any]:
    """The losses of kauldron's step, ``(state, AuxiliariesState)``, and their total as ``loss``.

    Returns:
        Name → a function that reduces the loss as kauldron's writer does; empty for a step between
        those of ``log_metrics_every``, which returns no losses.
    """
    aux = output[1]

    @functools.cache
    def values() -> dict[str, Any]:
        states = jax.tree.map(np.asarray, aux.loss_states)
        reduced = aux.replace(loss_states=states, metric_states={}, summary_states={}).compute()
        return dict(reduced.loss_values)

    def value(name: str) -> Any:
        return values()[f"losses/{name}"]

    names = {name: name for name in aux.loss_states or ()}
    totals = {"loss": "total"} if names else {}
    return {key: functools.partial(value, name) for key, name in (names | totals).items()}


@contextlib.contextmanager
def instrumented(**options: Any) -> Iterator[list[Any]]:
    """Measures every step of the trainers that train inside it; evals and checkpoints are pauses.

    Args:
        **options: of `mfu_jax.instrument`; ``start_step`` after a resume.

    Yields:
        The instrumented ``TrainStep.step``, alone in a list.
    """
    steps: list[Any] = []
    maybe_eval, pause = EvaluatorBase.maybe_eval, Chrono.pause

    def paused_eval(self: Any, *, step: int, state: Any) -> Any:
        # Of an evaluation that is not due nothing must be waited for.
        is_due = self.run.should_eval_in_train(step)
        with steps[0].logger.pause("eval") if is_due else contextlib.nullcontext():
            return maybe_eval(self, step=step, state=state)

    @contextlib.contextmanager
    def pause_of_both(self: Any, report_as: str | None = None) -> Iterator[None]:
        is_save = report_as == Pause.CHECKPOINT
        with (
            steps[0].logger.pause("checkpoint") if is_save else contextlib.nullcontext(),
            pause(self, report_as),
        ):
            yield

    with closing(steps):
        add_step(steps, TrainStep.step, {"metrics": scalars_of} | options)
        with (
            mock.patch.object(TrainStep, "step", steps[0]),
            mock.patch.object(EvaluatorBase, "maybe_eval", paused_eval),
            mock.patch.object(Chrono, "pause", pause_of_both),
        ):
            yield steps
