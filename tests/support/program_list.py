"""The programs that are compiled and recorded for the tests, with what each must execute.

`tests/support/record_programs.py` compiles them; `test_recorded_programs.py` counts what it
recorded.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tests.support import (
    program_devices,
    program_factorizations,
    program_families,
    program_kernel_bodies,
    program_kernels,
    program_models,
    program_names,
    program_patterns,
    program_rings,
    program_shared_calls,
    program_silicon,
    program_tokamax,
    program_vectors,
)
from tests.support.reference_model import Shape, reference_step

Build = Callable[[Any], tuple[Callable[..., Any], tuple[Any, ...]]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """One program: what to compile, where for, and what a device must execute.

    Attributes:
        platform: cpu, h100, or a TPU generation.
        topology: of the devices; empty for the platform's usual one.
        build: from the devices to a function and the shapes of its arguments.
        options: compiler options.
        flops: matmul FLOPs of one device, without what XLA computes twice; None where the test
            says it otherwise.
        rematerialized: the part of it that jax.checkpoint runs again.
    """

    platform: str
    build: Build
    topology: str = ""
    options: Mapping[str, Any] | None = None
    flops: int | None = None
    rematerialized: int = 0

    def compile(self, devices: Any) -> Any:
        """The compiled program."""
        function, arguments = self.build(devices)
        lowered = jax.jit(function, donate_argnums=0).lower(*arguments)
        return lowered.compile(compiler_options=dict(self.options or {}))


def versions(platform: str) -> dict[str, str]:
    """Versions of what compiled a program."""
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for package in ("jax", "jaxlib", "libtpu", "jax-cuda13-plugin", "nvidia-cudnn-cu13"):
        wanted = package.startswith("jax") and "cuda" not in package
        wanted |= package == "libtpu" and platform not in ("cpu", "h100")
        wanted |= platform == "h100" and package.endswith(("plugin", "cu13"))
        if wanted:
            try:
                found[package] = version(package)
            except PackageNotFoundError:
                continue
    return found


def on_one_device(function: Callable[..., Any], *arguments: Any) -> Build:
    """A build that lays all arguments on the first device."""

    def build(devices: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        mesh = Mesh(np.array(devices[:1]), ("x",))
        sharding = NamedSharding(mesh, PartitionSpec())
        shapes = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), arguments
        )
        return function, shapes

    return build


def later_on_one_device(make: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]) -> Build:
    """The same for a function and arguments that take time to make."""

    def build(devices: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        function, arguments = make()
        return on_one_device(function, *arguments)(devices)

    return build


def transformer(platform: str, shape: Shape, mesh: tuple[int, ...] = (), topology: str = "") -> Any:
    """The reference step, on one device or sharded evenly over data × fsdp × tensor."""
    count = int(np.prod(mesh or (1,)))
    total = 3 * shape.forward + shape.rematerialized
    assert total % count == 0

    def build(devices: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        if not mesh:
            step, arguments = reference_step(shape)
            return on_one_device(step, *arguments)(devices)
        grid = np.array(devices[:count]).reshape(mesh)
        return reference_step(shape, Mesh(grid, ("data", "fsdp", "tensor")))

    return Program(
        platform=platform,
        topology=topology,
        build=build,
        flops=total // count,
        rematerialized=shape.rematerialized // count,
    )


PROGRAMS: dict[str, Program] = {}
PLATFORMS = ("cpu", "v5e", "v5p", "v6e", "tpu7x", "h100")
MESHES = ((8, 1, 1), (1, 8, 1), (1, 1, 4), (2, 2, 2))


def _fill() -> None:
    mixed = {"K": 2, "tied": True, "accumulation": 2, "dtype": "bfloat16"}
    for platform in PLATFORMS:
        for layers in ("scan", "unrolled"):
            for remat in ("none", "minimal", "full"):
                for label, more in {"": {}, "_mixed": mixed}.items():
                    shape = Shape(scan=layers == "scan", remat=remat, **more)
                    PROGRAMS[f"{platform}_{layers}_{remat}{label}"] = transformer(platform, shape)
        for key, value in mixed.items():
            shape = Shape(remat="full", **{key: value})
            PROGRAMS[f"{platform}_scan_full_{key}"] = transformer(platform, shape)
        for mesh in MESHES:
            shape = Shape(B=8, remat="full", dtype="bfloat16")
            name = f"{platform}_mesh_{'x'.join(map(str, mesh))}"
            PROGRAMS[name] = transformer(platform, shape, mesh)
        for name, (function, arguments, flops) in program_models.MODELS.items():
            if name == "resnet50" and platform not in ("cpu", "v5e", "h100"):
                continue  # takes a minute to compile
            PROGRAMS[f"{platform}_{name}"] = Program(
                platform=platform, build=on_one_device(function, *arguments), flops=flops
            )
        for name, (function, arguments, flops) in program_names.programs(platform).items():
            PROGRAMS[f"{platform}_{name}"] = Program(
                platform=platform, build=on_one_device(function, *arguments), flops=flops
            )
    PROGRAMS["v5e_image_sharded"] = Program(platform="v5e", build=program_names.sharded_image)
    PROGRAMS["v4_scan_full"] = transformer("v4", Shape(remat="full"))
    for mesh, topology in {(4, 4, 4): "v5p:4x4x4", (1, 512, 1): "v5p:8x8x8"}.items():
        shape = Shape(B=mesh[0] * mesh[1] * 2, D=512, remat="full", dtype="bfloat16")
        name = f"v5p_mesh_{'x'.join(map(str, mesh))}"
        PROGRAMS[name] = transformer("v5p", shape, mesh, topology)
    for platform, kernels in program_kernels.KERNELS.items():
        for name, (function, arguments, options) in kernels.items():
            PROGRAMS[f"{platform}_{name}"] = Program(
                platform=platform, build=on_one_device(function, *arguments), options=options
            )
    for topic, programs in (
        ("vectors", program_vectors),
        ("factorizations", program_factorizations),
        ("patterns", program_patterns),
        ("shared_calls", program_shared_calls),
    ):
        for platform in programs.PLATFORMS:
            for name, (function, arguments, flops) in programs.PROGRAMS.items():
                PROGRAMS[f"{platform}_{topic}_{name}"] = Program(
                    platform=platform, build=on_one_device(function, *arguments), flops=flops
                )
    for name, (function, arguments, options) in program_silicon.PROGRAMS.items():
        PROGRAMS[f"h100_silicon_{name}"] = Program(
            platform="h100", build=on_one_device(function, *arguments), options=options
        )
    for platform in program_devices.PLATFORMS:
        for name in program_devices.PROGRAMS:
            build = functools.partial(program_devices.build, name)
            PROGRAMS[f"{platform}_devices_{name}"] = Program(platform=platform, build=build)
    for platform in program_rings.PLATFORMS:
        for name in program_rings.RECORDED:
            build = functools.partial(program_rings.build, name)
            PROGRAMS[f"{platform}_rings_{name}"] = Program(platform=platform, build=build)
    PROGRAMS["v5e_splash_context"] = Program(
        platform="v5e", build=program_kernels.splash_in_context
    )
    for bodies in (program_kernel_bodies, program_tokamax):
        for platform, made in bodies.KERNELS.items():
            for name, (function, arguments) in made.items():
                build = on_one_device(function, *arguments)
                PROGRAMS[f"{platform}_{name}"] = Program(platform=platform, build=build)
    for platform in program_families.PLATFORMS:
        for name in program_families.MODELS:
            build = later_on_one_device(functools.partial(program_families.step_of, name, platform))
            PROGRAMS[f"{platform}_family_{name}"] = Program(platform=platform, build=build)
    # Attention kernels in a scanned, rematerialised step: masks are tables that loops carry.
    for platform, attention, mesh in (
        ("v5e", "splash", ()),
        ("v5e", "flash", (2, 2, 2)),
        ("h100", "cudnn", ()),
    ):
        shape = Shape(B=8, S=512, D=256, remat="full", dtype="bfloat16", attention=attention)
        PROGRAMS[f"{platform}_layers_{attention}"] = transformer(platform, shape, mesh)
    PROGRAMS["v5p_llama70b"] = Program(
        platform="v5p", topology="v5p:8x8x8", build=program_kernels.llama70b_step
    )


_fill()
