"""Dumps a step's programs, with the model FLOPs counted for the step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from mfu_jax.dumps.program import ModelFlops
from mfu_jax.flops.lengths import NO_LENGTHS, Lengths
from mfu_jax.instrumentation.counts import ModelCount
from mfu_jax.settings import Settings
from mfu_jax.storage.dump_names import SUFFIX
from mfu_jax.storage.trace_folders import dump_path


def model_flops(count: ModelCount) -> ModelFlops:
    """A step's model FLOPs in the form that a dump holds."""
    return ModelFlops(
        per_device=count.per_device,
        convention=count.convention,
        dense=count.dense,
        attention=count.attention,
        operations=count.operations,
        avoidable=count.avoidable,
        overheads=count.overheads,
        is_whole=count.source == "traced" and not count.unaccounted,
    )


def dump_paths(settings: Settings, name: str) -> list[str]:
    """Where to dump a step's program: the user's file, and beside the device traces."""
    beside = [str(dump_path(settings.trace_folder, name))] if settings.profile_steps else []
    return [settings.dump_program, *beside]


def dump_step(
    path: str,
    number: int,
    compiled: Any,
    model: ModelCount | None,
    *,
    kernel_flops: Mapping[str, int],
    trip_counts: Mapping[str, int] | None,
    lengths: Lengths = NO_LENGTHS,
) -> None:
    """Writes one program of a step, in the job's first process only.

    Args:
        path: the first program's file; empty: no dump.
        number: of the program among the step's, from 1; the second goes to ``step.2.mfu``.
        compiled: the program; None if not known.
        model: its model FLOPs, if they could be counted.
        kernel_flops: see `executed_flops`, also for `trip_counts`.
        trip_counts: iterations of loops that depend on data.
        lengths: of groups and sequences that depend on data.

    Raises:
        UserError: it cannot be written.
    """
    if not path or compiled is None or jax.process_index() != 0:
        return
    if number > 1:
        path = f"{path.removesuffix(SUFFIX)}.{number}{SUFFIX}"
    from mfu_jax.dumps.recording import dump  # only runs that dump load it

    dump(
        compiled,
        path,
        model=None if model is None else model_flops(model),
        kernel_flops=kernel_flops,
        trip_counts=trip_counts,
        **lengths.named,
    )
