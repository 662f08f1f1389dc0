"""Sources of planned steps: the module that compiles one, its arguments, its config's figures.

Adding another trainer's: a `StepSource` (the reference trainer's is `trainer.planned.planned_step`)
and the module that compiles it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from mfu_jax.dumps.program import ProgramDump
from mfu_jax.errors import UserError, first_line
from mfu_jax.flops.analytic.inputs.sources import as_model_config
from mfu_jax.flops.analytic.names import LOGITS
from mfu_jax.flops.analytic.totals import (
    calculate_tokens_per_device,
    flops_breakdown,
    model_flops_per_device,
)
from mfu_jax.planning.compilation import cache
from mfu_jax.planning.compilation.compiling import PROFILE_FLAG, Limits, Request
from mfu_jax.planning.measured_runs import DEFAULT_STEP, FIXED, model_of
from mfu_jax.planning.result.plan import Plan, StepWork
from mfu_jax.planning.result.planner import make_plan, planned_profile
from mfu_jax.planning.step_time.schedule import PipelineTicks
from mfu_jax.planning.targets import Target

_OWN_PROFILE = "XLA scheduled it by the planned durations, in place of the run's profile"
# A model, and what a device trains of it in a step, by keys that MaxText has, too.
DEVICE_BATCH = "{model_name}, {per_device_batch_size} × {max_target_length} tokens a device,"


class StepSource(Protocol):
    """Makes a step's program from ``key=value``. What has a body here is for steps that cannot say.

    Attributes:
        module: compiles the step in a child process.
        python: the interpreter that has what the module needs.
    """

    module: str
    python: str

    def words(self, values: Mapping[str, str]) -> list[str]:
        """The module's arguments."""

    def run_words(self, values: Mapping[str, str]) -> list[str]:
        """The trainer's arguments to run the step."""

    def named(self, values: Mapping[str, str]) -> str:
        """The model and the batch of a device, in words."""

    def work(self, values: Mapping[str, str]) -> StepWork:
        """The step's work.

        Raises:
            UserError: the config is wrong, or does not give the model's sizes.
        """

    def placed(self, work: StepWork, values: Mapping[str, str]) -> StepWork:
        """The work, with what the step's mesh decides: `own_rows`, `mesh` and `pipeline`."""
        return work

    def identity(self, values: Mapping[str, str]) -> Mapping[str, Any]:
        """What else determines the program: files named by the arguments."""
        return {}

    def invalid(self, values: Mapping[str, str]) -> UserError | None:
        """Why the step cannot be compiled, as far as the config says; None if it can."""
        return None


def compiled_plan(
    source: StepSource,
    target: Target,
    values: Mapping[str, str],
    *,
    limits: Limits,
    folder: Path | None,
    flags: Sequence[str] = (),
    run_flags: Sequence[str] | None = None,
    work: StepWork | None = None,
    progress: Callable[[str], None] = lambda word: None,
) -> Plan:
    """Compiles the step of these values, unless the cache has it, and plans it.

    Args:
        source: makes the step.
        target: the chips.
        values: its keys.
        limits: of the compile.
        folder: the cache's folder; None: no cache.
        flags: compiler flags.
        run_flags: those of a measured run, before them; None: no run is followed.
        work: what the step is for; None: as the source says, or unknown, with a note.
        progress: called with a word for each stage.

    Raises:
        UserError: the compiler is not installed, failed, or ran out of time or memory.
    """
    unknown: tuple[str, ...] = ()
    if work is None:
        try:
            work = source.work(values)
        except UserError as error:
            unknown = (f"no MFU: {first_line(error)}",)
    given = (*(run_flags or ()), *flags)
    measured = [flag for flag in given if _is_missing_profile(flag, target)]
    request = Request(
        module=source.module,
        target=target,
        python=source.python,
        config={"arguments": source.words(values)},
        flags=tuple(flag for flag in given if flag not in measured),
        identity=source.identity(values),
    )
    compiled = functools.partial(
        cache.compile_cached, folder=folder, limits=limits, progress=progress
    )
    program, notes = compiled(request)
    if measured and isinstance(program, ProgramDump):
        profile = planned_profile(program, target, work)
        program, notes = compiled(replace(request, profile=profile))
        notes = (*notes, _OWN_PROFILE)
    follows = run_flags is not None
    plan = make_plan(
        program,
        target,
        work=work,
        flags=given,
        follows_run=follows,
        compiled_by=cache.compiler_of(request),
    )
    return replace(plan.with_notes(*notes, *unknown), model=source.named(values))


def _is_missing_profile(flag: str, target: Target) -> bool:
    """Whether a flag names durations for XLA's scheduler on GPUs that are not here."""
    name, _, path = flag.lstrip("-").partition("=")
    return name == PROFILE_FLAG and target.platform == "cuda" and not Path(path).exists()


class MaxTextStep(StepSource):
    """MaxText's own step: only MaxText knows its mesh, what its kernels skip, and what is invalid.

    Args:
        python: the interpreter that has MaxText; empty: this one.
    """

    module = "mfu_jax.planning.compilation.maxtext_step"

    def __init__(self, python: str = "") -> None:
        self.python = python or sys.executable

    def words(self, values: Mapping[str, str]) -> list[str]:
        """MaxText's arguments."""
        return [f"{key}={value}" for key, value in {**FIXED, **values}.items()]

    def run_words(self, values: Mapping[str, str]) -> list[str]:
        """MaxText's arguments without the plan's own."""
        return [f"{key}={value}" for key, value in values.items()]

    def named(self, values: Mapping[str, str]) -> str:
        """The model and the batch, by MaxText's keys and its defaults."""
        return DEVICE_BATCH.format_map({**DEFAULT_STEP, **values})

    def work(self, values: Mapping[str, str]) -> StepWork:
        """The step's work, from the model's bundled config, MaxText's keys and its defaults."""
        return work_of(_maxtext_model(values))


def _maxtext_model(values: Mapping[str, str]) -> Mapping[str, Any]:
    """What MaxText makes of its keys: its own values for those left out."""
    return model_of({**DEFAULT_STEP, **values})


def work_of(config: Any, convention: str = "maxtext") -> StepWork:
    """The work of a step whose config has MaxText's keys.

    Raises:
        UserError: a size is missing or wrong.
    """
    return StepWork(
        model_flops=round(model_flops_per_device(config, convention).training),
        tokens=float(calculate_tokens_per_device(config)),
        convention=convention,
        experts=as_model_config(config).experts.num_experts > 1,
    )


def pipeline_ticks(
    config: Any, stages: int, layers_per_stage: int, microbatches: int
) -> PipelineTicks | None:
    """The ticks of a circular pipeline (arXiv 2104.04473, section 2.2); None without one.

    P stages of L layers each pass M microbatches around R times, R·P·L being all layers, in
    M·R + P − 1 ticks. A stage works on a microbatch in M·R of them.

    Args:
        config: the model's; has MaxText's keys.
        stages: P.
        layers_per_stage: L.
        microbatches: M; -1: as many as stages.
    """
    if stages <= 1:
        return None
    rows = flops_breakdown(config)
    layers = {row.layer: row.repeats for row in rows if row.component != LOGITS}
    passes = sum(layers.values()) // (stages * layers_per_stage)
    parts = stages if microbatches == -1 else microbatches
    return PipelineTicks(total=parts * passes + stages - 1, idle=stages - 1)
