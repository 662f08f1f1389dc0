"""What a program keeps in memory, by kind: its arguments, and the arrays that its text carries
from the forward pass into the backward pass, and from there into the optimizer.

Sizes are the compiler's where it gives them (arguments, temporaries, outputs); their split follows
the shapes in the text, without layout padding. Temporaries are not all live at once: those at the
peak are meant, so that what is on the device sums to it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from mfu_jax.dumps.program import ProgramDump
from mfu_jax.flops.executed.hlo.module import HloComputation, HloInstruction, HloModule
from mfu_jax.flops.executed.hlo.parsing import parse_hlo
from mfu_jax.flops.executed.hlo.shapes import Shape
from mfu_jax.flops.scopes import read_scope

_OPTIMIZER = re.compile(r"opt_?state|optimizer|optax|\.(?:mu|nu)\b|moment|exp_avg")
_PARAMETERS = re.compile(r"param|weight|kernel|embedding|\bmodel\b|layers|\bp\b")
_ALIASED = re.compile(r"\{[\d, ]*\}: \((\d+),")
_HOST = "S(5)"
# Opcodes that pass a value on without computing anything.
_HANDED_ON = frozenset(
    "bitcast copy copy-start copy-done get-tuple-element tuple opt-barrier convert reshape "
    "transpose".split()
)
_BACKWARD = ("backward", "rematerialized")
_STACKING = re.compile(r"dynamic_update_\w+$")  # stores a layer's value in the stack of all layers
_UNNAMED = "unnamed"
_FARTHEST = 12  # instructions between a saved value and one with a scope


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes per device.

    Attributes:
        kinds: ``parameters``, ``optimizer``, ``batch``, ``gradients``, ``activations``,
            ``temporaries`` (the rest of them), ``new outputs``, ``program``, ``host``; kinds with
            0 bytes are left out. If names do not tell weights from moments, both are ``state``.
        activations: bytes saved for the backward pass, by named scope.
    """

    kinds: Mapping[str, int] = field(default_factory=dict)
    activations: Mapping[str, int] = field(default_factory=dict)


def memory_of(program: ProgramDump) -> Memory:
    """Memory of a compiled program.

    Raises:
        HloParseError: the program's text is not optimised HLO.
    """
    module = parse_hlo(program.text)
    sizes = program.memory or {}
    kinds = _arguments(module, program.text, sizes.get("argument_size_in_bytes"))
    kinds["new outputs"] = max(
        0, sizes.get("output_size_in_bytes", 0) - sizes.get("alias_size_in_bytes", 0)
    )
    saved, gradients = _saved(module)
    temporaries = sizes.get("temp_size_in_bytes")
    activations = sum(saved.values())
    if temporaries is not None:
        room = sizes.get("peak_memory_in_bytes", 0) - sum(kinds.values())
        temporaries = min(temporaries, room) if room > 0 else temporaries  # a CPU's peak has none
        gradients = min(gradients, temporaries)
        activations = min(activations, temporaries - gradients)
        kinds["temporaries"] = temporaries - gradients - activations
    kinds |= {"gradients": gradients, "activations": activations}
    kinds["program"] = sizes.get("generated_code_size_in_bytes", 0)
    kinds["host"] = sizes.get("host_temp_size_in_bytes", 0)
    by_size = sorted(saved.items(), key=lambda pair: -pair[1])
    return Memory(
        kinds={kind: size for kind, size in kinds.items() if size}, activations=dict(by_size)
    )


