"""`mfu_jax.plan`: a plan of any step that JAX can lower.

The step is traced and lowered here, for the target platform, on arrays that are only shapes, dtypes
and shardings. Its text goes to a child process that has the compiler. So none of the step's code is
imported or run there, and no device of this process is used.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mfu_jax.errors import UserError, first_line
from mfu_jax.planning.compilation import cache
from mfu_jax.planning.compilation.compiling import Limits, Request, compiler_flags
from mfu_jax.planning.result.plan import Plan, StepWork
from mfu_jax.planning.result.planner import make_plan
from mfu_jax.planning.targets import Target, parse_target
from mfu_jax.util.formatting import counted

_PARTITIONS = re.compile(r"mhlo\.num_partitions = (\d+)")
_AXIS = "fsdp"  # of the default mesh, if the user has none


def plan(
    step: Callable[..., Any],
    *args: Any,
    topology: str = "",
    hardware: str = "",
    devices: int | None = None,
    slices: int | None = None,
    xla_flags: str | Sequence[str] = (),
    tokens_per_step: float = 0.0,
    trip_counts: Mapping[str, int] | None = None,
    compile_seconds: float = Limits.seconds,
    compile_gib: float = 0.0,
    cache_folder: str | Path | None = "",
) -> Plan:
    """Predicts whether a step fits on chips you do not have, how long it takes, what limits it.

    Args:
        step: a function, or the result of ``jax.jit``, whose donated arguments, shardings and
            static arguments then apply. ``nnx.jit`` and ``eqx.filter_jit`` work as well.
        args: the step's arguments: arrays, or ``jax.ShapeDtypeStruct``. Their `NamedSharding`s
            apply; the mesh is a ``jax.sharding.AbstractMesh`` as large as the topology, or a real
            one. If no array has a sharding, each is split over all devices along its largest
            dimension divisible by their number (fsdp).
        topology: TPU chips: ``v5p:8x8x8``, or a slice name, ``v6e-8``.
        hardware: GPU name, with `devices`.
        devices: number of GPUs.
        slices: number of TPU slices, connected by the data-center network; None: as in
            `topology`, or one.
        xla_flags: compiler flags, each ``--name=value``; they change the schedule.
        tokens_per_step: tokens of one step of the whole job, for the token rate.
        trip_counts: iterations of loops that depend on data, by the names in the plan's notes.
        compile_seconds: time limit for the compiler.
        compile_gib: limit on the host memory that it allocates, excluding libraries that it maps;
            0: no limit.
        cache_folder: cache of compiled programs; empty: the user's default cache; None: no cache.

    Returns:
        The plan. ``print`` shows one screen; `to_json` gives everything.

    Raises:
        UserError: the chips are not known, the step's mesh does not cover them, it cannot be
            lowered, or the compiler is not installed, failed, or ran out of time or memory.

    Code that queries the attached devices at trace time is lowered for those devices.
    """
    target = parse_target(topology=topology, hardware=hardware, devices=devices, slices=slices)
    for name, number in (("tokens_per_step", tokens_per_step), ("compile_gib", compile_gib)):
        if not 0 <= number < math.inf:
            raise UserError(f"{name}={number}; expected a number, 0 or more")
    flags = compiler_flags(xla_flags)
    trip_counts = _iterations(trip_counts or {})
    step, args = of_arrays(step, args)
    text, axes, abstract, notes = _lowered(step, args, target)
    if cache_folder == "":
        cache_folder = cache.default_folder()
    request = Request(
        module="mfu_jax.planning.compilation.lowered_step",
        target=target,
        config={"text": text, "mesh": dict(axes)},
        flags=flags,
    )
    program, compiled_notes = cache.compile_cached(
        request,
        folder=None if cache_folder is None else Path(cache_folder),
        limits=Limits(seconds=compile_seconds, memory_bytes=round(compile_gib * 2**30)),
    )
    work, work_notes = _work(step, abstract, target, tokens_per_step)
    work = replace(work, mesh=axes, trip_counts=trip_counts)
    compiler = cache.compiler_of(request)
    plan = make_plan(program, target, work=work, flags=flags, compiled_by=compiler)
    return plan.with_notes(*notes, *compiled_notes, *work_notes)


def _iterations(given: Mapping[str, int]) -> Mapping[str, int]:
    if not isinstance(given, Mapping) or not all(
        isinstance(times, int) and times >= 0 for times in given.values()
    ):
        raise UserError(
            f"trip_counts={given!r}; expected a loop's name and its iterations, as in "
            "trip_counts={'jit(step)/while': 10}"
        )
    return given


def _lowered(
    step: Callable[..., Any], args: tuple[Any, ...], target: Target
) -> tuple[str, Mapping[str, int], tuple[Any, ...], tuple[str, ...]]:
    """The step's lowered text, its mesh axes, its abstract arguments, and notes."""
    import jax

    jitted: Any = step if hasattr(step, "trace") else jax.jit(step)
    abstract, axes, notes = abstract_arguments(args, target.devices)
    if math.prod(axes.values()) != target.devices:
        raise _wrong_mesh(
            f"the mesh of its arguments has {counted(math.prod(axes.values()), 'device')}", target
        )
    text = _text(jitted, abstract, target)
    found = _PARTITIONS.search(text)
    if found and int(found[1]) != target.devices:
        raise _wrong_mesh(f"it is lowered for {counted(int(found[1]), 'device')}", target)
    return text, axes, abstract, notes


