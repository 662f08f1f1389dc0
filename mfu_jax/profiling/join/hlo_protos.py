"""The programs stored in a trace itself, as serialized protos."""

from __future__ import annotations

from mfu_jax.profiling.timeline.devices import Program
from mfu_jax.profiling.trace.wire import WireError, fields
from mfu_jax.profiling.trace.xspace import Trace
from mfu_jax.util.jax_internals import hlo_text_of_proto

_PLANE = "/host:metadata"
_STATS = ("Hlo Proto", "hlo_proto")
_MODULE = 1  # of HloProto
_DEVICES = 15  # of HloModuleProto: device_assignment, whose fields 1 and 2 are these
_COUNTS = {1: "replica_count", 2: "num_partitions"}


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
                protos[program] = _part(content, _MODULE)
    return protos


def text_of(module: bytes) -> str:
    """A module's HLO text, with the number of devices, which the proto stores elsewhere.

    Raises:
        jax.errors.JaxRuntimeError: the bytes are not a module.
    """
    text = hlo_text_of_proto(module)
    header, newline, rest = text.partition("\n")
    assigned = _part(module, _DEVICES)
    for field in fields(assigned, 0, len(assigned)):
        if field.number in _COUNTS and f"{_COUNTS[field.number]}=" not in header:
            header += f", {_COUNTS[field.number]}={field.value}"
    return header + newline + rest


def _part(message: bytes, number: int) -> bytes:
    """The bytes of a message's field; empty if it has none."""
    try:
        for field in fields(message, 0, len(message)):
            if field.number == number:
                return message[field.start : field.end]
    except WireError:
        pass
    return b""
