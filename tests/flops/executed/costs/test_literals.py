"""Constant operands of kernels: written out, broadcast, counted up, or elided."""

from __future__ import annotations

import pytest

from mfu_jax.flops.executed.costs.literals import Literals
from mfu_jax.flops.executed.hlo.dataflow import Dataflow
from mfu_jax.flops.executed.hlo.parsing import parse_hlo

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
        (6, "4, 4, -5, -5, 6, 6", False),
    ],
)
def test_values_of_operands(index: int, text: str | None, is_elided: bool) -> None:
    module = parse_hlo(PROGRAM)
    literals = Literals(Dataflow(module))
    assert literals.of(module.entry, module.entry.root, index) == text
    assert literals.elided == is_elided


LOOP = """HloModule m
%body (s: (s32[], s32[3], s32[3], s32[3])) -> (s32[], s32[3], s32[3], s32[3]) {
  %s = (s32[], s32[3], s32[3], s32[3]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %near = s32[3] get-tuple-element(%s), index=1
  %far = s32[3] get-tuple-element(%s), index=2
  %other = s32[3] get-tuple-element(%s), index=3
  %kernel = s32[3] custom-call(%near, %other)
  %start = (s32[3]{0:S(1)}, s32[3], u32[]) copy-start(%far)
  %again = s32[3]{0:S(1)} copy-done(%start)
  ROOT %state = (s32[], s32[3], s32[3], s32[3]) tuple(%next, %again, %far, %far)
}
%condition (s: (s32[], s32[3], s32[3], s32[3])) -> pred[] {
  %s = (s32[], s32[3], s32[3], s32[3]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %end = s32[] constant(4)
  ROOT %less = pred[] compare(%i, %end), direction=LT
}
ENTRY %main () -> (s32[3], s32[3]) {
  %zero = s32[] constant(0)
  %table = s32[3] constant({4, -5, 6})
  %table.clone = s32[3] constant({4, -5, 6})
  %different = s32[3] constant({0, 0, 0})
  %start = (s32[3]{0:S(1)}, s32[3], u32[]) copy-start(%table)
  %copied = s32[3]{0:S(1)} copy-done(%start)
  %state = (s32[], s32[3], s32[3], s32[3]) tuple(%zero, %copied, %table.clone, %different)
  %loop = (s32[], s32[3], s32[3], s32[3]) while(%state), condition=%condition, body=%body
  %near = s32[3] get-tuple-element(%loop), index=1
  %other = s32[3] get-tuple-element(%loop), index=3
  ROOT %both = (s32[3], s32[3]) custom-call(%near, %other)
}
"""


@pytest.mark.parametrize(("computation", "kernel"), [("body", "kernel"), ("main", "both")])
def test_a_table_that_a_loop_copies_again_in_each_iteration(computation: str, kernel: str) -> None:
    module = parse_hlo(LOOP)
    literals = Literals(Dataflow(module))
    inside = module[computation]
    assert literals.of(inside, inside.instructions[kernel], 0) == "{4, -5, 6}"
    # In the first iteration another one.
    assert literals.of(inside, inside.instructions[kernel], 1) is None
