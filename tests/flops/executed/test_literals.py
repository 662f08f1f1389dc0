"""Constant operands of kernels: written out, broadcast, counted up, or elided."""

from __future__ import annotations

import pytest

from mfu_jax.flops.executed.dataflow import Dataflow
from mfu_jax.flops.executed.literals import Literals
from mfu_jax.flops.executed.parsing import parse_hlo

PROGRAM = """HloModule m
ENTRY %main (x: s32[3]) -> s32[] {
  %x = s32[3] parameter(0)
  %table = s32[3] constant({4, -5, 6})
  %elided = s32[300] constant({...})
  %seven = s32[] constant(7)
  %same = s32[2,2] broadcast(%seven), dimensions={}
  %copied = s32[2,2] copy(%same)
  %rows = s32[2,3] iota(), iota_dimension=0
  %columns = s32[2,3] iota(), iota_dimension=1
  %spread = s32[3,2] broadcast(%table), dimensions={0}
  ROOT %kernel = s32[] custom-call(%x, %table, %elided, %copied, %rows, %columns, %spread)
}
"""


@pytest.mark.parametrize(
    ("index", "text", "is_elided"),
    [
        (0, None, False),
        (1, "{4, -5, 6}", False),
        (2, None, True),
        (3, "7, 7, 7, 7", False),
        (4, "0, 0, 0, 1, 1, 1", False),
        (5, "0, 1, 2, 0, 1, 2", False),
        (6, None, False),  # no table that XLA writes
    ],
)
def test_values_of_operands(index: int, text: str | None, is_elided: bool) -> None:
    module = parse_hlo(PROGRAM)
    literals = Literals(Dataflow(module), lambda: None)
    assert literals.of(module.entry, module.entry.root, index) == text
    assert literals.elided == is_elided