def _arguments(module: HloModule, text: str, total: int | None) -> dict[str, int]:
    """Bytes of the arguments by kind; layout padding is distributed in proportion."""
    header = text.partition("\n")[0]
    aliases = header.partition("input_output_alias=")[2].partition("entry_computation")[0]
    kept = set(map(int, _ALIASED.findall(aliases)))
    found: dict[str, int] = defaultdict(int)
    parameters = module.entry.parameters.items()
    names = {number: parameter.op_name for number, parameter in parameters}
    named = any(_OPTIMIZER.search(name) for name in names.values())
    for number, parameter in parameters:
        shape = parameter.shape
        kind = _argument_kind(names[number], shape, not kept or number in kept, named)
        found[kind] += shape.bytes
    whole = sum(found.values())
    if total is None or not whole:
        return dict(found)
    return {kind: size * total // whole for kind, size in found.items()}


def _argument_kind(name: str, shape: Shape, stays: bool, named: bool) -> str:
    if _OPTIMIZER.search(name):
        return "optimizer"
    floating = shape.dtype.startswith(("f", "bf"))
    if floating and stays and (named or _PARAMETERS.search(name)):
        return "parameters"
    if stays and (floating or not shape.dims):
        return "state"
    return "parameters" if floating and _PARAMETERS.search(name) else "batch"


def _saved(module: HloModule) -> tuple[dict[str, int], int]:
    """Bytes of activations by scope, and of gradients that wait for the optimizer."""
    weights = {p.shape.dims for p in module.entry.parameters.values() if len(p.shape.dims) > 1}
    saved: dict[str, int] = defaultdict(int)
    gradients = 0
    for computation in _passes(module):
        for instruction in computation.instructions.values():
            phase = _phase(instruction)
            if phase == "forward":
                for shape, scope in _carried(module, computation, instruction, _BACKWARD):
                    saved[scope] += shape.bytes
            elif phase in _BACKWARD:
                for shape, _ in _carried(module, computation, instruction, ("forward", "other")):
                    gradients += shape.bytes * (shape.dims in weights)
    return dict(saved), gradients


def _passes(module: HloModule) -> Iterator[HloComputation]:
    """Computations in which a forward and a backward pass meet: ENTRY, or a loop in it."""
    names = [module.entry.name]
    while names:
        computation = module[names.pop()]
        yield computation
        for instruction in computation.instructions.values():
            if instruction.opcode in ("while", "call") and _phase(instruction) == "other":
                names += instruction.callees


def _phase(instruction: HloInstruction) -> str:
    name = instruction.op_name
    if "transpose(" not in name and "jvp(" not in name:
        return "other"
    return read_scope(name).phase


def _carried(
    module: HloModule, computation: HloComputation, made: HloInstruction, phases: tuple[str, ...]
) -> Iterator[tuple[Shape, str]]:
    """Arrays made by an instruction and read in one of `phases`, with their scopes."""
    if made.opcode in _HANDED_ON:
        return
    values = [made]
    if made.shape.elements:
        users = computation.users.get(made.name, ())
        values = [user for user in users if user.opcode == "get-tuple-element"]
    for value in values:
        if _HOST in value.shape_text or not value.shape.dims:
            continue
        scope = _scope(computation, made)
        if made.opcode == "while":
            scope = _loop_source(module, made, int(value.attribute("index")))
        if scope and _reaches(computation, value, phases):
            yield value.shape, scope


def _reaches(
    computation: HloComputation, value: HloInstruction, phases: tuple[str, ...], depth: int = 6
) -> bool:
    """Whether a value is read in one of the phases, directly or passed on."""
    for user in computation.users.get(value.name, ()):
        if user.opcode not in _HANDED_ON:
            if _phase(user) in phases:
                return True
        elif depth and _reaches(computation, user, phases, depth - 1):
            return True
    return False


def _loop_source(module: HloModule, loop: HloInstruction, index: int) -> str:
    """The scope that writes one element of a loop's state; empty if the loop only reads it."""
    body = module[loop.loop_computations[0]]
    root = body.root
    if root.opcode != "tuple" or index >= len(root.operands):
        return _UNNAMED
    written = body[root.operands[index]]
    if written.opcode == "get-tuple-element" and written.operands[0] in {
        parameter.name for parameter in body.parameters.values()
    }:
        return ""
    outer = read_scope(loop.op_name).path
    return _scope(body, written, outer) if outer else _scope(body, written)


def _scope(computation: HloComputation, instruction: HloInstruction, outer: str = "") -> str:
    """Named scopes of an instruction, else of the nearest of its inputs that has one.

    Args:
        computation: the computation that contains it.
        instruction: the instruction.
        outer: scopes of the whole computation; a scope inside them is preferred.
    """
    waiting = [instruction]
    for _ in range(_FARTHEST):
        if not waiting:
            break
        one = waiting.pop(0)
        path = read_scope(one.op_name).path if "/" in one.op_name else ""
        if path not in ("", outer) and not _STACKING.search(one.op_name):
            return path
        found = (computation.instructions.get(name) for name in one.operands)
        waiting += [operand for operand in found if operand and not _is_given(computation, operand)]
    return outer or _UNNAMED


def _is_given(computation: HloComputation, instruction: HloInstruction) -> bool:
    """Whether a value comes from outside the computation."""
    if instruction.opcode == "get-tuple-element":
        instruction = computation.operand(instruction, 0)
    return instruction.opcode in ("parameter", "constant")
