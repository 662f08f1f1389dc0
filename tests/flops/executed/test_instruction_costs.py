"""One record per launched instruction: its cost from arithmetic, and sums that are the totals."""

from __future__ import annotations

import lzma
from collections import Counter

import pytest

from mfu_jax.flops.executed.counting import executed_flops
from mfu_jax.flops.executed.instruction_costs import instruction_costs
from tests.support.paths import RECORDED

PHASES = ("backward", "rematerialized", "xla_rematerialized", "optimizer", "other", "evaluation")

LOOP = """HloModule jit_f, num_partitions=8

%fused (a: f32[2,3], b: f32[3,4]) -> f32[2,4] {
  %a = f32[2,3] parameter(0)
  %b = f32[3,4] parameter(1)
  %d = f32[2,4] dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}, MATMUL
  %h = f32[2,4] tanh(%d)
  ROOT %n = f32[2,4] negate(%h), metadata={op_name="jit(f)/norm/neg"}
}

%body (t: (s32[], f32[2,3], f32[3,4])) -> (s32[], f32[2,3], f32[3,4]) {
  %t = (s32[], f32[2,3], f32[3,4]) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %x = f32[2,3] get-tuple-element(%t), index=1
  %y = f32[3,4] get-tuple-element(%t), index=2
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %f = f32[2,4] fusion(%x, %y), kind=kOutput, calls=%fused
  %g-start = (f32[2,3], f32[8,3]) all-gather-start(%x), GATHER
  %g-done = f32[8,3] all-gather-done(%g-start)
  ROOT %r = (s32[], f32[2,3], f32[3,4]) tuple(%next, %x, %y)
}

%condition (t: (s32[], f32[2,3], f32[3,4])) -> pred[] {
  %t = (s32[], f32[2,3], f32[3,4]) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %five = s32[] constant(5)
  ROOT %less = pred[] compare(%i, %five), direction=LT
}

ENTRY %main (x: f32[2,3], y: f32[3,4]) -> (s32[], f32[2,3], f32[3,4]) {
  %x = f32[2,3] parameter(0)
  %y = f32[3,4] parameter(1)
  %zero = s32[] constant(0)
  %state = (s32[], f32[2,3], f32[3,4]) tuple(%zero, %x, %y)
  ROOT %loop = (s32[], f32[2,3], f32[3,4]) while(%state), condition=%condition, body=%body
}
"""
for word, attributes in {
    "MATMUL": 'metadata={op_name="jit(f)/transpose(jvp(mlp))/while/body/wi/dot_general"}',
    "GATHER": "replica_groups={{0,2,4,6},{1,3,5,7}}, dimensions={0}, "
    'metadata={op_name="jit(f)/mlp/all_gather"}',
}.items():
    LOOP = LOOP.replace(word, attributes)


def test_a_fusion_in_a_loop_a_collective_and_its_end() -> None:
    costs = instruction_costs(LOOP)
    assert (costs.name, costs.devices) == ("jit_f", 8)
    assert set(costs.records) == {"next", "f", "g-start", "g-done", "less", "loop"}
    fusion = costs.records["f"]
    assert (fusion.runs, fusion.flops_by_dtype) == (5, {"f32": 2 * 2 * 3 * 4})
    assert (fusion.phase, fusion.scope) == ("backward", "mlp/wi")
    assert fusion.flops_by_phase == {"backward": 48}
    assert fusion.hbm_bytes == 4 * (2 * 3 + 3 * 4 + 2 * 4)
    assert (fusion.elementwise, fusion.transcendental) == (2 * 4, 2 * 4)
    start, done = costs.records["g-start"], costs.records["g-done"]
    assert start.collective is not None
    assert (start.collective.kind, start.collective.bytes) == ("all-gather", 4 * 8 * 3)
    assert start.device_groups == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert (start.is_async, done.started_by, done.collective) == (True, "g-start", None)
    assert costs.records["loop"].is_control
    assert costs.records["less"].runs == 5 + 1


