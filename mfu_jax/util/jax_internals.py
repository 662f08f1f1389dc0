"""Everything that we use from JAX beyond its stable API, in one file.

JAX may move or change these in any version. `tests/util/test_jax_internals.py` looks up each name
and reports which one is gone, in which version, and what we use it for.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any, Protocol

import jax
import numpy as np
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Primitive, primitives
from jax.interpreters.partial_eval import dce_jaxpr

# Exported by JAX 0.8.3, but not by 0.8.0.
try:
    from jax.extend.core.primitives import remat_p
except ImportError:
    from jax._src.ad_checkpoint import remat_p
try:
    from jax.monitoring import unregister_event_duration_listener
except ImportError:
    from jax._src.monitoring import (  # type: ignore[attr-defined,no-redef]
        _unregister_event_duration_listener_by_callback as unregister_event_duration_listener,
    )

__all__ = [
    "ClosedJaxpr",
    "CompiledModule",
    "Jaxpr",
    "KeyValueStore",
    "Literal",
    "Primitive",
    "array_of_block",
    "compile_lowered",
    "coordination_store",
    "hlo_text_of_proto",
    "host_value",
    "is_compiling",
    "lowered",
    "mlir_bindings",
    "open_jaxpr",
    "primitives",
    "reached_preemption_sync_point",
    "remat_p",
    "scan_groups",
    "set_cuda_capability",
    "set_xla_metadata",
    "split_torus",
    "text_with_large_constants",
    "topology_devices",
    "unregister_event_duration_listener",
    "user_frames",
    "without_dead_code",
    "without_references",
]


def without_dead_code(jaxpr: Jaxpr) -> Any:
    """The open jaxpr without equations that no output needs; all inputs are kept."""
    # A list: before JAX 0.10, a single bool for all outputs is a TypeError.
    used = [True] * len(jaxpr.outvars)
    return dce_jaxpr(jaxpr, used, instantiate=True)[0]


def open_jaxpr(value: Any) -> Any | None:
    """The jaxpr inside a closed one, an open one as it is, None for anything else."""
    if isinstance(value, ClosedJaxpr):
        return value.jaxpr
    return value if isinstance(value, Jaxpr) else None


def lowered(step: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """``step.lower(*args, **kwargs)``, also where its objects accept nothing but arrays.

    JAX rebuilds arguments and outputs with a description in place of each array, which the
    constructors of some pytrees (a class that converts its fields by `jnp.asarray`) refuse. Then
    the descriptions are left in lists.
    """
    try:
        return step.lower(*args, **kwargs)
    except Exception as error:
        try:
            traced = step.trace(*args, **kwargs)
            for tree in ("_in_tree", "out_tree"):
                leaves = getattr(traced, tree).num_leaves
                setattr(traced, tree, jax.tree.structure([0] * leaves))
            return traced.lower()
        except Exception:
            raise error from None


def without_references(closed: Any) -> Any:
    """A closed jaxpr whose `jax.Ref`s are values that are passed on, as JAX lowers it."""
    from jax._src.state.discharge import discharge_state

    if not any(type(effect).__name__ in _OF_REFERENCES for effect in closed.effects):
        return closed
    discharge: Callable[..., Any] = discharge_state
    if "consts" not in inspect.signature(discharge).parameters:  # since JAX 0.10
        return discharge(closed)
    return ClosedJaxpr(*discharge(closed.jaxpr, closed.consts))


_OF_REFERENCES = {"InternalMutableArrayEffect", "ReadEffect", "WriteEffect", "AccumEffect"}


def scan_groups(eqn: Any) -> tuple[int, int]:
    """How many of a `scan`'s operands are constants, and how many are carried.

    JAX 0.10 has these numbers as parameters; later versions group the operands in a flat tree.
    """
    params = eqn.params
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    constants, carried, _ = params["ft_in"].update(list(eqn.invars)).unpack()
    return len(list(constants)), len(list(carried))


def user_frames(source_traceback: Any) -> tuple[tuple[str, int], ...]:
    """Where an equation comes from in the user's code: (file, line) pairs, without JAX's own."""
    if source_traceback is None:
        return ()
    return tuple(
        (frame.file_name, frame.line_num)
        for frame in source_traceback.frames
        if "/jax/" not in frame.file_name and not frame.file_name.startswith("<")
    )


def host_value(value: Any) -> Any:
    """The value of a literal or constant as a NumPy array; arrays on a device are left alone.

    JAX 0.8 wraps host arrays in a `TypedNdArray`; in later versions this derives from `ndarray`.
    """
    wrapped = getattr(value, "val", None)
    return wrapped if isinstance(wrapped, np.ndarray) else value


def array_of_block(block: Any) -> Any:
    """The whole array (its shape and dtype) of a block of a Pallas kernel's grid.

    JAX 0.8 calls it `array_shape_dtype`, later versions `array_aval`.
    """
    return getattr(block, "array_aval", None) or block.array_shape_dtype


def text_with_large_constants(compiled: Any) -> str | None:
    """The optimised HLO with its constants printed in full; None if `compiled` is not JAX's."""
    if not hasattr(compiled, "runtime_executable"):
        return None
    hlo = compiled.runtime_executable().hlo_modules()[0]
    options = sys.modules[type(hlo).__module__].HloPrintOptions()
    options.print_large_constants = True
    return str(hlo.to_string(options))


