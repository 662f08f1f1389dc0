"""The programs of a trace: found beside it or in it, and counted instruction by instruction."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path

import jax.errors

from mfu_jax.dumps.files import load
from mfu_jax.dumps.program import ProgramDump
from mfu_jax.errors import UserError, first_line
from mfu_jax.flops.executed.instruction_costs import ProgramCosts, instruction_costs
from mfu_jax.flops.ledger import EVALUATION, Ledger, compare_flops
from mfu_jax.profiling.hlo_protos import protos_of, text_of
from mfu_jax.profiling.timeline.devices import OpName, Program
from mfu_jax.profiling.trace.xspace import Trace

OWN_CONVENTION = "the program's forward and backward matmuls"

_ENOUGH = 0.99  # of a program's ops must be in a dump of that name


@dataclass(frozen=True, kw_only=True)
class KnownProgram:
    """A program that ran, counted.

    Attributes:
        costs: by instruction.
        ledger: from its model FLOPs to its executed FLOPs.
        has_model: whether the model FLOPs are given, not read off the program.
        mesh: axis → size; empty if unknown.
        device_kind: as JAX calls the chip; empty if unknown.
        memory: bytes by field of ``compiled.memory_analysis()``; empty if unknown.
        memory_bytes: of one device; 0 if unknown.
    """

    costs: ProgramCosts
    ledger: Ledger
    has_model: bool = False
    mesh: Mapping[str, int] = field(default_factory=dict)
    device_kind: str = ""
    memory: Mapping[str, int] = field(default_factory=dict)
    memory_bytes: int = 0

    @property
    def model_phases(self) -> tuple[str, ...]:
        """The phases whose matmuls are the model's; not an evaluation that the ledger has apart."""
        is_apart = any(line.label == EVALUATION for line in self.ledger.lines)
        return ("forward", "backward") if is_apart else ("forward", "evaluation", "backward")

    def with_model(self, model_flops: int) -> KnownProgram:
        """The same program with the user's model FLOPs of one run on one device."""
        executed = self.costs.executed
        ledger = compare_flops(model=model_flops, executed=executed, convention="as given")
        return replace(self, ledger=ledger, has_model=True)


class ProgramLibrary:
    """Finds the programs of traces, and counts those asked for.

    Args:
        traces: whose metadata may hold programs.
        dumps: files of dumps, the preferred ones first.
        ops: that ran.

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
        self._loaded: list[ProgramDump] | None = None
        self.notes: list[str] = []
        for op in ops:
            if not op.is_kernel:
                self._ops.setdefault(op.program, set()).add(op.name)
        for trace in traces:
            self._protos.update(protos_of(trace))

    def find(self, program: Program) -> KnownProgram | None:
        """The program that a trace names, if it is known."""
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
        """The program of which there is a copy, if it is the only one by its name."""
        names = {dump.name for dump in self._dumped()} | {known.module for known in self._protos}
        return Program(names.pop()) if len(names) == 1 else None

    def has_dump(self, program: Program) -> bool:
        """Whether there is a dump of its name."""
        return any(dump.name == program.module for dump in self._dumped())

    @property
    def read(self) -> list[KnownProgram]:
        """Those found so far."""
        return [program for program in self._found.values() if program is not None]

    def _of_dump(self, program: Program) -> KnownProgram | None:
        """From the first dump of this name that has the program's ops."""
        for dump in self._dumped():
            if dump.name == program.module:
                costs = instruction_costs(
                    dump,
                    kernel_flops=dump.kernel_flops or None,
                    trip_counts=dump.trip_counts,
                    lengths=dump.lengths,
                )
                if _fits(costs, self._ops.get(program, set())):
                    return self._known(costs, dump)
        return None

    def _dumped(self) -> list[ProgramDump]:
        if self._loaded is None:
            self._loaded = []
            for file in self._dumps:
                try:
                    self._loaded.append(load(file))
                except UserError as error:
                    self.notes.append(first_line(error))
        return self._loaded

    def _of_proto(self, program: Program) -> KnownProgram | None:
        """From the trace itself, which has no model FLOPs and no mesh."""
        proto = self._protos.get(program) or self._of_name(program.module)
        if not proto:
            return None
        return self._known(instruction_costs(text_of(proto)), None)

    def _of_name(self, module: str) -> bytes | None:
        """The only program of this name, where the trace numbers it otherwise."""
        found = [proto for known, proto in self._protos.items() if known.module == module]
        return found[0] if len(found) == 1 else None

    def _known(self, costs: ProgramCosts, dump: ProgramDump | None) -> KnownProgram:
        ledger = self._ledger(costs, dump)
        return KnownProgram(
            costs=costs,
            ledger=ledger,
            has_model=ledger.convention != OWN_CONVENTION,
            mesh=dump.topology.mesh if dump else {},
            device_kind=dump.topology.device_kind if dump else "",
            memory=(dump.memory if dump else None) or {},
            memory_bytes=dump.topology.memory_bytes if dump else 0,
        )

    def _ledger(self, costs: ProgramCosts, dump: ProgramDump | None) -> Ledger:
        executed = costs.executed
        if dump and (model := dump.model):
            return compare_flops(
                model=model.per_device,
                executed=executed,
                convention=model.convention,
                dense=model.dense,
                attention=model.attention,
                is_whole=model.is_whole,
                operations=model.operations,
                overheads=model.overheads,
            )
        rest = compare_flops(model=0, executed=executed).residual  # what no line claims
        return compare_flops(model=rest, executed=executed, convention=OWN_CONVENTION)


def _fits(costs: ProgramCosts, ops: Set[str]) -> bool:
    """Whether a program has the ops that ran; one of the same name may be another version."""
    return sum(name in costs.records for name in ops) >= _ENOUGH * len(ops)
