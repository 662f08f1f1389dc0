"""Copies MLIR into plain Python objects. Each dialect adds its matmuls and its grid."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from mfu_jax.flops.executed.kernels.bodies.attributes import unescaped
from mfu_jax.flops.executed.kernels.bodies.body import (
    CLUSTER,
    EXTENT,
    IN_CLUSTER,
    LOOPS,
    PASSED,
    POSITION,
    TAKES_OVER,
    BodyBlock,
    BodyOp,
    KernelBody,
    UnknownBodyError,
    carried_arguments,
)

# FLOPs and operand dtype of an operation; None if it multiplies no matrices.
MatmulRule = Callable[[Any], tuple[int, str] | None]

_Read = TypeVar("_Read")

_POSITIONS = {
    "tpu.program_id": POSITION,
    "tpu.iteration_bound": EXTENT,
    "tt.get_program_id": POSITION,
    "tt.get_num_programs": EXTENT,
    "gpu.block_id": POSITION,
    "gpu.grid_dim": EXTENT,
    "gpu.cluster_block_id": IN_CLUSTER,
    "gpu.cluster_dim_blocks": CLUSTER,
}
# The integer attribute to read from an operation, by the operation's name.
_ATTRIBUTES = {
    "arith.constant": "value",
    "arith.cmpi": "predicate",
    "tpu.program_id": "dimension",
    "tpu.iteration_bound": "dimension",
    "tt.get_program_id": "axis",
    "tt.get_num_programs": "axis",
}
_QUERY = "clusterlaunchcontrol.query_cancel"
_WITHOUT_REGIONS = ("arith.", "llvm.", "math.", "nvvm.", "vector.extract", "vector.insert")
_BYTECODE = b"ML\xefR"
_THREADS = {"gpu.thread_id": POSITION, "gpu.block_dim": EXTENT}


class BodyReader:
    """Copies what decides how often matmuls run, numbering values.

    A kernel has ten thousand operations on data, which take time to read: only matmuls, operations
    with regions, the ends of blocks, and what integers in these are computed from are copied.

    Args:
        matmul: FLOPs and operand dtype of an operation.

    Attributes:
        makers, matmuls, dtype: as in a `KernelBody`.
    """

    def __init__(self, matmul: MatmulRule) -> None:
        self.matmul = matmul
        self.numbers: dict[Any, int] = {}
        self.makers: dict[int, BodyOp] = {}
        self.matmuls = 0
        self.dtype = ""
        self._wanted: list[Any] = []  # values whose operations are still to be copied

    def number(self, value: Any) -> int:
        """The number of a value."""
        return self.numbers.setdefault(value, len(self.numbers))

    def block(self, block: Any) -> BodyBlock:
        """A block and all that is nested in it."""
        arguments = tuple(self.number(argument) for argument in block.arguments)
        operations = [op.operation for op in block.operations]
        ops = [op for operation in operations[:-1] if (op := self._structure(operation))]
        for last in operations[-1:]:
            ops.append(self._structure(last) or self._copied(last))
            self._wanted += filter(_is_integer, last.operands)
        return BodyBlock(arguments, ops)

    def _structure(self, operation: Any) -> BodyOp | None:
        """A matmul, or an operation with regions and all that is nested in it; else None."""
        name = str(operation.name)
        if found := self.matmul(operation):
            flops, dtype = found
            self.matmuls += 1
            self.dtype = self.dtype or dtype
            op = BodyOp(name, flops=flops, has_matmul=True)
        elif name.startswith(_WITHOUT_REGIONS) or not len(operation.regions):
            return None
        else:
            op = self._copied(operation)
            self._wanted += filter(_is_integer, operation.operands)
        if name == "scf.index_switch":
            op.cases = integers(operation.attributes["cases"])
        regions = () if name.startswith(_WITHOUT_REGIONS) else operation.regions
        op.regions = tuple(self.block(block) for region in regions for block in region)
        op.has_matmul = op.has_matmul or any(o.has_matmul for r in op.regions for o in r.ops)
        if name in LOOPS:
            self.makers |= dict.fromkeys(carried_arguments(op), op)
        if name == "scf.while":
            before, after = op.regions
            passed = zip(after.arguments, before.ops[-1].operands[1:], strict=True)
            self.makers |= {argument: BodyOp(PASSED, (value,)) for argument, value in passed}
        return op

    def _copied(self, operation: Any) -> BodyOp:
        """An operation without its regions."""
        name, attribute = _name_and_attribute(operation)
        op = BodyOp(
            name,
            tuple(map(self.number, operation.operands)),
            tuple(map(self.number, operation.results)),
            attribute,
        )
        for number in op.results:
            self.makers[number] = op
        return op

    def body(self, block: BodyBlock, positions: Sequence[int], **facts: Any) -> KernelBody:
        """The kernel whose operations were read.

        Args:
            block: its operations.
            positions: numbers of the arguments that hold a position, in the order of the axes.
            facts: the other fields of a body.
        """
        for axis, number in enumerate(positions):
            self.makers[number] = BodyOp(POSITION, attribute=axis)
        while self._wanted:
            value = self._wanted.pop()
            if self.number(value) not in self.makers and hasattr(value.owner, "operands"):
                self._copied(value.owner)
                self._wanted += value.owner.operands
        return KernelBody(
            block=block, matmuls=self.matmuls, dtype=self.dtype, makers=self.makers, **facts
        )


def read_body(raw: bytes, dialect: str, passes: str, read: Callable[[Any], _Read]) -> _Read:
    """Parses a kernel's MLIR, in bytecode or text, and reads it.

    Args:
        raw: the module.
        dialect: tpu, triton or mosaic_gpu.
        passes: a pipeline that restores the plain dialects, if it is in bytecode.
        read: reads the parsed module.

    Raises:
        UnknownBodyError: jaxlib is not installed, or the body is of another version.
    """
    try:
        from mfu_jax.util.jax_internals import jaxlib_version, mlir_bindings

        register, ir, PassManager = mlir_bindings(dialect)
    except ImportError as error:
        raise UnknownBodyError(f"its body cannot be read without jaxlib ({error})") from None
    try:
        with ir.Context() as context, ir.Location.unknown():
            context.allow_unregistered_dialects = True
            # A damaged body's messages may not be UTF-8, which makes the bindings abort.
            context.emit_error_diagnostics = True
            context.attach_diagnostic_handler(lambda diagnostic: True)
            # The stable form has its own names; anything else is in the upstream dialects.
            is_bytecode = raw.startswith(_BYTECODE)
            register(
                context,
                with_upstream=not (is_bytecode and dialect == "tpu"),
                # Triton's bytecode has no version: JAX 0.12 cannot read what earlier ones wrote,
                # but anything can as operations of an unknown dialect.
                with_own=not (is_bytecode and dialect == "triton"),
            )
            # The bindings abort on a damaged name that is not UTF-8, too.
            (strings_of(raw) if is_bytecode else unescaped(raw)).decode()
            module = ir.Module.parse(raw)
            if passes and is_bytecode:
                PassManager.parse(f"builtin.module({passes})").run(module.operation)
            return read(module)
    except (KeyError, ValueError, RuntimeError, ir.MLIRError) as error:
        first = str(error).strip().splitlines()[:1]
        raise UnknownBodyError(
            f"its body is damaged, or of another JAX than jaxlib {jaxlib_version()} can read "
            f"({' '.join(first)[:80]})"
        ) from None


def _is_integer(value: Any) -> bool:
    return re.fullmatch(r"index|i\d+", str(value.type)) is not None


def _name_and_attribute(operation: Any) -> tuple[str, int]:
    name = str(operation.name)
    if name in _THREADS:
        return _THREADS[name], 3 + _axis(operation)  # after the three axes of the grid
    if name.startswith("gpu.") and "dimension" in operation.attributes:
        return _POSITIONS.get(name, name), _axis(operation)
    if name == "llvm.inline_asm" and _QUERY in str(operation.attributes["asm_string"]):
        return TAKES_OVER, 0
    key = _ATTRIBUTES.get(name, "")
    if name.startswith("tt.get_") and key not in operation.attributes:
        return _POSITIONS.get(name, name), _property(operation)
    return _POSITIONS.get(name, name), integer(operation, key) if key else 0


def _property(operation: Any) -> int:
    """The number of an operation of an unknown dialect: ``"tt.get_program_id"() <1 : i32>``."""
    match = re.search(r"<(\d+) : i32>", str(operation))
    if not match:
        raise UnknownBodyError(f"{operation.name} without its axis")
    return int(match[1])


def _axis(operation: Any) -> int:
    """The axis of ``#gpu<dim x>``, in later versions ``#gpu.dim<x>``."""
    match = re.search(r"dim[ <]([xyz])>", str(operation.attributes["dimension"]))
    if not match:
        raise UnknownBodyError(f"{operation.name} of an unknown dimension")
    return "xyz".index(match[1])


