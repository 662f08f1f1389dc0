"""What to plan for: a number of chips, how they are connected, and how JAX names them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from mfu_jax.dumps.program import ProgramDump
from mfu_jax.errors import UserError, nearest
from mfu_jax.hardware.chips import Chip, find, named, table
from mfu_jax.util.formatting import counted
from mfu_jax.util.values import number_of
from mfu_jax.util.yaml_files import read_mapping

CHIPS = ("topology", "hardware", "devices", "slices", "memory_fraction", "network_gbits")
MEMORY_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
# libtpu's names of generations, and whether a slice's name (v5p-128) counts TensorCores.
_GENERATIONS = {
    "v4": ("TPU v4", 2),
    "v5e": ("TPU v5e", 1),
    "v5litepod": ("TPU v5e", 1),
    "v5p": ("TPU v5p", 2),
    "v6e": ("TPU v6e (Trillium)", 1),
    "tpu7x": ("TPU7x (Ironwood)", 2),
}
_LIBTPU_NAMES = {"v5litepod": "v5e"}
_MOST_CHIPS = 2**16
_GPU_TARGETS = Path(__file__).with_name("gpu_targets.yml")
_DEVICES = re.compile(r"\b(?:num_partitions|replica_count)=(\d+)")  # in the first line of HLO text
_OWN_NAMES = {"gpu": "cuda"}  # a platform's name in dumps → its compiler's name
_SCHEDULERS_SHARE = 0.8  # of the memory of a GPU that is not attached
JAXS_SHARE = 0.75  # of a GPU's memory, by default (JAX's docs, "GPU memory allocation")
_CUBE = 64  # chips that are wired together; larger slices connect such cubes
_PODS_AXES = 2  # of generations that are not built from cubes


@dataclass(frozen=True, kw_only=True)
class Target:
    """Chips to plan for.

    Attributes:
        chip: the kind of chip.
        platform: JAX's name of the compiler.
        topology: as ``jax.experimental.topologies`` takes it: ``v6e:2x4``; for GPUs
            ``slices × hosts × devices per host``.
        shape: chips along each axis of a slice's torus; GPUs: hosts, devices per host.
        devices: JAX devices in all slices.
        slices: parts of the job connected only by the data-center network.
        memory_fraction: of a GPU's memory, what JAX takes; None: not known.
        network_gbits: 10⁹ bits/s of one device to other hosts or slices; None: as hardware.yml has
            it.
    """

    chip: Chip
    platform: Literal["tpu", "cuda"]
    topology: str
    shape: tuple[int, ...]
    devices: int
    slices: int = 1
    memory_fraction: float | None = None
    network_gbits: float | None = None

    @property
    def chips(self) -> int:
        """Chips in all slices."""
        return self.devices // self.chip.devices_per_chip

    @property
    def rings(self) -> tuple[bool, ...]:
        """Which axes of a slice wrap around: those as long as a pod's, or all of whole cubes.

        With three axes, slices from 4 x 4 x 4 chips on have a full torus (Cloud TPU's page of the
        v5p); a part of such a cube is a mesh.
        """
        if self.platform != "tpu":
            return ()
        wraps = tuple(n % int(self.chip.interconnect["wraps_at"]) == 0 for n in self.shape)
        by_cubes = len(self.shape) > _PODS_AXES
        return (all(wraps),) * len(wraps) if by_cubes else wraps

    @property
    def usable_memory_bytes(self) -> int:
        """What a program may use of a device's memory: of a GPU's, what JAX takes, if known.

        JAX gives its allocator this share of all that CUDA reports (openxla/xla,
        pjrt/gpu/gpu_helpers.cc, `CreateBFCAllocator`), and NCCL's buffers stay outside.
        """
        return int(self.chip.usable_memory_bytes * (self.memory_fraction or 1.0))

    @property
    def network_bytes_per_sec(self) -> float:
        """Into one device from other hosts or slices.

        Raises:
            UserError: neither the user nor the table says it.
        """
        gbits = self.network_gbits or 8 * self.chip.interconnect.get("dcn_gbps_per_device", 0)
        if not gbits:
            raise UserError(
                f"{self}: the table has no network for it; expected network_gbits=, of one device"
            )
        return gbits / 8 * 1e9

    def __str__(self) -> str:
        network = f", {self.network_gbits:g} Gb/s each" if self.network_gbits else ""
        if self.platform == "cuda":
            hosts = f" on {self.shape[0]} hosts" if self.shape[0] > 1 else ""
            return f"{self.devices} × {self.chip.name}{hosts}{network}"
        many = f"{self.slices} × " if self.slices > 1 else ""
        return f"{many}{self.topology} ({counted(self.chips, 'chip')}){network}"


def parse_target(
    *, topology: str = "", hardware: str = "", devices: int | None = None, slices: int | None = None
) -> Target:
    """Parses the user's description of the chips.

    Args:
        topology: ``v5p:8x8x8``, or the cloud's name of a slice: ``v5p-128``, ``v6e-8``.
        hardware: GPU name, with `devices`.
        devices: number of GPUs.
        slices: TPU slices of the job; None: as in `topology`, or one.

    Raises:
        UserError: the chips or the shape are not known; the message lists what is.
    """
    if slices is not None and slices < 1:
        raise UserError(f"slices={slices}; expected 1 or more", hint="leave it out for one slice")
    if topology and hardware:
        raise UserError(
            f"topology={topology!r} and hardware={hardware!r}; expected one: TPUs have a topology"
        )
    if topology:
        return _tpus(topology, slices)
    if generation := generation_of(hardware) or generation_of(hardware.rpartition("-")[0]):
        raise UserError(
            f"hardware={hardware!r} is a TPU",
            hint=f"pass topology={generation}:SHAPE, or the name of a slice, such as v6e-8",
        )
    if not hardware:
        raise UserError(
            "no chips to plan for",
            hint="pass topology=v5p:8x8x8, or hardware=h100 devices=8",
        )
    chip = named(hardware, instead=f"pass one of {_plannable_gpus()}")
    if slices is not None:
        raise UserError(
            f"slices={slices} with hardware={hardware!r}: only TPUs have slices",
            hint="pass devices=N, of all hosts",
        )
    return _gpus(chip, 8 if devices is None else devices)


def target_of(values: Mapping[str, str]) -> Target:
    """The same from the keys of a command, `CHIPS`."""
    target = parse_target(
        topology=values.get("topology", ""),
        hardware=values.get("hardware", ""),
        devices=number_of(values, "devices", int),
        slices=number_of(values, "slices", int),
    )
    target = with_network(target, number_of(values, "network_gbits", float))
    return with_memory_fraction(target, number_of(values, "memory_fraction", float))


def with_network(target: Target, gbits: float | None) -> Target:
    """The same chips with this network; None: as hardware.yml has it.

    Raises:
        UserError: it is no bandwidth.
    """
    if gbits is not None and not 0 < gbits < math.inf:
        raise UserError(f"network_gbits={gbits:g}; expected Gb/s of one device, such as 200")
    return replace(target, network_gbits=gbits)


def with_memory_fraction(target: Target, fraction: float | None) -> Target:
    """The same GPUs with JAX taking this share of their memory; None: not known.

    Raises:
        UserError: it is no share, or the chips are no GPUs.
    """
    if fraction is None:
        return target
    if target.platform != "cuda":
        raise UserError(
            f"memory_fraction={fraction:g} with {target}: JAX takes a share of a GPU's memory only",
            hint="leave it out for TPUs",
        )
    if not 0 < fraction <= 1:
        raise UserError(f"memory_fraction={fraction:g}; expected a share, such as 0.9")
    return replace(target, memory_fraction=fraction)


def generation_of(name: str) -> str:
    """libtpu's name of a TPU generation (v6e, trillium, TPU v6e); empty if not known."""
    words = re.findall(r"[a-z0-9]+", name.lower().removeprefix("tpu "))
    word = "".join(words)
    if word in _GENERATIONS:
        return word
    by_alias = {alias: chip.name for chip in table() for alias in chip.aliases}
    names = {chip_name: own for own, (chip_name, _) in reversed(_GENERATIONS.items())}
    kinds = [chip.name for chip in find(name)]  # as JAX prints it: TPU v5 lite
    return names.get(by_alias.get(word, kinds[0] if kinds else name), "")


