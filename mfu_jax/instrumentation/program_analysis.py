"""One program of a step: analysed right after compilation, counted in the background, dumped."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, Literal

import jax

from mfu_jax.flops.exact import integral
from mfu_jax.flops.lengths import NO_LENGTHS, Lengths
from mfu_jax.hardware.peak_sources import CALIBRATE, is_measured_peak
from mfu_jax.hardware.step_peaks import StepPeaks, find_peaks
from mfu_jax.instrumentation.assembly import setup_table
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
    warn_of_resharding,
)
from mfu_jax.instrumentation.options import StepOptions
from mfu_jax.logger.records.step_cost import StepCost
from mfu_jax.settings import Settings
from mfu_jax.storage.trace_folders import DUMP_SUFFIX, dump_path
from mfu_jax.util import jax_internals
from mfu_jax.util.failsafe import Boundary, failsafe

_MakePause = Callable[[str], contextlib.AbstractContextManager[Any]]
_log = logging.getLogger("mfu_jax")

# Most calls that wait for a count; the logger's queue has room for more.
_MOST_WAITING = 100


class ProgramAnalysis:
    """One executable of a step: its model FLOPs, its peaks, and its cost.

    Made on the training thread, in the same context as the step's call; `count` may run on any
    thread. Whatever fails is reported and left unknown.

    Args:
        step: the jitted function; JAX's cache holds its executable for these arguments.
        args: the call's arguments; donated ones have lost their values, but not their shapes.
        kwargs: the same by name.
        options: the sources of the counts and peaks, and what depends on data.
        lowered: ``step.lower(*args, **kwargs)``, if the caller has it.
        name: the step's name, for messages.
        boundary: where failures are reported.
        backlog: returns how many calls wait for `cost`; by default 0.
        number: the program's number among the step's programs, from 1.
        calls_per_step: how many calls make a step.
        pause: makes a pause of the loop, by its name.

    Attributes:
        compiled: the executable; None once it has been counted.
        takes_all_leaves: every leaf of the arguments is an input of the program: none is static.
        model: model FLOPs; None if they could not be counted.
        peaks: the peaks for utilisation; None if none is known.
        steps: that one call makes; below 1 where several calls make one.
        flops: all counts; None until `count` is done.
        cost: of a call, for `MetricLogger.record`; before `count` is done, a function that waits
            for it on the recorder's thread.
        known_cost: the part of `cost` known so far, without waiting.
    """

    def __init__(
        self,
        step: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        options: StepOptions,
        lowered: Any = None,
        name: str = "the step",
        boundary: Boundary | None = None,
        backlog: Callable[[], int] = lambda: 0,
        number: int = 1,
        calls_per_step: int = 1,
        pause: _MakePause = contextlib.nullcontext,
    ) -> None:
        settings = self._settings = options.settings
        self.steps = Fraction(settings.steps_per_call, calls_per_step)
        self._number = number
        self._name = name
        self._boundary = boundary = boundary or Boundary()
        self._given: dict[str, Any] = {
            "trip_counts": options.trip_counts,
            "lengths": options.lengths,
        }
        self.model: ModelCount | None = None
        self.peaks: StepPeaks | None = None
        with pause("count"):
            lowered = lowered or jax_internals.lowered(step, args, kwargs)
            inputs = jax.tree.leaves(getattr(lowered, "args_info", None))
            self.takes_all_leaves = len(inputs) == len(jax.tree.leaves((args, kwargs)))
            self.compiled: jax.stages.Compiled | None = unwrap_compiled(lowered.compile())
            self.devices, self.device = compiled_devices(self.compiled)
            with failsafe(f"MFU of {name} is not known", boundary):
                self.model = self._count_model(step, args, kwargs, options.config)
            with failsafe(f"the FLOPs of the Pallas kernels of {name} are not known", boundary):
                self._given["kernel_flops"] = kernel_flops_of(step, args, kwargs, self.device)
        is_given = settings.peak_tflops_per_device is not None
        is_measured = is_measured_peak(self.device.device_kind, settings.hardware)
        # A peak that may be measured, which takes seconds, has a pause by a name of its own.
        with (
            pause(CALIBRATE if is_measured and not is_given else "count"),
            failsafe(f"MFU of {name} is not known", boundary),
        ):
            self.peaks = find_peaks(
                self.device,
                self._flops_by_dtype,
                peak_tflops_per_device=settings.peak_tflops_per_device,
                hardware_name=settings.hardware,
            )
        self.flops: StepFlops | None = None
        self.known_cost = model_cost(self.model, self.peaks, tokens_per_device=self._tokens)
        self._backlog = backlog
        self._done = threading.Event()
        self._thread: threading.Thread | None = None
        self.cost: StepCost | Callable[[], StepCost] = failsafe(
            f"HFU of {name} is not known", boundary, instead=self.known_cost
        )(self._wait)

    def count(self) -> StepFlops | None:
        """Counts the executable; a failure is reported, and HFU stays unknown."""
        try:
            with failsafe(f"HFU of {self._name} is not known", self._boundary):
                self._count()
        finally:
            self.cost = self.known_cost
            self._done.set()
        with failsafe(f"the program of {self._name} is not dumped", self._boundary):
            dump_step(
                self._settings, self._name, self.compiled, self.model, self._number, **self._given
            )
        self.compiled = None
        return self.flops

    def _count(self) -> None:
        if self.model is None or self.compiled is None:
            return
        unit: Literal["step", "call"] = "step" if self.steps == 1 else "call"
        self.flops = count_program(self.compiled, self.model, **self._given, unit=unit)
        self.known_cost = self.flops.cost(self.peaks, tokens_per_device=self._tokens)
        if self.peaks is not None:
            for note in self.peaks.notes(self.flops.timed_by_dtype):
                _log.warning("the program runs %s", note)
        warn_of_resharding(self.flops)

    def _count_model(
        self,
        step: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        config: Any,
    ) -> ModelCount:
        """The model FLOPs of the step, from the source named in the settings."""
        settings, devices = self._settings, self.devices
        if settings.flops_source == "value":
            given = given_model(integral(self.steps * (settings.model_flops_per_device or 0)))
            missing = f"the dtypes of {self._name} are not known, and its peak is that of float32"
            with failsafe(missing, self._boundary):
                traced = traced_model(step, args, kwargs, devices=devices)
                return dataclasses.replace(given, flops_by_dtype=traced.flops_by_dtype)
            return given
        if settings.flops_source == "analytic":
            config = settings.parsed_model_config() if config is None else config
            return analytic_model(config, convention=settings.convention).times(self.steps)
        return traced_model(
            step,
            args,
            kwargs,
            devices=devices,
            convention=settings.convention,
            lengths=self._given["lengths"],
        )

    @property
    def cost_of_step(self) -> StepCost:
        """The part of a step's cost known so far; `cost` and `known_cost` are of a call."""
        return self.known_cost.over(self.steps)

    @property
    def _flops_by_dtype(self) -> Mapping[str, int]:
        return {} if self.model is None else self.model.flops_by_dtype

    @property
    def _tokens(self) -> float:
        given = float(self.steps * (self._settings.tokens_per_step or 0)) / self.devices
        return given or (0 if self.model is None else self.model.tokens_per_device)

    def count_aside(self, then: Callable[[StepFlops], None]) -> None:
        """Counts the executable on a thread of its own, then calls `then` there with the count."""

        def run() -> None:
            if (flops := self.count()) is not None:
                then(flops)

        name, missing = f"mfu_jax count {self._name}", f"HFU of {self._name} is not known"
        # No daemon: a count that runs when the interpreter ends would abort it.
        self._thread = self._boundary.thread(name, missing, run, daemon=False)
        self._thread.start()

    def wait(self, seconds: float) -> None:
        """Waits until `count` is done or the time is up."""
        if self._thread is not None:
            self._thread.join(seconds)

    def _wait(self) -> StepCost:
        # A line without HFU is better than a training thread blocked on the logger's queue.
        while self._thread is not None and self._thread.is_alive():
            if self._backlog() >= _MOST_WAITING or self._done.wait(0.02):
                break
        return self.known_cost

    def setup(self, metrics: str, left_out: str = "") -> dict[str, Any]:
        """The set-up shown before the first log line, name → value.

        Args:
            metrics: which outputs are logged.
            left_out: which outputs are not, and why.
        """
        model = self.model
        return setup_table(
            devices=f"{self.devices} × {self.device.device_kind}",
            peaks=self.peaks,
            model=model,
            model_details="" if model is None else "; ".join({model.convention: 0, model.how: 0}),
            tokens_per_device=self._tokens,
            flops_by_dtype=self._flops_by_dtype,
            metrics=metrics,
            left_out=left_out,
            steps=self.steps,
        )


def dump_step(
    settings: Settings,
    name: str,
    compiled: Any,
    model: ModelCount | None,
    number: int = 1,
    *,
    lengths: Lengths = NO_LENGTHS,
    **given: Any,
) -> None:
    """Writes one program of a step where the settings say, in the job's first process only.

    Args:
        settings: name the user's file; and the folder of device traces, beside which it is written.
        name: of the step.
        compiled: the program; None if not known.
        model: its model FLOPs, if they could be counted.
        number: of the program among the step's, from 1; the second goes to ``step.2.mfu``.
        lengths: of groups and sequences that depend on data.
        **given: ``kernel_flops`` and ``trip_counts``, as for `executed_flops`.

    Raises:
        UserError: it cannot be written.
    """
    if compiled is None or jax.process_index() != 0:
        return
    beside = [str(dump_path(settings.trace_folder, name))] if settings.profile_steps else []
    for path in filter(None, [settings.dump_program, *beside]):
        from mfu_jax.dumps.recording import dump  # only runs that dump load it

        dump(
            compiled,
            f"{path.removesuffix(DUMP_SUFFIX)}.{number}{DUMP_SUFFIX}" if number > 1 else path,
            model=model,
            **{**given, **lengths.named},
        )