def hlo_text_of_proto(content: bytes) -> str:
    """The text of a serialized ``HloModuleProto``, with its constants printed in full.

    Raises:
        jax.errors.JaxRuntimeError: it is not an ``HloModuleProto``.
    """
    try:
        from jaxlib import _hlo as hlo  # type: ignore[attr-defined]
    except ImportError:  # before JAX 0.10
        from jax._src.lib import _jax as hlo
    options = hlo.HloPrintOptions()
    options.print_large_constants = True
    return str(hlo.HloModule.from_serialized_hlo_module_proto(content).to_string(options))


def parameter_shardings(compiled: Any) -> list[str]:
    """The shardings of an executable's parameters in HLO syntax; empty if it has none.

    JAX 0.12's HLO text lacks them.
    """
    if not hasattr(compiled, "runtime_executable"):
        return []
    try:
        protos = compiled.runtime_executable().get_parameter_shardings() or []
        return [repr(sys.modules[type(p).__module__].HloSharding.from_proto(p)) for p in protos]
    except (AttributeError, RuntimeError):  # a plugin without them
        return []


def mlir_bindings(dialect: str) -> tuple[Callable[..., None], Any, Any]:
    """MLIR's Python bindings in jaxlib.

    Args:
        dialect: the dialect of the kernels to parse: tpu, triton or mosaic_gpu.

    Returns:
        A function that registers in a context the dialect (`with_own`) and the upstream dialects
        that kernels mix in (`with_upstream`); `ir`; and `PassManager`.

    Raises:
        ImportError: jaxlib is missing, or lacks the dialect.
    """
    from jax._src.lib import mosaic_gpu_dialect, tpu
    from jaxlib.mlir import ir
    from jaxlib.mlir._mlir_libs import _jax_mlir_ext
    from jaxlib.mlir.passmanager import PassManager
    from jaxlib.triton import dialect as triton_dialect

    own = {"tpu": tpu, "triton": triton_dialect, "mosaic_gpu": mosaic_gpu_dialect}[dialect]

    def register(context: Any, *, with_upstream: bool, with_own: bool) -> None:
        if with_upstream:
            registry = ir.DialectRegistry()
            _jax_mlir_ext.register_dialects(registry)
            context.append_dialect_registry(registry)
            context.load_all_available_dialects()
        if with_own:
            own.register_dialect(context)

    return register, ir, PassManager


def jaxlib_version() -> str:
    """The version of the jaxlib whose bindings `mlir_bindings` returns."""
    from jaxlib.version import __version__

    return str(__version__)


def topology_devices(platform: str, topology: str, **options: Any) -> list[Any]:
    """The devices of a topology to compile for; they need not be attached.

    Args:
        platform: ``tpu``, or ``cuda`` with the option `target_config`.
        topology: such as ``v5p:8x8x8``, or ``1x1x8`` of GPUs.
        options: options of the platform's compiler.
    """
    from jax.experimental import topologies

    if platform == "cuda":
        options, topology = {**options, "topology": topology}, "gpu"
    return list(topologies.get_topology_desc(topology, platform, **options).devices)


def set_cuda_capability(capability: str) -> None:
    """Makes JAX's checks of cuDNN attention those of absent GPUs, for the rest of this process.

    They ask an attached GPU, and without one refuse heads wider than 128.
    """
    from jax._src.cudnn import fused_attention_stablehlo

    def parts(text: str) -> tuple[int, ...]:
        return tuple(map(int, text.split(".")))

    checks: Any = fused_attention_stablehlo
    checks.check_compute_capability = lambda least: parts(capability) >= parts(least)
    checks.is_cuda_compute_capability_equal = lambda wanted: parts(capability) == parts(wanted)


