"""The constants that a compiled program's text omits."""

from __future__ import annotations

from typing import Any

from mfu_jax.flops.executed.hlo.module import HloModule
from mfu_jax.flops.executed.hlo.parsing import parse_hlo


class LargeConstants:
    """The program with its large constants written out; parsed only if one is needed."""

    def __init__(self, program: Any) -> None:
        self.program = program
        self.made: HloModule | None = None
        self.tried = False

    def module(self) -> HloModule | None:
        if not self.tried and hasattr(self.program, "runtime_executable"):
            from mfu_jax.util.jax_internals import text_with_large_constants  # text needs no JAX

            self.tried = True
            text = text_with_large_constants(self.program)
            self.made = parse_hlo(text) if text else None
        return self.made