def strings_of(raw: bytes) -> bytes:
    """All names and texts of a module in bytecode, where printing it would take half the time.

    It is ``MLïR``, a version, the producer, and sections: a number, a length, an alignment if the
    number's highest bit is set, and the content. Section 0 has the strings: how many, their
    lengths, their bytes.

    Raises:
        ValueError: it ends too early.
    """
    position = len(_BYTECODE)

    def varint() -> int:
        """An integer of as many bytes as its lowest bits say."""
        nonlocal position
        first = raw[position]
        size = 9 if first == 0 else (first & -first).bit_length()
        found = int.from_bytes(raw[position : position + size], "little") >> min(size, 8)
        position += size
        return found

    try:
        varint()
        position = raw.index(b"\0", position) + 1
        while True:
            section = raw[position]
            position += 1
            length = varint()
            if section & 0x80:
                alignment = varint()
                position += -position % alignment
            if section & 0x7F == 0:
                end = position + length
                for _ in range(varint()):
                    varint()
                return raw[position:end]
            position += length
    except (IndexError, ZeroDivisionError):
        raise ValueError("bytecode without its strings") from None


def integers(attribute: Any) -> tuple[int, ...]:
    """The elements of an array attribute."""
    return tuple(int(v) for v in re.findall(r"-?\d+", str(attribute).partition(":")[2]))


def integer(operation: Any, key: str) -> int:
    """An integer or boolean attribute; 0 if absent or of another kind."""
    if key not in operation.attributes:
        return 0
    text = str(operation.attributes[key])
    if text in ("true", "false"):
        return int(text == "true")
    match = re.match(r"(-?\d+)( :|$)", text)
    return int(match[1]) if match else 0