def split_torus(shape: Sequence[int], devices: Sequence[Any]) -> Any:
    """Devices as an array of `shape`, whose axes may split a physical axis of a TPU torus."""
    from jax.experimental.mesh_utils import create_device_mesh

    return create_device_mesh(shape, devices, allow_split_physical_axes=True)


def reached_preemption_sync_point(step: int) -> bool:
    """Whether all processes should stop after `step`; all of them get the same answer."""
    from jax.experimental import multihost_utils

    return bool(multihost_utils.reached_preemption_sync_point(step))


def least_of_processes(number: float) -> float:
    """The least of the numbers that all processes pass; float32. All of them have to call it."""
    from jax.experimental import multihost_utils

    return float(multihost_utils.process_allgather(np.float32(number)).min())


_COMPILING = frozenset(
    f"jax._src.{name}" for name in ("interpreters.partial_eval", "interpreters.mlir", "compiler")
)


def is_compiling(frame: FrameType | None) -> bool:
    """Whether a thread whose innermost frame this is traces, lowers or compiles, by its modules."""
    while frame is not None:
        if frame.f_globals.get("__name__") in _COMPILING:
            return True
        frame = frame.f_back
    return False


class KeyValueStore(Protocol):
    """The part of JAX's distributed key-value store used here; each call may raise or hang."""

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None: ...
    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]: ...


def coordination_store() -> tuple[Any, str]:
    """The key-value store shared by the processes of a job, and the address of process 0.

    The store is None if ``jax.distributed.initialize`` was not called.
    """
    from jax._src.distributed import global_state

    return global_state.client, str(global_state.coordinator_address)


class CompiledModule:
    """A program compiled from its text, with the methods that `mfu_jax.dump` needs.

    Args:
        executable: XLA's executable.
        mesh: the mesh of its devices.
    """

    def __init__(self, executable: Any, mesh: Any) -> None:
        from jax.sharding import NamedSharding, PartitionSpec

        self._executable = executable
        self.input_shardings = [NamedSharding(mesh, PartitionSpec())]
        self.output_shardings: list[Any] = []

    def runtime_executable(self) -> Any:
        """XLA's executable."""
        return self._executable

    def cost_analysis(self) -> Any:
        """XLA's own counts; None if it gives none."""
        try:
            return self._executable.cost_analysis()
        except (RuntimeError, NotImplementedError):
            return None

    def memory_analysis(self) -> Any:
        """XLA's memory statistics."""
        return self._executable.get_compiled_memory_stats()


def compile_lowered(
    text: str, mesh: Any, options: Mapping[str, Any] | None = None
) -> CompiledModule:
    """Compiles the output of ``lowered.as_text(debug_info=True)`` from another process.

    Args:
        text: StableHLO, with its shardings.
        mesh: the devices, attached or not, in the order of the program's partitions.
        options: the compiler's, by name.
    """
    from jax._src import compiler
    from jax._src.interpreters import mlir
    from jax._src.lib import xla_client
    from jaxlib.mlir import ir

    devices = list(mesh.devices.flat)
    grid = np.empty(len(devices), dtype=object)
    grid[:] = devices
    with mlir.make_ir_context() as context:
        module = ir.Module.parse(text, context)
        settings = compiler.get_compile_options(
            num_replicas=1,
            num_partitions=len(devices),
            device_assignment=grid.reshape(1, -1),
            env_options_overrides=dict(options or {}),
            backend=devices[0].client,
        )
        build = settings.executable_build_options
        main = _main_function(module).operation.attributes
        build.allow_spmd_sharding_propagation_to_parameters = _unsharded(main, "arg_attrs")
        build.allow_spmd_sharding_propagation_to_output = _unsharded(main, "res_attrs")
        listed = xla_client.DeviceList(tuple(devices))
        client = devices[0].client
        executable = compiler.compile_or_get_cached(client, module, grid, settings, [], listed)
    return CompiledModule(executable, mesh)


def _main_function(module: Any) -> Any:
    for operation in module.body.operations:
        attributes = operation.operation.attributes
        if "sym_name" in attributes and attributes["sym_name"].value == "main":
            return operation
    raise ValueError("a lowered program without a main function")


def _unsharded(main: Any, name: str) -> list[bool]:
    """For each argument (or result), whether XLA may choose its sharding."""
    if name not in main:
        return [True]
    keys = ("sdy.sharding", "mhlo.sharding")
    return [not any(key in value for key in keys) for value in main[name]] or [True]
