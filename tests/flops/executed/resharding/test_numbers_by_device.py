"""Numbers that devices compute from their own: known, or not known, but never an error."""

from __future__ import annotations

from mfu_jax.flops.executed.costs.literals import Literals
from mfu_jax.flops.executed.hlo.dataflow import Dataflow
from mfu_jax.flops.executed.hlo.parsing import parse_hlo

PROGRAM = """HloModule m, num_partitions=4

%body (state: (s32[], s32[])) -> (s32[], s32[]) {
  %state = (s32[], s32[]) parameter(0)
  %flag = s32[] get-tuple-element(%state), index=0
  %offset = s32[] add(%flag, %flag)
  %one = s32[] constant(1)
  ROOT %next = (s32[], s32[]) tuple(%one, %offset)
}

%condition (state: (s32[], s32[])) -> pred[] {
  %state.1 = (s32[], s32[]) parameter(0)
  ROOT %true = pred[] constant(true)
}

ENTRY %main (x: f32[4]) -> (s32[], s32[]) {
  %x = f32[4] parameter(0)
  %me = u32[] partition-id()
  %zero = s32[] constant(0)
  %line = s32[4] constant({3, 2, 1, 0})
  %copying = (s32[4], s32[4], u32[]) copy-start(%line)
  %copied = s32[4] copy-done(%copying)
  %own = s32[1] dynamic-slice(%copied, %me), dynamic_slice_sizes={1}
  %table = s32[2,2] constant({ { 3, 2 }, { 1, 0 } })
  %cell = s32[1,1] dynamic-slice(%table, %me, %zero), dynamic_slice_sizes={1,1}
  %first = (s32[], s32[]) tuple(%zero, %zero)
  ROOT %loop = (s32[], s32[]) while(%first), condition=%condition, body=%body
}
"""


def numbers(name: str, computation: str = "main") -> tuple[int, ...] | None:
    module = parse_hlo(PROGRAM)
    literals, inside = Literals(Dataflow(module)), module[computation]
    return literals.numbers(inside, inside[name])


def test_a_table_is_looked_up_by_the_devices_number() -> None:
    assert numbers("own") == (3, 2, 1, 0)


def test_a_place_beyond_a_table_is_its_last_one() -> None:
    assert numbers("cell") == (3, 1, 1, 1)


def test_what_a_loop_sets_to_another_number_is_not_known() -> None:
    assert numbers("offset", "body") is None