SPARSE_CORE = """HloModule jit_f

%fused (a: bf16[64,8], i: s32[64]) -> bf16[64,8] {
  %a = bf16[64,8] parameter(0)
  %i = s32[64] parameter(1)
  %s = s32[64] slice(%i), slice={[0:64]}
  %g = bf16[64,8] gather(%a, %s), offset_dims={1}, collapsed_slice_dims={0}, start_index_map={0}
  %t = bf16[64,8] transpose(%g), dimensions={0,1}
  ROOT %r = bf16[64,8] reshape(%t)
}

%called (a: bf16[64,8], i: s32[64]) -> bf16[64,8] {
  %a = bf16[64,8] parameter(0)
  %i = s32[64] parameter(1)
  ROOT %f = bf16[64,8] fusion(%a, %i), kind=kCustom, calls=%fused
}

%offloaded (a: bf16[64,8], i: s32[64]) -> bf16[64,8] {
  %a = bf16[64,8] parameter(0)
  %i = s32[64] parameter(1)
  ROOT %c = bf16[64,8] call(%a, %i), to_apply=%called
}

ENTRY %main (x: bf16[64,8], i: s32[64]) -> bf16[64,8] {
  %x = bf16[64,8] parameter(0)
  %i = s32[64] parameter(1)
  %go = ((bf16[64,8], s32[64]), bf16[64,8]) async-start(%x, %i), calls=%offloaded
  ROOT %done = bf16[64,8] async-done(%go)
}
"""


def test_a_gather_on_a_sparse_core_moves_its_rows_once() -> None:
    """As XLA writes it for a TPU7x: a fusion in a call in an asynchronous computation."""
    record = instruction_costs(SPARSE_CORE).records["go"]
    assert record.hbm_bytes == 2 * 64 * 8 + 4 * 64 + 2 * 64 * 8  # rows, indices, result
    assert record.hbm_bytes == executed_flops(SPARSE_CORE).hbm_bytes


@pytest.mark.parametrize(
    "name",
    [
        "cpu_mesh_1x1x4", "cpu_moe_capacity", "h100_mesh_8x1x1", "h100_layers_cudnn",
        "v5e_splash_causal", "v6e_mesh_1x1x4", "v6e_scan_full", "cpu_branches", "v5p_fft",
    ],
)  # fmt: skip
def test_sums_are_the_totals(name: str) -> None:
    with lzma.open(RECORDED / f"{name}.hlo.xz", "rt") as file:
        text = file.read()
    executed, records = executed_flops(text), instruction_costs(text).records.values()
    assert sum(r.runs * r.flops for r in records) == executed.total
    assert sum(r.runs * r.hbm_bytes for r in records) == executed.hbm_bytes
    assert sum(r.runs * r.elementwise for r in records) == executed.elementwise
    by_phase: Counter[str] = Counter()
    by_dtype: Counter[str] = Counter()
    by_kind: Counter[str] = Counter()
    for record in records:
        by_phase.update({p: record.runs * n for p, n in record.flops_by_phase.items()})
        by_dtype.update({d: record.runs * n for d, n in record.flops_by_dtype.items()})
        if record.collective:
            by_kind[record.collective.kind] += record.runs * record.collective.bytes
    assert {p: by_phase[p] for p in PHASES} == {p: getattr(executed, p) for p in PHASES}
    assert by_phase["forward"] == executed.forward - executed.evaluation
    assert +by_dtype == Counter(executed.by_dtype)
    kinds: Counter[str] = Counter()
    for collective in executed.collectives:
        kinds[collective.kind] += collective.times * collective.bytes
    assert by_kind == kinds


SHAPES = """HloModule jit_f

%product (a: f32[1,8], b: f32[8,4]) -> f32[4] {
  %a = f32[1,8] parameter(0)
  %b = f32[8,4] parameter(1)
  %c = f32[8,4] broadcast(%a), dimensions={1}
  %m = f32[8,4] multiply(%c, %b), metadata={op_name="jit(f)/jvp(head)/dot_general"}
  %zero = f32[] constant(0)
  ROOT %s = f32[4] reduce(%m, %zero), dimensions={0}, to_apply=%add
}

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %z = f32[] add(%x, %y)
}

ENTRY %main (q: bf16[2,5,3], k: bf16[2,3,6,7], v: f32[1,8], w: f32[8,4]) -> (f32[8,4], f32[4]) {
  %q = bf16[2,5,3] parameter(0)
  %k = bf16[2,3,6,7] parameter(1)
  %v = f32[1,8] parameter(2)
  %w = f32[8,4] parameter(3)
  %d = bf16[2,5,6,7] dot(%q, %k), lhs_batch_dims={0}, rhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_contracting_dims={1}
  %e = bf16[2,210] bitcast(%d)
  %n = bf16[2,210] negate(%e)
  %call = bf16[2,210] custom-call(%n), custom_call_target="ask"
  %vector = f32[4] fusion(%v, %w), kind=kLoop, calls=%product
  ROOT %r = (f32[8,4], f32[4]) tuple(%w, %vector)
}
"""  # noqa: E501


