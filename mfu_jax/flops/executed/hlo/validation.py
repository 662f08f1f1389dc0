"""Checks that a parsed program is whole, so that a lost line is an error, not a different count."""

from __future__ import annotations

from mfu_jax.flops.executed.hlo.module import HloComputation, HloModule
from mfu_jax.flops.executed.hlo.text import WITHOUT_OPERANDS, HloParseError


def check_module(module: HloModule) -> None:
    """Checks what every complete program has: one ROOT per computation, and defined operands.

    Raises:
        HloParseError: something is missing.
    """
    if not module.header:
        raise HloParseError("no line that begins with HloModule", number=1)
    for computation in module.computations.values():
        _check_root(computation)
        _check_operands(computation)


def _check_root(computation: HloComputation) -> None:
    roots = computation.roots
    if roots != 1:
        count = "no ROOT" if not roots else f"{roots} ROOT instructions"
        raise HloParseError(f"%{computation.name} has {count}", number=computation.number)


def _check_operands(computation: HloComputation) -> None:
    if computation.is_defined:
        return
    known = computation.instructions
    is_known = known.__contains__
    for instruction in known.values():
        if instruction.opcode in WITHOUT_OPERANDS or all(map(is_known, instruction.operands)):
            continue
        name = next(name for name in instruction.operands if name not in known)
        raise instruction.error(f"%{computation.name} has no instruction %{name}")