def slice_name(generation: str, chips: int) -> str:
    """The cloud's name of a slice: v5p-8 has 4 chips."""
    return f"{generation}-{chips * _GENERATIONS[generation][1]}"


def _tpus(topology: str, slices: int | None) -> Target:
    text = topology.strip().lower()
    if many := re.match(r"(\d+) ?x ?(?=[a-z])", text):  # 2xv6e-256
        if slices not in (None, int(many[1])) or not int(many[1]):
            raise UserError(f"topology={topology!r} with slices={slices}; expected the same number")
        slices, text = int(many[1]), text[many.end() :]
    slices = slices or 1
    name, separator, size = text.partition(":")
    counts_chips = False
    if not separator:
        name, separator, size = text.partition("-")
        counts_chips = not re.match(r"\d+x", size)  # v6e-8; tpu7x-4x4x8 is a shape
    name = generation_of(name) or name
    if name not in _GENERATIONS or not separator:
        close = "" if name in _GENERATIONS else nearest(name, _GENERATIONS)
        raise UserError(
            f"topology={topology!r}; expected a TPU generation "
            f"({', '.join(_GENERATIONS)}) and its shape, such as v5p:8x8x8, or a slice's name, "
            "such as v6e-8",
            hint=f"{close}for GPUs pass hardware=h100 devices=8",
        )
    chip_name, cores = _GENERATIONS[name]
    chip = next(chip for chip in table() if chip.name == chip_name)
    axes = int(chip.interconnect["ici_axes"])
    shape = _shape_of(topology, size, cores, axes) if counts_chips else _shape(topology, size, axes)
    chips = math.prod(shape)
    return Target(
        chip=chip,
        platform="tpu",
        topology=f"{_LIBTPU_NAMES.get(name, name)}:{'x'.join(map(str, shape))}",
        shape=shape,
        devices=chips * chip.devices_per_chip * slices,
        slices=slices,
    )