def abstract_arguments(args: Any, devices: int) -> tuple[Any, Mapping[str, int], tuple[str, ...]]:
    """Arguments as shapes, dtypes and shardings, their mesh axes, and a note on a mesh of ours."""
    import jax

    abstract = jax.tree.map(_abstract, args)
    if axes := _mesh_of(abstract):
        return abstract, axes, ()
    if devices == 1:
        return abstract, {_AXIS: 1}, ()
    note = f"no argument has a sharding: each is split over {devices} devices"
    return _split(abstract, devices), {_AXIS: devices}, (note,)


def _wrong_mesh(seen: str, target: Target) -> UserError:
    return UserError(
        f"the step: {seen}; expected {target.devices}, those of {target}",
        hint="usually a mesh of this machine; build its shardings on a "
        "jax.sharding.AbstractMesh of that size",
    )


def of_arrays(
    step: Callable[..., Any], args: tuple[Any, ...]
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The step as a function of arrays and numbers alone, unless it is a result of ``jax.jit``.

    Other leaves, such as the activation functions of an Equinox module, are part of it.
    """
    import jax

    def is_dynamic(leaf: Any) -> bool:
        return is_array(leaf) or isinstance(leaf, (bool, int, float, complex))

    if hasattr(step, "trace") or all(map(is_dynamic, jax.tree.leaves(args))):
        return step, args
    static = jax.tree.map(lambda leaf: None if is_dynamic(leaf) else leaf, args)
    dynamic = jax.tree.map(lambda leaf: leaf if is_dynamic(leaf) else None, args)

    @functools.wraps(step)
    def of_dynamic(*arrays: Any) -> Any:
        merged = jax.tree.map(
            lambda array, leaf: leaf if array is None else array,
            arrays,
            static,
            is_leaf=lambda leaf: leaf is None,
        )
        outputs = step(*merged)
        return jax.tree.map(lambda leaf: leaf if is_dynamic(leaf) else None, outputs)

    return of_dynamic, dynamic


def _text(jitted: Any, abstract: tuple[Any, ...], target: Target) -> str:
    try:
        lowered = jitted.trace(*abstract).lower(lowering_platforms=(target.platform,))
    except Exception as error:  # whatever the step raises when it is traced
        raise UserError(
            f"the step cannot be lowered for {target.platform}: {type(error).__name__}: "
            f"{first_line(error)}",
            hint="usually wrong arguments, or a kernel of another platform",
        ) from error
    return str(lowered.as_text(debug_info=True))


def is_array(value: Any) -> bool:
    """Whether an argument is an array, or stands for one."""
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _abstract(value: Any) -> Any:
    """An array's shape and dtype, and its sharding if that is a `NamedSharding`."""
    import jax
    from jax.sharding import NamedSharding

    if not is_array(value):
        return value
    sharding = getattr(value, "sharding", None)
    named = sharding if isinstance(sharding, NamedSharding) else None
    return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=named)


def _mesh_of(abstract: Any) -> Mapping[str, int]:
    """Mesh axes of the first argument that has a sharding; empty if none has one."""
    import jax

    for leaf in jax.tree.leaves(abstract):
        if getattr(leaf, "sharding", None) is not None:
            return {str(axis): int(size) for axis, size in leaf.sharding.mesh.shape.items()}
    return {}


def _split(abstract: Any, count: int) -> Any:
    """Splits every array along its largest dimension divisible by the number of devices."""
    import jax
    from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

    mesh = AbstractMesh((count,), (_AXIS,), axis_types=(AxisType.Auto,))

    def split(leaf: Any) -> Any:
        if not is_array(leaf):
            return leaf
        divided = [size if size % count == 0 else 0 for size in leaf.shape]
        largest = divided.index(max(divided)) if any(divided) else -1
        spec = [_AXIS if i == largest else None for i in range(len(leaf.shape))]
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(split, abstract)


def _work(
    step: Callable[..., Any], abstract: tuple[Any, ...], target: Target, tokens: float
) -> tuple[StepWork, tuple[str, ...]]:
    """Model FLOPs of the traced step, and notes on what cannot be counted."""
    from mfu_jax.flops.traced.counting import count_model_flops

    work = StepWork(model_flops=None, tokens=tokens / target.devices, convention="maxtext")
    try:
        count = count_model_flops(step, *abstract)
    except Exception as error:  # a plan without an MFU is still useful
        return work, (f"model FLOPs are not counted: {first_line(error)}",)
    notes = tuple(f"model FLOPs lack {item.name}: {item.reason}" for item in count.unaccounted)
    return replace(work, model_flops=round(count.total_in("maxtext") / target.devices)), notes
