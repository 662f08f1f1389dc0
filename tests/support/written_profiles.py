"""Profiles of an H100 that are written by hand: a program, how long each op takes, and the host."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from mfu_jax.dumps import ModelFlops, ProgramDump, Topology, load, write
from mfu_jax.flops.executed.instruction_costs import instruction_costs
from mfu_jax.flops.executed.records import InstructionRecord
from mfu_jax.profiling.join.ops import kernel_name
from mfu_jax.profiling.profile import Profile, read_profile
from tests.support.accelerator_traces import write_trace
from tests.support.xspace import Plane

KIND = "NVIDIA H100 80GB HBM3"
BF16, TF32, BANDWIDTH = 989.4e12, 494.7e12, 3.35e12  # its maker's data sheet
STEPS = 3
PS = 10**12

HostEvent = tuple[str, float, float]
"""Name, start and length in seconds from the begin of a step."""


def dot(name: str, m: int, k: int, n: int, *, dtype: str = "bf16", scope: str = "mlp") -> str:
    """A forward matmul of two constants, which nothing launches."""
    return (
        f"  %{name}.a = {dtype}[{m},{k}] constant({{...}})\n"
        f"  %{name}.b = {dtype}[{k},{n}] constant({{...}})\n"
        f"  %{name} = {dtype}[{m},{n}] dot(%{name}.a, %{name}.b), lhs_contracting_dims={{1}}, "
        f'rhs_contracting_dims={{0}}, metadata={{op_name="jit(step)/jvp({scope})/dot_general"}}'
    )


def dot_seconds(m: int, k: int, n: int, share: float, peak: float = BF16) -> float:
    return 2 * m * k * n / (share * peak)


def program(lines: Iterable[str], computations: str = "") -> str:
    """A module of these instructions, and of the computations that they call."""
    body = "\n".join(lines)
    return (
        f"HloModule jit_step\n\n{computations}\n"
        "ENTRY %main (p: bf16[8]) -> bf16[8] {\n"
        f"  %p = bf16[8] parameter(0)\n{body}\n  ROOT %end = bf16[8] bitcast(%p)\n}}\n"
    )


def write_program(
    folder: Path,
    lines: Iterable[str],
    computations: str = "",
    *,
    devices: int = 1,
    memory: Mapping[str, int] | None = None,
    model: ModelFlops | None = None,
) -> None:
    """Writes the dump of a program for H100s beside a trace."""
    dump = ProgramDump(
        text=program(lines, computations),
        topology=Topology(device_kind=KIND, devices=devices, memory_bytes=80 * 10**9),
        memory=memory,
        model=model,
    )
    write(dump, folder / "programs" / "step.mfu")


def written_profile(
    folder: Path,
    lines: Iterable[str],
    seconds: Mapping[str, float],
    *,
    idle: float = 0.0,
    host: Sequence[HostEvent] = (),
    call: float = -1e-6,
    slower: Sequence[Mapping[str, float | Sequence[float]]] = (),
    memory: Mapping[str, int] | None = None,
    model: ModelFlops | None = None,
    computations: str = "",
) -> Profile:
    """Three steps, in which the ops run one after the other.

    Args:
        folder: an empty one.
        lines: of the program.
        seconds: of each op, in the order in which they run.
        idle: seconds after them.
        host: what its thread does in each step.
        call: when the step is called, from the begin of the step on the device.
        slower: other devices, each with its own seconds of some ops, or of each of their runs.
        memory: as a dump has it.
        model: model FLOPs.
        computations: that the lines call.
    """
    write_program(folder, lines, computations, devices=1 + len(slower), memory=memory, model=model)
    step = sum(seconds.values()) + idle
    planes = [_device(i, {**seconds, **own}, step) for i, own in enumerate(({}, *slower))]
    write_trace(folder, _host(host, step, call), *planes)
    return read_profile(folder)


def scheduled_profile(file: Path, folder: Path) -> Profile:
    """Four steps of a dumped program: each op takes as long as its roof and the launch.

    Args:
        file: the dump.
        folder: an empty one.
    """
    dump = load(file)
    write(dump, folder / "programs" / "step.mfu")
    computations: dict[str, list[InstructionRecord]] = {}
    for record in instruction_costs(dump).records.values():
        if record.runs and not record.is_control and record.hbm_bytes:
            computations.setdefault(record.computation, []).append(record)
    plane, events, at = Plane("/device:GPU:0", gpu_device_name=KIND), [], 0
    once = [
        record
        for records in computations.values()
        for turn in range(max(record.runs for record in records))
        for record in records
        if turn < record.runs
    ]
    for record in (STEPS + 1) * once:
        flops = sum(record.flops_by_dtype.values())
        moving, least = record.hbm_bytes / (0.87 * BANDWIDTH), flops / (0.7 * BF16)
        length = round(max(moving, least, 1.5e-6) * PS)
        of = {"hlo_module": dump.name, "program_id": 7, "hlo_op": record.name}
        events.append((kernel_name(record.name), at, length, of))
        at += length
    plane.line("Stream #7(Compute)", events)
    write_trace(folder, plane)
    return read_profile(folder)


def _device(number: int, seconds: Mapping[str, float | Sequence[float]], step: float) -> Plane:
    plane = Plane(f"/device:GPU:{number}", gpu_device_name=KIND)
    events = []
    for start in range(STEPS):
        at = (1 + start) * step
        for name, lengths in seconds.items():
            length = lengths if isinstance(lengths, float) else lengths[start]
            of = {"hlo_module": "jit_step", "program_id": 7, "hlo_op": name}
            events.append((name, round(at * PS), round(length * PS), of))
            at += length
    plane.line("Stream #7(Compute)", events)
    return plane


def _host(host: Sequence[HostEvent], step: float, call: float) -> Plane:
    plane = Plane("/host:CPU")
    events = []
    for number in range(STEPS):
        begin = (1 + number) * step
        events.append(("train", round((begin + call) * PS), 10**5, {"step_num": number}))
        events += [(name, round((begin + a) * PS), round(b * PS), {}) for name, a, b in host]
    plane.line("python", events)
    return plane
