"""The programs of a trace: found in it or beside it, and counted instruction by instruction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mfu_jax.errors import UserError, first_line
from mfu_jax.flops.executed.instruction_costs import ProgramCosts, instruction_costs
from mfu_jax.flops.ledger import Ledger, compare_flops
from mfu_jax.profiling.timeline.devices import Program
from mfu_jax.profiling.trace.wire import fields
from mfu_jax.profiling.trace.xspace import Trace

_METADATA_PLANE = "/host:metadata"
_HLO_PROTO = ("Hlo Proto", "hlo_proto", "HLO Proto")
_OWN_CONVENTION = "the program's forward and backward matmuls"


@dataclass(frozen=True, kw_only=True)
class KnownProgram:
    """A program that ran, counted.

    Attributes:
        costs: by instruction.
        ledger: from its model FLOPs to its executed FLOPs.
        mesh: axis → size; empty if unknown.
        device_kind: as JAX calls the chip; empty if unknown.
        has_model: whether the model FLOPs are given, not read off the program.
    """

    costs: ProgramCosts
    ledger: Ledger
    mesh: Mapping[str, int]
    device_kind: str = ""
    has_model: bool = False


class ProgramLibrary:
    """Finds the programs of traces, and counts those asked for.

    Args:
        traces: whose metadata may hold programs.
        model_flops: of the main program on one device, if the user gave them.

    Attributes:
        notes: programs that cannot be read, and why.
    """

    def __init__(self, traces: Sequence[Trace], *, model_flops: int | None = None) -> None:
        self._model_flops = model_flops
        self._protos: dict[Program, bytes] = {}
        self._found: dict[Program, KnownProgram | None] = {}
        self.notes: list[str] = []
        for trace in traces:
            self._protos.update(_protos(trace))

    def find(self, program: Program) -> KnownProgram | None:
        """The program that a trace names, if it is known."""
        if program not in self._found:
            self._found[program] = self._read(program)
        return self._found[program]

    @property
    def read(self) -> list[KnownProgram]:
        """Those found so far."""
        return [program for program in self._found.values() if program is not None]

    def _read(self, program: Program) -> KnownProgram | None:
        proto = self._protos.get(program) or self._of_name(program.module)
        if proto is None:
            return None
        import jax.errors

        from mfu_jax.jax_internals import hlo_text_of_proto

        try:
            return _known(instruction_costs(hlo_text_of_proto(proto)), self._model_flops)
        except (UserError, jax.errors.JaxRuntimeError) as error:
            self.notes.append(f"the program {program.module} cannot be read: {first_line(error)}")
            return None

    def _of_name(self, module: str) -> bytes | None:
        """The only program of this name, where the trace numbers it otherwise."""
        found = [proto for known, proto in self._protos.items() if known.module == module]
        return found[0] if len(found) == 1 else None


def _protos(trace: Trace) -> dict[Program, bytes]:
    """The programs that a trace holds, as serialized ``HloModuleProto``."""
    protos: dict[Program, bytes] = {}
    for plane in trace.planes:
        if plane.name != _METADATA_PLANE:
            continue
        for number, metadata in plane.metadata.items():
            content = next((metadata.stats[k] for k in _HLO_PROTO if k in metadata.stats), None)
            if isinstance(content, bytes):
                program = Program(
                    metadata.name.partition("(")[0], metadata.stats.get("program_id", number)
                )
                protos[program] = _module(content)
    return protos


def _module(hlo_proto: bytes) -> bytes:
    """The ``hlo_module`` of an ``HloProto``."""
    for field in fields(hlo_proto, 0, len(hlo_proto)):
        if field.number == 1:
            return hlo_proto[field.start : field.end]
    return b""


def _known(costs: ProgramCosts, model_flops: int | None) -> KnownProgram:
    """Without model FLOPs, those of the program that no line of the ledger claims."""
    if model_flops is None:
        empty = compare_flops(model=0, executed=costs.executed)
        ledger = compare_flops(
            model=empty.residual, executed=costs.executed, convention=_OWN_CONVENTION
        )
    else:
        ledger = compare_flops(model=model_flops, executed=costs.executed, convention="as given")
    return KnownProgram(costs=costs, ledger=ledger, mesh={}, has_model=model_flops is not None)
