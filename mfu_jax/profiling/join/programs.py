"""The programs of a trace: found beside it or in it, and counted instruction by instruction."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import jax.errors

from mfu_jax.dumps.files import load
from mfu_jax.dumps.program import ProgramDump
from mfu_jax.errors import UserError, first_line
from mfu_jax.flops.executed.counting import counter_of
from mfu_jax.flops.executed.instruction_costs import costs_of
from mfu_jax.flops.executed.records import InstructionRecord, ProgramCosts
from mfu_jax.flops.ledger import Ledger, compare_flops
from mfu_jax.flops.names import EVALUATION
from mfu_jax.names import AS_GIVEN
from mfu_jax.profiling.join.ops import kernel_name
from mfu_jax.profiling.timeline.devices import DeviceTimeline, OpName, Program
from mfu_jax.profiling.timeline.host import HostThreads
from mfu_jax.profiling.timeline.platforms import read_devices
from mfu_jax.profiling.trace.xspace import Trace
from mfu_jax.storage.trace_folders import dump_files
from mfu_jax.util.jax_internals import hlo_text_of_proto
from mfu_jax.util.protobuf import fields, part

OWN_CONVENTION = "the program's forward and backward matmuls"

_PLANE = "/host:metadata"
_STATS = ("Hlo Proto", "hlo_proto")
_MODULE = 1  # of HloProto
_DEVICES = 15  # of HloModuleProto: device_assignment, whose fields 1 and 2 are these
_COUNTS = {1: "replica_count", 2: "num_partitions"}
_ENOUGH = 0.99  # share of a program's ops that must be in the dump of its name


def open_traces(
    files: Sequence[Path],
) -> tuple[list[tuple[DeviceTimeline, HostThreads]], ProgramLibrary]:
    """The devices of a job's traces, as `read_devices` returns them, and their programs.

    Raises:
        UserError: no device ran anything, or a file is damaged.
    """
    traces = [Trace(file) for file in files]
    devices = read_devices(traces)
    ops = [name for timeline, _ in devices for name in timeline.names]
    return devices, ProgramLibrary(traces, dump_files(files[0]), ops)


@dataclass(frozen=True, kw_only=True)
class KnownProgram:
    """A program that ran, with its counts.

    Attributes:
        costs: costs by instruction.
        ledger: from its model FLOPs to its executed FLOPs.
        dump: its dump; of a program that only the trace has, with its text alone.
    """

    costs: ProgramCosts
    ledger: Ledger
    dump: ProgramDump = field(default_factory=lambda: ProgramDump(text=""))

    @property
    def has_model(self) -> bool:
        """Whether the model FLOPs were given, not derived from the program."""
        return self.ledger.convention != OWN_CONVENTION

    @property
    def mesh(self) -> Mapping[str, int]:
        """Axis → size; empty if unknown."""
        return self.dump.topology.mesh

    @property
    def device_kind(self) -> str:
        """JAX's name of the chip; empty if unknown."""
        return self.dump.topology.device_kind

    @cached_property
    def by_kernel(self) -> Mapping[str, InstructionRecord]:
        """Instructions by the name of their kernel on GPUs."""
        return {kernel_name(name): record for name, record in self.costs.records.items()}

    @cached_property
    def computations(self) -> Mapping[str, list[InstructionRecord]]:
        """Instructions by computation, in scheduled order."""
        found: dict[str, list[InstructionRecord]] = defaultdict(list)
        for record in self.costs.records.values():
            found[record.computation].append(record)
        return found

    @property
    def model_phases(self) -> tuple[str, ...]:
        """The phases whose matmuls are the model's, without evaluation if the ledger lists it."""
        is_apart = any(line.label == EVALUATION for line in self.ledger.lines)
        return ("forward", "backward") if is_apart else ("forward", "evaluation", "backward")

    def with_model(self, model_flops: int) -> KnownProgram:
        """Returns the program with the user's model FLOPs per run on one device."""
        executed = self.costs.executed
        ledger = compare_flops(model=model_flops, executed=executed, convention=AS_GIVEN)
        return replace(self, ledger=ledger)


