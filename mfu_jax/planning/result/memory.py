"""What a program keeps in memory, by kind: its arguments, and the arrays that its text carries
from the forward pass into the backward pass, and from there into the optimizer.

Sizes are the compiler's where it gives them (arguments, temporaries, outputs); their split follows
the shapes in the text, without layout padding. Temporaries are not all live at once: those at the
peak are meant, so that what is on the device sums to it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator

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


def memory_of(program: ProgramDump) -> dict[str, int]:
    """Memory of a compiled program, in bytes per device by kind.

    Returns:
        ``parameters``, ``optimizer``, ``batch``, ``gradients``, ``activations``, ``temporaries``
        (the rest of them), ``new outputs``, ``program``, ``host``; kinds with 0 bytes are left out.
        If names do not tell weights from moments, both are ``state``.

    Raises:
        HloParseError: the program's text is not optimised HLO.
    """
    module = parse_hlo(program.text)
    sizes = program.memory or {}
    kinds = _arguments(module, program.text, sizes.get("argument_size_in_bytes"))
    kinds["new outputs"] = max(
        0, sizes.get("output_size_in_bytes", 0) - sizes.get("alias_size_in_bytes", 0)
    )
    activations, gradients = _saved(module)
    temporaries = sizes.get("temp_size_in_bytes")
    if temporaries is not None:
        room = sizes.get("peak_memory_in_bytes", 0) - sum(kinds.values())
        temporaries = min(temporaries, room) if room > 0 else temporaries  # a CPU's peak has none
        gradients = min(gradients, temporaries)
        activations = min(activations, temporaries - gradients)
        kinds["temporaries"] = temporaries - gradients - activations
    kinds |= {"gradients": gradients, "activations": activations}
    kinds["program"] = sizes.get("generated_code_size_in_bytes", 0)
    kinds["host"] = sizes.get("host_temp_size_in_bytes", 0) + sum(
        parameter.shape.bytes
        for parameter in module.entry.parameters.values()
        if _HOST in parameter.shape.layout
    )
    return {kind: size for kind, size in kinds.items() if size}


def _arguments(module: HloModule, text: str, total: int | None) -> dict[str, int]:
    """Bytes of the arguments on the device by kind; layout padding is distributed in proportion."""
    header = text.partition("\n")[0]
    aliases = header.partition("input_output_alias=")[2].partition("entry_computation")[0]
    kept = set(map(int, _ALIASED.findall(aliases)))
    found: dict[str, int] = defaultdict(int)
    parameters = module.entry.parameters.items()
    names = {number: parameter.op_name for number, parameter in parameters}
    named = any(_OPTIMIZER.search(name) for name in names.values())
    for number, parameter in parameters:
        shape = parameter.shape
        if _HOST in shape.layout:  # not in the compiler's total
            continue
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


def _saved(module: HloModule) -> tuple[int, int]:
    """Bytes of activations, and of gradients that wait for the optimizer."""
    weights = {p.shape.dims for p in module.entry.parameters.values() if len(p.shape.dims) > 1}
    activations = gradients = 0
    for computation in _passes(module):
        for instruction in computation.instructions.values():
            phase = _phase(instruction)
            if phase == "forward":
                for shape in _carried(module, computation, instruction, _BACKWARD):
                    activations += shape.bytes
            elif phase in _BACKWARD:
                for shape in _carried(module, computation, instruction, ("forward", "other")):
                    gradients += shape.bytes * (shape.dims in weights)
    return activations, gradients


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
) -> Iterator[Shape]:
    """Arrays made by an instruction and read in one of `phases`."""
    if made.opcode in _HANDED_ON:
        return
    values = [made]
    if made.shape.elements:
        users = computation.users.get(made.name, ())
        values = [user for user in users if user.opcode == "get-tuple-element"]
    for value in values:
        if _HOST in value.shape_text or not value.shape.dims:
            continue
        is_made = made.opcode != "while" or _writes(module, made, int(value.attribute("index")))
        if is_made and _reaches(computation, value, phases):
            yield value.shape


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


def _writes(module: HloModule, loop: HloInstruction, index: int) -> bool:
    """Whether a loop writes an element of its state; it only reads the others."""
    body = module[loop.loop_computations[0]]
    root = body.root
    if root.opcode != "tuple" or index >= len(root.operands):
        return True
    written, given = body[root.operands[index]], {p.name for p in body.parameters.values()}
    return not (written.opcode == "get-tuple-element" and written.operands[0] in given)
