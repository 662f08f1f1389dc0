"""One program of a step: analysed right after its compilation, counted in the background."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

import jax

from mfu_jax.hardware.step_peaks import StepPeaks
from mfu_jax.instrumentation.assembly import peaks_of, setup_table
from mfu_jax.instrumentation.counts import (
    ModelCount,
    StepFlops,
    analytic_model,
    compiled_devices,
    count_program,
    given_model,
    kernel_flops_of,
    model_cost,
    traced_model,
    unwrap_compiled,
)
from mfu_jax.logger.step_cost import StepCost
from mfu_jax.settings import Settings

_log = logging.getLogger("mfu_jax")

# Maximum number of records that wait for a count; the writer's queue has room for more.
_MOST_WAITING = 100


def count_model(
    step: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    settings: Settings,
    config: Any,
    devices: int,
) -> ModelCount:
    """The model FLOPs of a step, from the source that the settings name.

    Args:
        config: for ``flops_source=analytic``; None: `Settings.model_config` names it.

    Raises:
        UserError: the step cannot be traced, or the config is not understood.
    """
    if settings.flops_source == "value":
        given = given_model(settings.model_flops_per_device)
        traced = traced_model(step, args, kwargs, devices=devices)  # for the dtypes of its matmuls
        return dataclasses.replace(given, flops_by_dtype=traced.flops_by_dtype)
    if settings.flops_source == "analytic":
        config = settings.parsed_model_config() if config is None else config
        return analytic_model(config, convention=settings.convention)
    return traced_model(step, args, kwargs, devices=devices, convention=settings.convention)


class ProgramAnalysis:
    """One executable of a step: its model FLOPs, its peaks, and what it costs.

    Made on the training thread, in the context in which the step is called; `count` may run on any
    thread.

    Args:
        step: the jitted function; JAX's cache holds its executable for these arguments.
        args: the call's arguments; donated ones have lost their values but not their shapes.
        kwargs: the same by name.
        settings: the sources of the counts and peaks.
        config: see `count_model`.
        backlog: how many records wait for `cost`; by default 0.

    Attributes:
        compiled: the executable, until it is counted.
        model: model FLOPs.
        peaks: what utilisation is relative to.
        flops: all counts; None until `count` is done.
        cost: for `MetricLogger.record`: what a step costs; before `count` is done, a function that
            waits for it on the builder's thread.
        known_cost: the part of `cost` known so far, without waiting.
    """

    def __init__(
        self,
        step: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        settings: Settings,
        config: Any = None,
        backlog: Callable[[], int] = lambda: 0,
    ) -> None:
        self.compiled: jax.stages.Compiled | None = unwrap_compiled(
            step.lower(*args, **kwargs).compile()
        )
        self.devices, self.device = compiled_devices(self.compiled)
        self.model = count_model(
            step, args, kwargs, settings=settings, config=config, devices=self.devices
        )
        self.peaks: StepPeaks = peaks_of(settings, self.device, self.model.flops_by_dtype)
        self.flops: StepFlops | None = None
        self._hfu_source = settings.hfu_source
        self._tokens = settings.tokens_per_step / self.devices or self.model.tokens_per_device
        self._kernel_flops = kernel_flops_of(step, args, kwargs, self.device)
        self.known_cost = model_cost(self.model, self.peaks, tokens_per_device=self._tokens)
        self._backlog = backlog
        self._done = threading.Event()
        self.cost: StepCost | Callable[[], StepCost] = self._wait

    def count(self) -> StepFlops | None:
        """Counts the executable; a failure is logged, and HFU stays unknown."""
        assert self.compiled is not None
        try:
            self.flops = count_program(self.compiled, self.model, kernel_flops=self._kernel_flops)
            self.known_cost = self.flops.cost(
                self.peaks, tokens_per_device=self._tokens, hfu_source=self._hfu_source
            )
            for note in self.peaks.notes(self.flops.executed.by_dtype):
                _log.warning("the program runs %s", note)
        except Exception as error:
            _log.warning("executed FLOPs are not known, HFU is left out: %s", error)
        finally:
            self.compiled = None
            self.cost = self.known_cost
            self._done.set()
        return self.flops

    def wait(self, seconds: float) -> bool:
        """Waits until `count` is done; False if that takes longer."""
        return self._done.wait(seconds)

    def _wait(self) -> StepCost:
        # A line without HFU is better than a training thread blocked on the writer's queue.
        while self._backlog() < _MOST_WAITING and not self._done.wait(0.02):
            pass
        return self.known_cost

    def setup(self, outputs: str) -> dict[str, Any]:
        """The set-up shown before the first log line, name → value.

        Args:
            outputs: which outputs are logged.
        """
        return setup_table(
            devices=f"{self.devices} × {self.device.device_kind}",
            peaks=self.peaks,
            model=self.model,
            model_details=f"{self.model.convention}; {self.model.how}",
            tokens_per_device=self._tokens,
            flops_by_dtype=self.model.flops_by_dtype,
            metrics=outputs,
        )