class ProgramLibrary:
    """Finds the programs of traces, and counts those asked for.

    Args:
        traces: traces, whose metadata may contain programs.
        dumps: dump files, preferred ones first.
        ops: the ops that ran.

    Attributes:
        notes: programs that cannot be read, and why.
    """

    def __init__(
        self,
        traces: Sequence[Trace],
        dumps: Sequence[Path],
        ops: Iterable[OpName],
    ) -> None:
        self._dumps = dumps
        self._protos: dict[Program, bytes] = {}
        self._found: dict[Program, KnownProgram | None] = {}
        self._ops: dict[Program, set[str]] = {}
        self.notes: list[str] = []
        for op in ops:
            if not op.is_kernel:
                self._ops.setdefault(op.program, set()).add(op.name)
        for trace in traces:
            self._protos.update(protos_of(trace))

    def find(self, program: Program) -> KnownProgram | None:
        """The program that a trace names; None if not known."""
        if program not in self._found:
            try:
                self._found[program] = self._of_dump(program) or self._of_proto(program)
            except (UserError, jax.errors.JaxRuntimeError) as error:
                self._found[program] = None
                self.notes.append(
                    f"the program {program.module} cannot be read: {first_line(error)}"
                )
        return self._found[program]

    @property
    def only(self) -> Program | None:
        """The program in the dumps and traces if all copies have the same name, else None."""
        names = {dump.name for dump in self._dumped} | {known.module for known in self._protos}
        return Program(names.pop()) if len(names) == 1 else None

    def has_dump(self, program: Program) -> bool:
        """Whether there is a dump with the program's name."""
        return any(dump.name == program.module for dump in self._dumped)

    @property
    def read(self) -> list[KnownProgram]:
        """The programs found so far."""
        return [program for program in self._found.values() if program is not None]

    def _of_dump(self, program: Program) -> KnownProgram | None:
        """The program from the first dump of its name that has its ops; None if there is none."""
        for dump in self._dumped:
            if dump.name == program.module:
                known = _known(dump)
                if _fits(known.costs, self._ops.get(program, set())):
                    return known
        return None

    @cached_property
    def _dumped(self) -> list[ProgramDump]:
        loaded = []
        for file in self._dumps:
            try:
                loaded.append(load(file))
            except UserError as error:
                self.notes.append(first_line(error))
        return loaded

    def _of_proto(self, program: Program) -> KnownProgram | None:
        """The program from the trace itself, without model FLOPs and mesh; None if absent."""
        proto = self._protos.get(program) or self._of_name(program.module)
        if not proto:
            return None
        return _known(ProgramDump(text=text_of(proto)))

    def _of_name(self, module: str) -> bytes | None:
        """The only program of this name, for traces that number it differently."""
        found = [proto for known, proto in self._protos.items() if known.module == module]
        return found[0] if len(found) == 1 else None


def _known(dump: ProgramDump) -> KnownProgram:
    costs = costs_of(counter_of(dump, **dump.counting))
    executed = costs.executed
    if model := dump.model:
        ledger = compare_flops(**model.ledger_arguments, executed=executed)
    else:
        rest = compare_flops(model=0, executed=executed).residual  # claimed by no line
        ledger = compare_flops(model=rest, executed=executed, convention=OWN_CONVENTION)
    return KnownProgram(costs=costs, ledger=ledger, dump=dump)


def _fits(costs: ProgramCosts, ops: Set[str]) -> bool:
    """Whether a program has the ops that ran; a program of its name may be another version.

    On GPUs, an asynchronous fusion runs under a name that only XLA knows.
    """
    missing = [name for name in ops if name not in costs.records]
    hidden = sum(record.opcode == "fusion-start" for record in costs.records.values())
    unknown = len(missing) - min(hidden, sum("fusion" in name for name in missing))
    return unknown <= (1 - _ENOUGH) * len(ops)


def protos_of(trace: Trace) -> dict[Program, bytes]:
    """Each program's ``HloModuleProto``."""
    protos: dict[Program, bytes] = {}
    for plane in trace.planes:
        if plane.name != _PLANE:
            continue
        for number, metadata in plane.metadata.items():
            content = next((metadata.stats[k] for k in _STATS if k in metadata.stats), None)
            if isinstance(content, bytes):
                name = metadata.name.partition("(")[0]
                program = Program(name, metadata.stats.get("program_id", number))
                protos[program] = part(content, _MODULE)
    return protos


def text_of(module: bytes) -> str:
    """A module's HLO text, with the number of devices, which the proto stores elsewhere.

    Raises:
        jax.errors.JaxRuntimeError: the bytes are not a module.
    """
    text = hlo_text_of_proto(module)
    header, newline, rest = text.partition("\n")
    assigned = part(module, _DEVICES)
    for count in fields(assigned, 0, len(assigned)):
        if count.number in _COUNTS and f"{_COUNTS[count.number]}=" not in header:
            header += f", {_COUNTS[count.number]}={count.value}"
    return header + newline + rest