def _shape(topology: str, size: str, axes: int) -> tuple[int, ...]:
    parts = size.split("x")
    if len(parts) != axes or not all(re.fullmatch(r"[1-9]\d{0,4}", part) for part in parts):
        raise UserError(
            f"topology={topology!r}: expected {axes} axes of chips, such as "
            f"{topology.partition(':')[0]}:{'x'.join(['4'] * axes)}"
        )
    shape = tuple(map(int, parts))
    if math.prod(shape) > _MOST_CHIPS:
        raise UserError(f"topology={topology!r} has over {_MOST_CHIPS:,} chips")
    return shape


def _shape_of(topology: str, number: str, cores: int, axes: int) -> tuple[int, ...]:
    """The cloud's usual shape of this many chips, as MaxText's accelerator_to_spec_map.py has it.

    A torus is as cubic as cubes of 4x4x4 chips allow. Smaller slices and meshes are powers of 2:
    axes doubled in turn, last one first.
    """
    count = int(number) if re.fullmatch(r"[1-9]\d{0,5}", number) else 0
    chips, rest = divmod(count, cores)
    is_power = chips and not chips & (chips - 1)
    cubes = 0 if chips % _CUBE or axes == _PODS_AXES else chips // _CUBE
    if rest or not (is_power or cubes) or chips > _MOST_CHIPS:
        torus = f", or a multiple of {_CUBE * cores}," if axes > _PODS_AXES else ""
        raise UserError(
            f"topology={topology!r}: expected a power of 2{torus} of "
            f"{'TensorCores' if cores > 1 else 'chips'} after the hyphen",
            hint=f"for another shape, pass {topology.partition('-')[0]}:{'x'.join('4' * axes)}",
        )
    if cubes:
        first, second, third = _most_cubic(cubes)
        return 4 * first, 4 * second, 4 * third
    doublings = chips.bit_length() - 1
    lesser, greater = 2 ** (doublings // 2), 2 ** (doublings - doublings // 2)
    if axes == 2:
        return lesser, greater
    if doublings < 3:  # fill a host's 2x2x1 before the third axis
        return lesser, greater, 1
    third, more = divmod(doublings, 3)
    return tuple(sorted(2 ** (third + (axis < more)) for axis in range(3)))


def _most_cubic(volume: int) -> tuple[int, int, int]:
    """The three factors with the smallest sum, in ascending order.

    >>> _most_cubic(3), _most_cubic(72)
    ((1, 1, 3), (3, 4, 6))
    """
    return min(
        (
            (first, second, volume // (first * second))
            for first in range(1, math.isqrt(volume) + 1)
            if volume % first == 0
            for second in range(first, math.isqrt(volume // first) + 1)
            if volume // first % second == 0
        ),
        key=sum,
    )


def _plannable_gpus() -> str:
    return ", ".join(chip.name for chip in table() if "nvlink_gbps" in chip.interconnect)


def _gpus(chip: Chip, devices: int) -> Target:
    per_host = int(chip.interconnect.get("devices_per_host", 0))
    if not per_host:
        raise UserError(
            f"hardware={chip.name!r}: the table has no interconnect for it; expected one of "
            f"{_plannable_gpus()}, or a TPU: {', '.join(_GENERATIONS)}"
        )
    if not 1 <= devices <= _MOST_CHIPS:
        raise UserError(f"devices={devices}; expected 1 to {_MOST_CHIPS}")
    hosts, rest = divmod(devices, per_host)
    if hosts and rest:
        raise UserError(f"devices={devices}; expected up to {per_host}, or a multiple of it")
    shape = (hosts, per_host) if hosts else (1, devices)
    return Target(
        chip=chip,
        platform="cuda",
        topology=f"1x{shape[0]}x{shape[1]}",
        shape=shape,
        devices=devices,
    )


def target_config(chip: Chip, memory_fraction: float | None = None) -> str:
    """XLA's description of a GPU that is not attached: GpuTargetConfigProto, as text.

    XLA hides transfers within the memory that JAX takes (jaxlib/py_client.cc,
    `CompileAndLoadIfrtProgram`), and within 80% of a GPU that is not attached
    (gpu_hlo_schedule.cc, `GetSchedulerMemoryLimit`), so a fraction scales the memory described.

    Args:
        chip: the GPU.
        memory_fraction: of its memory, what JAX takes; None: `JAXS_SHARE`.

    Raises:
        UserError: the table does not have the chip.
    """
    known = read_mapping(_GPU_TARGETS)
    if chip.name not in known["gpus"]:
        raise UserError(
            f"XLA's description of {chip.name} is not known",
            hint=f"pass one of {', '.join(known['gpus'])}",
        )
    row = {**known["common"], **known["gpus"][chip.name]}
    scaled = row["device_memory_size"] * (memory_fraction or JAXS_SHARE) / _SCHEDULERS_SHARE
    row["device_memory_size"] = round(scaled)
    description = row.pop("description")
    major, minor = row.pop("compute_capability").rstrip("a").split(".")
    fields = [f"  {key}: {value}" for key, value in row.items()]
    return "\n".join(
        [
            "gpu_device_info {",
            *fields,
            f"  cuda_compute_capability {{ major: {major} minor: {minor} }}",
            "}",
            'platform_name: "CUDA"',
            "dnn_version_info { major: 9 minor: 1 }",
            f'device_description_str: "{description}"',
        ]
    )


def check_dump(name: str, program: ProgramDump, target: Target) -> tuple[str, ...]:
    """A note if the program is for another chip, as far as the dump says.

    Args:
        name: the file's name, for messages.
        program: the dump.
        target: the chips.

    Raises:
        UserError: the program is for another platform, or for another number of devices.
    """
    topology = program.topology
    if _OWN_NAMES.get(topology.platform, topology.platform) not in ("", target.platform):
        raise UserError(
            f"{name} is a program for {topology.platform}; expected one for {target.platform}",
            hint="plan the step itself, or pass the chips of the dump",
        )
    head = program.text.partition("\n")[0]
    devices = math.prod(int(count) for count in _DEVICES.findall(head))
    if devices != target.devices:
        raise UserError(
            f"{name} is a program of {counted(devices, 'device')}; expected "
            f"{target.devices}, those of {target}",
            hint="pass the chips that it was compiled for",
        )
    if not topology.device_kind or target.chip in find(topology.device_kind):
        return ()
    return (
        f"the program was compiled for {topology.device_kind}: one for {target.chip.name} has "
        "another schedule, and may need another amount of memory",
    )
