"""Records a compiled program: everything that JAX reports about it while it is in memory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from mfu_jax.dumps.files import write
from mfu_jax.dumps.program import ModelFlops, ProgramDump, Topology
from mfu_jax.errors import UserError
from mfu_jax.flops.count import KernelRuns
from mfu_jax.flops.executed.mesh_axes import mesh_of
from mfu_jax.flops.lengths import Lengths
from mfu_jax.names import AS_GIVEN
from mfu_jax.util.optional_deps import versions_of

if TYPE_CHECKING:
    import jax

# The packages whose versions determine a program, as far as they are installed.
_PACKAGES = (
    *("mfu_jax", "jax", "jaxlib", "libtpu", "tokamax", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13"),
    *("jax-cuda12-plugin", "jax-cuda12-pjrt", "jax-cuda13-plugin", "jax-cuda13-pjrt"),
    *("jax-rocm60-plugin", "jax-rocm7-plugin"),
)


def dump(
    compiled: jax.stages.Compiled | ProgramDump,
    path: str | os.PathLike[str],
    *,
    model: ModelFlops | Any = None,
    kernel_flops: KernelRuns | None = None,
    trip_counts: Mapping[str, int] | None = None,
    group_sizes: Sequence[int] = (),
    sequence_lengths: Sequence[int] = (),
) -> None:
    """Writes a compiled program to one compressed file; read it with `mfu_jax.dumps.load`.

    The file holds the complete optimised HLO (``compiled.as_text()`` omits large constants, such
    as the tables of attention kernels), XLA's cost and memory analysis, the devices, the versions,
    and whatever else is passed here. ``mfu-jax compare`` explains it.

    Args:
        compiled: ``jax.jit(step).lower(…).compile()``.
        path: path of the file, with the suffix ``.mfu``: local, or an address such as
            ``gs://bucket/step.mfu``. An existing file is replaced.
        model: model FLOPs of the step: the count of `mfu_jax.count_model_flops`, a number for one
            device, or a `ModelFlops`.
        kernel_flops: FLOPs per run of custom kernels, by name; see `mfu_jax.executed_flops`.
        trip_counts: iterations of data-dependent loops; see `mfu_jax.executed_flops`.
        group_sizes: rows of each group (expert) in grouped matmuls; likewise.
        sequence_lengths: keys of each sequence in paged attention; likewise.

    Raises:
        UserError: the path cannot be written, `compiled` is not a compiled program, or it is too
            large.
    """
    program = record(
        compiled,
        model=model,
        kernel_flops=kernel_flops,
        trip_counts=trip_counts,
        group_sizes=group_sizes,
        sequence_lengths=sequence_lengths,
    )
    write(program, path)


def record(
    compiled: jax.stages.Compiled | ProgramDump,
    *,
    model: ModelFlops | Any = None,
    kernel_flops: KernelRuns | None = None,
    trip_counts: Mapping[str, int] | None = None,
    group_sizes: Sequence[int] = (),
    sequence_lengths: Sequence[int] = (),
) -> ProgramDump:
    """Returns what `dump` writes; the arguments are the same.

    Raises:
        UserError: `compiled` is not a compiled program.
    """
    if isinstance(compiled, ProgramDump):
        return compiled
    from mfu_jax.util.jax_internals import parameter_shardings, text_with_large_constants

    text = text_with_large_constants(compiled)
    if not text:
        raise UserError(
            f"dump of {type(compiled).__name__}: expected a compiled program of JAX",
            hint="usually the function itself or its text; pass jax.jit(step).lower(…).compile()",
        )
    topology, runtime = _topology(compiled)
    cost: Any = compiled.cost_analysis()
    return ProgramDump(
        text=text,
        cost=dict(cost) if cost else None,
        memory=_memory(compiled.memory_analysis()),
        topology=topology,
        versions=versions_of(_PACKAGES) | runtime,
        parameter_shardings=tuple(parameter_shardings(compiled)),
        model=_model_flops(model, topology.devices),
        kernel_flops=dict(kernel_flops or {}),
        trip_counts=dict(trip_counts or {}),
        lengths=Lengths.of(group_sizes, sequence_lengths),
    )


def _memory(analysis: Any) -> dict[str, int] | None:
    """Every integer field: which fields exist depends on the JAX version."""
    if analysis is None:
        return None
    fields = {name: getattr(analysis, name) for name in dir(analysis) if not name.startswith("_")}
    return {name: value for name, value in fields.items() if type(value) is int}


def _topology(compiled: Any) -> tuple[Topology, dict[str, str]]:
    """The program's devices, and the version of their runtime."""
    import jax

    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    if not shardings:
        return Topology(), {}
    devices = sorted(shardings[0].device_set, key=lambda device: device.id)
    topology = Topology(
        platform=devices[0].platform,
        device_kind=devices[0].device_kind,
        devices=len(devices),
        processes=len({device.process_index for device in devices}),
        mesh=mesh_of(compiled),
        memory_bytes=_memory_bytes(devices[0]),
    )
    client = getattr(devices[0], "client", None)
    runtime = " ".join(str(getattr(client, "platform_version", "")).split())
    return topology, {"platform": runtime} if runtime else {}


def _memory_bytes(device: Any) -> int:
    """What the runtime allows; for a CPU device, its share of the machine. 0 if unknown."""
    import jax

    if device.platform == "cpu":
        sizes = (os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE"))
        return sizes[0] * sizes[1] // max(len(jax.local_devices(backend="cpu")), 1)
    with contextlib.suppress(RuntimeError, AttributeError, ValueError):  # not this machine's device
        return int((device.memory_stats() or {}).get("bytes_limit", 0))
    return 0


def _model_flops(model: Any, devices: int) -> ModelFlops | None:
    """Model FLOPs per device, from a number or from a traced count of the whole job."""
    if model is None or isinstance(model, ModelFlops):
        return model
    if isinstance(model, int | Fraction):
        return ModelFlops(per_device=model, convention=AS_GIVEN)
    if not hasattr(model, "total_in"):
        raise UserError(
            f"model={model!r}: expected the count of mfu_jax.count_model_flops, or FLOPs of "
            "one device",
            hint="usually a count of the compiled program; pass count_model_flops(step, …)",
        )
    return ModelFlops.traced(model, max(devices, 1))