def test_the_form_of_instructions() -> None:
    costs = instruction_costs(SHAPES)
    dot, negate = costs.records["d"].shape, costs.records["n"].shape
    assert dot.matmul == (2, 5, 6 * 7, 3)
    assert dot.results == (("bf16", (2, 5, 6, 7)),)
    assert dot.result_bytes == 2 * 2 * 5 * 6 * 7
    assert negate.is_elementwise
    assert not dot.is_elementwise
    assert negate.operands == ("d",)  # behind the bitcast
    assert costs.records["call"].shape.target == "ask"
    assert costs.state == {("f32", (8, 4))}


def test_matmuls_of_vector_units_are_vector_work() -> None:
    records = instruction_costs(SHAPES).records
    assert records["vector"].vector_matmuls == records["vector"].flops == 2 * 8 * 4
    assert records["vector"].is_vector
    assert records["n"].is_vector
    assert not records["d"].is_vector


def test_an_all_reduce_whose_result_is_sliced_is_a_reduce_scatter() -> None:
    """TPU programs write it so, in one fusion: the buffer goes round once, not twice."""
    fused = """HloModule m, num_partitions=8

%scatter (x: bf16[64,16]) -> bf16[64,2] {
  %x = bf16[64,16] parameter(0)
  %sum = bf16[64,16] all-reduce(%x), replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add
  %zero = u32[] constant(0)
  %id = u32[] partition-id()
  %two = u32[] constant(2)
  %at = u32[] multiply(%id, %two)
  ROOT %mine = bf16[64,2] dynamic-slice(%sum, %zero, %at), dynamic_slice_sizes={64,2}
}

ENTRY %main (x: bf16[64,16]) -> bf16[64,2] {
  %x = bf16[64,16] parameter(0)
  ROOT %f = bf16[64,2] fusion(%x), kind=kCustom, calls=%scatter
}
"""
    collective = instruction_costs(fused).records["f"].collective
    assert collective is not None
    assert (collective.kind, collective.bytes, collective.group_size) == ("reduce-scatter", 2048, 8)


STACKED = """HloModule jit_f, is_scheduled=true

%retile (p: bf16[80,4,128]) -> bf16[80,4,128] {
  %p = bf16[80,4,128]{2,1,0:T(16,128)(2,1)} parameter(0)
  ROOT %c = bf16[80,4,128]{2,1,0:T(8,128)(2,1)} copy(%p)
}

%slice (p: bf16[80,4,128], i: s32[]) -> bf16[1,4,128] {
  %p = bf16[80,4,128] parameter(0)
  %i = s32[] parameter(1)
  %z = s32[] constant(0)
  ROOT %s = bf16[1,4,128] dynamic-slice(%p, %i, %z, %z), dynamic_slice_sizes={1,4,128}
}

%read (p: bf16[80,4,128], i: s32[]) -> bf16[1,4,128] {
  %p = bf16[80,4,128]{2,1,0:T(16,128)(2,1)} parameter(0)
  %i = s32[] parameter(1)
  %t = bf16[80,4,128] fusion(%p), kind=kLoop, RENAMES, calls=%retile
  %s = bf16[1,4,128] fusion(%t, %i), kind=kLoop, calls=%slice
  ROOT %n = bf16[1,4,128] negate(%s)
}

%store (all: bf16[80,4,128], one: bf16[1,4,128], i: s32[]) -> bf16[80,4,128] {
  %all = bf16[80,4,128]{2,1,0:S(5)} parameter(0)
  %one = bf16[1,4,128] parameter(1)
  %i = s32[] parameter(2)
  ROOT %u = bf16[80,4,128]{2,1,0:S(5)} dynamic-update-slice(%all, %one, %i, %i, %i)
}

ENTRY %main (x: bf16[80,4,128], all: bf16[80,4,128], i: s32[]) -> bf16[80,4,128] {
  %x = bf16[80,4,128]{2,1,0:T(16,128)(2,1)} parameter(0)
  %all = bf16[80,4,128]{2,1,0:S(5)} parameter(1)
  %i = s32[] parameter(2)
  %one = bf16[1,4,128] fusion(%x, %i), kind=kLoop, calls=%read
  %start = STARTED async-start(%all, %one, %i), calls=%store
  ROOT %done = bf16[80,4,128]{2,1,0:S(5)} async-done(%start)
}
"""


