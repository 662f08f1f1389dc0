"""Checks that a parsed program is whole, so that a lost line is an error and not another count."""

from __future__ import annotations

import re

from mfu_jax.flops.executed.hlo import WITHOUT_OPERANDS, HloComputation, HloModule, HloParseError

_INDEX = re.compile(r"/\*index=\d+\*/")  # in long lists of operands


def check_module(module: HloModule) -> None:
    """Checks what every complete program has: one ROOT a computation, and defined operands.

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
    if len(roots) != 1:
        count = "no ROOT" if not roots else f"{len(roots)} ROOT instructions"
        raise HloParseError(f"%{computation.name} has {count}", number=computation.number)


def _check_operands(computation: HloComputation) -> None:
    known = computation.instructions
    texts = [
        i.operand_text
        for i in known.values()
        if i.opcode not in WITHOUT_OPERANDS and i.operand_text
    ]
    text = ", ".join(texts)
    if "/*" in text:
        text = _INDEX.sub("", text)
    if not text or known.keys() >= set(text[1:].split(", %")):  # all plain, as most are
        return
    for instruction in known.values():
        for name in instruction.operands:
            if name not in known:
                raise instruction.error(f"%{computation.name} has no instruction %{name}")
