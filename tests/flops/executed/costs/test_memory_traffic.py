"""Bytes of HBM: what a fusion that carries a collective along reads and writes itself."""

from __future__ import annotations

from mfu_jax.flops.executed.instruction_costs import instruction_costs

# An all-gather of 4 × [8, 128] bfloat16 in three fusions; the second adds two arrays meanwhile.
_GATHER = "all-gather(%s), channel_id=1, replica_groups={{0,1,2,3}}, dimensions={0}"
_CHAIN = 'use_global_device_ids=true, frontend_attributes={chain_id="2"}'
CHAIN = f"""\
HloModule jit_step, is_scheduled=true, num_partitions=4

%first (s: bf16[8,128]) -> (bf16[8,128], bf16[32,128], u32[]) {{
  %s = bf16[8,128] parameter(0)
  %g = bf16[32,128] {_GATHER}, {_CHAIN}
  ROOT %c = (bf16[8,128], bf16[32,128], u32[]) custom-call(%g), custom_call_target="AsyncCollectiveStart"
}}

%second (s: bf16[8,128], b: bf16[32,128], u: u32[], x: f32[64,128], y: f32[64,128]) -> (f32[64,128], bf16[8,128], bf16[32,128], bf16[32,128], u32[]) {{
  %s = bf16[8,128] parameter(0)
  %b = bf16[32,128] parameter(1)
  %u = u32[] parameter(2)
  %x = f32[64,128] parameter(3)
  %y = f32[64,128] parameter(4)
  %sum = f32[64,128] add(%x, %y)
  %g = bf16[32,128] {_GATHER}, {_CHAIN}
  ROOT %t = (f32[64,128], bf16[8,128], bf16[32,128], bf16[32,128], u32[]) tuple(%sum, %s, %b, %g, %u)
}}

%third (s: bf16[8,128], b: bf16[32,128], u: u32[]) -> bf16[32,128] {{
  %s = bf16[8,128] parameter(0)
  %b = bf16[32,128] parameter(1)
  %u = u32[] parameter(2)
  %g = bf16[32,128] {_GATHER}, {_CHAIN}
  ROOT %c = bf16[32,128] custom-call(%s, %b, %g, %u), custom_call_target="AsyncCollectiveDone"
}}

ENTRY %main (a: bf16[8,128], x: f32[64,128], y: f32[64,128]) -> (f32[64,128], bf16[32,128]) {{
  %a = bf16[8,128] parameter(0)
  %x = f32[64,128] parameter(1)
  %y = f32[64,128] parameter(2)
  %start = (bf16[8,128], bf16[32,128], u32[]) fusion(%a), kind=kCustom, output_to_operand_aliasing={{{{0}}: (0, {{}})}}, calls=%first
  %s = bf16[8,128] get-tuple-element(%start), index=0
  %b = bf16[32,128] get-tuple-element(%start), index=1
  %u = u32[] get-tuple-element(%start), index=2
  %step = (f32[64,128], bf16[8,128], bf16[32,128], bf16[32,128], u32[]) fusion(%s, %b, %u, %x, %y), kind=kOutput, output_to_operand_aliasing={{{{1}}: (0, {{}}), {{2}}: (1, {{}}), {{3}}: (1, {{}}), {{4}}: (2, {{}})}}, calls=%second
  %sum = f32[64,128] get-tuple-element(%step), index=0
  %b2 = bf16[32,128] get-tuple-element(%step), index=2
  %done = bf16[32,128] fusion(%s, %b2, %u), kind=kCustom, output_to_operand_aliasing={{{{}}: (1, {{}})}}, calls=%third
  ROOT %out = (f32[64,128], bf16[32,128]) tuple(%sum, %done)
}}
"""  # noqa: E501


def test_a_collective_that_fusions_carry_along_counts_where_it_starts() -> None:
    """The start: what is sent, twice with its alias, what is gathered, and a number."""
    records = instruction_costs(CHAIN).records
    assert records["start"].hbm_bytes == 2 * (8 * 128 * 2) + 32 * 128 * 2 + 4
    assert records["step"].hbm_bytes == 3 * (64 * 128 * 4)
    assert records["done"].hbm_bytes == 0
    assert records["done"].started_by == "start"