_ALL = "bf16[80,4,128]{2,1,0:S(5)}"
STACKED = STACKED.replace("STARTED", f"(({_ALL}, bf16[1,4,128], s32[]), {_ALL}, u32[]{{:S(2)}})")
STACKED = STACKED.replace("RENAMES", "output_to_operand_aliasing={{}: (0, {})}")


def test_of_a_stack_in_another_tiling_only_the_slice_is_read():
    """4·128 values of 2 bytes, read and written, and the index."""
    one = instruction_costs(STACKED).records["one"]
    assert one.hbm_bytes == 2 * (4 * 128 * 2) + 4


def test_a_prefetch_of_a_slice_into_fast_memory_reads_the_slice():
    """1,024 of 65,536 bytes; the fast memory is not HBM."""
    text = """HloModule jit_f
ENTRY %main (x: s8[65536]) -> s8[1024] {
  %x = s8[65536]{0} parameter(0)
  %start = ((s8[65536]{0}), s8[1024]{0:S(1)}, s32[]{:S(2)}) slice-start(%x), slice={[0:1024]}
  ROOT %done = s8[1024]{0:S(1)} slice-done(%start)
}
"""
    assert instruction_costs(text).records["start"].hbm_bytes == 1024


def test_an_update_in_the_hosts_memory_sends_the_update_as_printed_with_its_computation():
    start = instruction_costs(STACKED).records["start"]
    assert (start.host_bytes, start.to_host) == (4 * 128 * 2, True)


@pytest.mark.parametrize("target", ["SliceId", "ZeroCrop"])
def test_what_programs_over_several_slices_ask_costs_no_flops(target):
    text = f"""HloModule jit_f
ENTRY %main (x: u32[]) -> u32[] {{
  %x = u32[] parameter(0)
  ROOT %c = u32[] custom-call(%x), custom_call_target="{target}"
}}
"""
    executed = instruction_costs(text).executed
    assert (executed.total, executed.unaccounted) == (0, ())


def _cache_fusion(root: str) -> str:
    """A fusion that writes a row of a cache in place, and what it makes of the result."""
    return f"""HloModule jit_f

%fused (all: f32[64,128], row: f32[1,128], i: s32[]) -> f32[64,128] {{
  %all = f32[64,128] parameter(0)
  %row = f32[1,128] parameter(1)
  %i = s32[] parameter(2)
  %z = s32[] constant(0)
  %u = f32[64,128] dynamic-update-slice(%all, %row, %i, %z)
  {root}
}}

ENTRY %main (all: f32[64,128], row: f32[1,128], i: s32[]) -> f32[64,128] {{
  %all = f32[64,128] parameter(0)
  %row = f32[1,128] parameter(1)
  %i = s32[] parameter(2)
  ROOT %f = f32[64,128] fusion(%all, %row, %i), kind=kLoop, calls=%fused
}}
"""


@pytest.mark.parametrize(
    ("root", "read", "written"),
    [
        ("ROOT %r = f32[64,128] bitcast(%u)", 0, 128 * 4),  # the rest stays where it is
        ("ROOT %n = f32[64,128] negate(%u)", 64 * 128 * 4, 64 * 128 * 4),
    ],
)
def test_an_updated_array_is_read_where_something_uses_it(
    root: str, read: int, written: int
) -> None:
    record = instruction_costs(_cache_fusion(root)).records["f"]
    assert record.hbm_bytes == read + written + 128 * 4 + 4  # the row, and its index
