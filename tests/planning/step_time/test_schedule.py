"""The walk of a schedule: small programs whose times are arithmetic.

v5e: 1.5 GHz, 197e12 FLOP/s, 819e9 bytes/s, 45e9 bytes/s a link; a slice of 2x4 has no rings.
"""

import dataclasses
import itertools

import pytest

from mfu_jax.flops.executed.instruction_costs import instruction_costs
from mfu_jax.planning.step_time.durations import Durations, Efficiencies
from mfu_jax.planning.step_time.schedule import BUBBLE, PipelineTicks, predicted_time
from mfu_jax.planning.step_time.time_range import bounds
from mfu_jax.planning.targets import parse_target
from tests.support.told_work import START, with_work

PERFECT = Efficiencies(**{share.name: 1.0 for share in dataclasses.fields(Efficiencies)})
TARGET = parse_target(topology="v5e:2x4")
MEGABYTES = 45_000_000  # 11,250,000 float32: 1 ms on a link
PERMUTE = MEGABYTES / 45e9 + 1e-6
MILLISECOND = 1000  # microseconds


def _fusion(name, operand, microseconds):
    return f"  %{name} = f32[8] fusion(%{operand}), kind=kLoop, calls=%work_{microseconds}"


_HEAD = """HloModule m, num_partitions=8
%add (p: f32[8]) -> f32[8] {
  %p = f32[8] parameter(0)
  ROOT %sum = f32[8] add(%p, %p)
}
"""
_PAIRS = "source_target_pairs={{0,1},{1,0}}"


def _time(text, target=TARGET):
    costs = instruction_costs(with_work(text))
    return predicted_time(costs, Durations(target=target, efficiencies=PERFECT))


def _entry(*lines):
    body = "\n".join(lines)
    return (
        f"{_HEAD}ENTRY %main (x: f32[8], big: f32[11250000]) -> f32[8] {{\n"
        "  %x = f32[8] parameter(0)\n  %big = f32[11250000] parameter(1)\n"
        f"{body}\n}}\n"
    )


_START = (
    "  %s = (f32[11250000], f32[11250000], u32[], u32[]) "
    f"collective-permute-start(%big), channel_id=1, {_PAIRS}"
)
_DONE = "  %d = f32[11250000] collective-permute-done(%s)"


def test_instructions_follow_each_other():
    line = _time(_entry(_fusion("a", "x", MILLISECOND), _fusion("b", "a", MILLISECOND), _root("b")))
    assert line.seconds == pytest.approx(2e-3)
    assert line.by_cause == {"vector": pytest.approx(2e-3)}


@pytest.mark.parametrize(
    ("groups", "cause"),
    [
        ("{0,1},{2,3},{4,5},{6,7}", "all-reduce over tensor on ici"),
        ("{0,2,4,6},{1,3,5,7}", "all-reduce over fsdp on ici"),
        ("{0,1,2,3,4,5,6,7}", "all-reduce over fsdp+tensor on ici"),
        ("{0,3},{1,2},{4,7},{5,6}", "all-reduce on ici"),  # along no axis
    ],
)
def test_a_collective_is_that_of_its_mesh_axes(groups, cause):
    how = "channel_id=1, use_global_device_ids=true, to_apply=%add"
    reduce = f"  %sum8 = f32[8] all-reduce(%x), replica_groups={{{groups}}}, {how}"
    costs = instruction_costs(_entry(reduce, _root("sum8")))
    mesh = {"data": 1, "fsdp": 4, "tensor": 2}
    line = predicted_time(costs, Durations(target=TARGET, efficiencies=PERFECT, mesh=mesh))
    assert [name for name in line.by_cause if name.startswith("all-reduce")] == [cause]


def test_what_layers_do_in_idle_turns_is_the_bubble():
    """Six runs of 1 ms in three turns, of which one is idle; as often 1 ms that is no layer's."""

    def loop(n, scope):
        metadata = f'metadata={{op_name="jit(step)/{scope}/mul"}}'
        return f"""%{n} (s{n}: (s32[], f32[8])) -> (s32[], f32[8]) {{
  %s{n} = (s32[], f32[8]) parameter(0)
  %i{n} = s32[] get-tuple-element(%s{n}), index=0
  %one{n} = s32[] constant(1)
  %next{n} = s32[] add(%i{n}, %one{n})
  %v{n} = f32[8] get-tuple-element(%s{n}), index=1
{_fusion(f"w{n}", f"v{n}", MILLISECOND)}, {metadata}
  ROOT %t{n} = (s32[], f32[8]) tuple(%next{n}, %w{n})
}}
"""

    condition = """%less (s: (s32[], f32[8])) -> pred[] {
  %s = (s32[], f32[8]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %n = s32[] constant(6)
  ROOT %l = pred[] compare(%i, %n), direction=LT
}
"""
    lines = [
        "  %zero = s32[] constant(0)",
        "  %a = (s32[], f32[8]) tuple(%zero, %x)",
        "  %b = (s32[], f32[8]) while(%a), condition=%less, body=%layer",
        "  %y = f32[8] get-tuple-element(%b), index=1",
        "  %c = (s32[], f32[8]) tuple(%zero, %y)",
        "  %d = (s32[], f32[8]) while(%c), condition=%less, body=%head",
        "  ROOT %z = f32[8] get-tuple-element(%d), index=1",
    ]
    bodies = loop("layer", "jvp(decoder)/layers/mlp") + loop("head", "jvp(decoder)/logits_dense")
    text = _entry(*lines).replace("ENTRY", f"{condition}{bodies}ENTRY")
    durations = Durations(target=TARGET, efficiencies=PERFECT)
    costs = instruction_costs(with_work(text))
    line = predicted_time(costs, durations, PipelineTicks(total=3, idle=1))
    assert line.by_cause[BUBBLE] == pytest.approx(2e-3, rel=1e-3)
    assert line.by_cause["vector"] == pytest.approx(10e-3, rel=1e-3)
    assert line.seconds == predicted_time(costs, durations).seconds


def test_what_stands_between_start_and_done_hides_the_transfer():
    line = _time(_entry(_START, _fusion("a", "x", 2 * MILLISECOND), _DONE, _root("a")))
    assert line.seconds == pytest.approx(2e-3)
    assert line.transfers["collective-permute on ici"] == pytest.approx(PERMUTE)
    assert "collective-permute on ici" not in line.by_cause  # hidden


def test_the_rest_of_a_transfer_is_exposed():
    line = _time(_entry(_START, _fusion("a", "x", MILLISECOND // 4), _DONE, _root("a")))
    assert line.seconds == pytest.approx(PERMUTE)
    assert line.by_cause["collective-permute on ici"] == pytest.approx(PERMUTE - 0.25e-3)


@pytest.mark.parametrize(
    ("trips", "exposed"), [(2, PERMUTE - 2 * 0.25e-3), (8, 0.0)], ids=["a part", "all"]
)
def test_a_loop_between_start_and_done_hides_the_transfer_as_long_as_it_runs(trips, exposed):
    count = f'backend_config={{"known_trip_count":{{"n":"{trips}"}}}}'
    text = f"""{_HEAD}%body (b: f32[8]) -> f32[8] {{
  %b = f32[8] parameter(0)
  ROOT{_fusion("a", "b", MILLISECOND // 4)[1:]}
}}
%cond (c: f32[8]) -> pred[] {{
  %c = f32[8] parameter(0)
  ROOT %t = pred[] constant(true)
}}
ENTRY %main (x: f32[8], big: f32[11250000]) -> f32[8] {{
  %x = f32[8] parameter(0)
  %big = f32[11250000] parameter(1)
{_START}
  %w = f32[8] while(%x), condition=%cond, body=%body, {count}
{_DONE}
{_root("w")}
}}
"""
    line = _time(text)
    assert line.by_cause["vector"] == pytest.approx(trips * 0.25e-3)
    assert line.by_cause.get("collective-permute on ici", 0.0) == pytest.approx(exposed)


def _permute(name, pairs):
    types = "(f32[11250000], f32[11250000], u32[], u32[])"
    start = f"  %{name} = {types} collective-permute-start(%big), channel_id=1, {pairs}"
    return start, f"  %{name}d = f32[11250000] collective-permute-done(%{name})"


def test_both_directions_of_an_axis_go_at_once():
    up, up_done = _permute("u", "source_target_pairs={{0,1},{1,2},{2,3},{3,0}}")
    down, down_done = _permute("d", "source_target_pairs={{1,0},{2,1},{3,2},{0,3}}")
    line = _time(_entry(up, down, up_done, down_done, _root("x")))
    assert line.seconds == pytest.approx(PERMUTE)
    line = _time(
        _entry(
            up, down.replace("{{1,0},{2,1},{3,2},{0,3}}", "{{0,1}}"), up_done, down_done, _root("x")
        )
    )
    assert line.seconds == pytest.approx(2 * PERMUTE)


def test_the_bus_to_the_host_has_two_directions():
    """8 rows of 64 million bytes live in the host's memory: one is written, one read."""
    rows = "f32[8,4000000]{1,0:T(8,128)S(5)}"
    write = (
        f"  %w = (({rows}, f32[1,4000000], s32[], s32[]), {rows}, u32[]) "
        "dynamic-update-slice-start(%host, %row, %i, %i)"
    )
    read = (
        f"  %r = (({rows}, s32[], s32[]), f32[1,4000000], u32[]) "
        "dynamic-slice-start(%host, %i, %i), dynamic_slice_sizes={1,4000000}"
    )
    arguments = "host: f32[8,4000000], row: f32[1,4000000], i: s32[]"
    text = f"""{_HEAD}ENTRY %main ({arguments}) -> f32[1,4000000] {{
  %host = {rows} parameter(0)
  %row = f32[1,4000000] parameter(1)
  %i = s32[] parameter(2)
{write}
{read}
  %wd = {rows} dynamic-update-slice-done(%w)
  ROOT %rd = f32[1,4000000] dynamic-slice-done(%r)
}}
"""
    line = _time(text)
    assert line.seconds == pytest.approx(16e6 / 16e9)
    assert line.transfers["host"] == pytest.approx(2 * 16e6 / 16e9)


_MEGASCALE = (
    "is_host_transfer=true, "
    'frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime"}'
)


def test_messages_between_slices_take_the_network_and_can_be_hidden():
    """v5e: 3.125e9 bytes/s a chip. 45 MB each way at once, beside 10 ms of work."""
    text = _entry(
        "  %t = token[] after-all()",
        f"  %s = (f32[11250000], u32[], token[]) send(%big, %t), channel_id=1, {_MEGASCALE}",
        f"  %v = (f32[11250000], u32[], token[]) recv(%t), channel_id=2, {_MEGASCALE}",
        _fusion("a", "x", 10 * MILLISECOND),
        "  %sd = token[] send-done(%s), channel_id=1",
        "  %vd = (f32[11250000], token[]) recv-done(%v), channel_id=2",
        _root("a"),
    )
    message = MEGABYTES / 3.125e9
    line = _time(text, parse_target(topology="v5e:2x4", slices=2))
    assert line.seconds == pytest.approx(message, rel=1e-6)
    assert line.by_cause["vector"] == pytest.approx(10e-3)
    assert line.transfers["send on dcn"] == pytest.approx(message, rel=1e-6)
    assert line.transfers["recv on dcn"] == pytest.approx(message, rel=1e-6)
    costs = instruction_costs(with_work(text))
    assert bounds(costs, parse_target(topology="v5e:2x4", slices=2), None)["dcn"] == pytest.approx(
        message, rel=1e-6
    )
    assert "send on dcn" not in _time(text).transfers  # one slice: a message to the host


def test_collectives_on_gpus_take_nccls_time():
    """A ring of eight: 14 µs and 7 steps of 1.9 µs at 0.92 of the link (450e9 bytes/s)."""
    gather = (
        "  %g = f32[11250000] all-gather(%x), replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}"
    )
    line = _time(_entry(gather, _root("x")), parse_target(hardware="h100", devices=8))
    moved = MEGABYTES * 7 / 8 / 450e9
    assert line.transfers["all-gather on nvlink"] == pytest.approx(
        min(14e-6 + 7 * 1.9e-6 + moved / 0.92, 8.4e-6 + 7 * 3.4e-6 + moved)
    )


def test_a_bare_operation_takes_the_time_of_its_bytes():
    add = "  %a = f32[11250000] add(%big, %big)"
    line = _time(_entry(add, _root("x")))
    assert line.seconds == pytest.approx(START + 3 * MEGABYTES / 819e9)


TILES = "T(8,128)(2,1)"


@pytest.mark.parametrize(
    ("layout", "share"),
    [
        (f"3,2,0,1:{TILES}", 0.81),
        (f"3,2,0,1:{TILES}S(1)", 0.81 * 2),  # half of the bytes are in HBM
        (f"2,3,1,0:{TILES}", 0.4),
        ("3,2,0,1:T(4,128)(2,1)", 0.4),
    ],
)
def test_a_copy_of_whole_tiles_takes_the_time_of_an_addition(layout, share):
    """XLA gives f32[8,4,2,1280,6144] on a v6e 5,318,208 cycles for x + 1 and for such a copy."""
    dims = "bf16[8,4,1280,6144]"
    text = f"""HloModule m
ENTRY %main (x: {dims}) -> {dims} {{
  %x = {dims}{{3,2,1,0:{TILES}}} parameter(0)
  ROOT %c = {dims}{{{layout}}} copy(%x)
}}
"""
    durations = Durations(target=TARGET, efficiencies=Efficiencies())
    moved = 2 * 2 * 8 * 4 * 1280 * 6144
    line = predicted_time(instruction_costs(text), durations)
    assert line.seconds == pytest.approx(START + moved / 819e9 / share)


@pytest.mark.parametrize(("shape", "cycles"), [("f32[8]", 2120), ("f32[]", 0)])
def test_an_instruction_on_arrays_takes_some_time_however_small(shape, cycles):
    """2120 cycles at 1.75 GHz are XLA's for the smallest fusions on a v6e; scalars have none."""
    text = f"""HloModule m
ENTRY %main (x: {shape}) -> {shape} {{
  %x = {shape} parameter(0)
  ROOT %n = {shape} negate(%x)
}}
"""
    line = _time(text, parse_target(topology="v6e-1"))
    assert line.seconds == pytest.approx(cycles / 1.75e9, rel=0.02, abs=1e-9)


def _sort(arrays, dims, dimension):
    """The seconds of a sort of some arrays by the first of them on a TPU7x, at p-state 7."""
    shape, names = f"s32[{dims}]", [f"x{n}" for n in range(arrays)]
    compared = ", ".join(f"{name}.{side}: s32[]" for name in names for side in "ab")
    parameters = "\n".join(f"  %{name} = {shape} parameter({n})" for n, name in enumerate(names))
    operands, results = ", ".join(f"%{name}" for name in names), ", ".join([shape] * arrays)
    text = f"""HloModule m
%less ({compared}) -> pred[] {{
  %x0.a = s32[] parameter(0)
  %x0.b = s32[] parameter(1)
  ROOT %c = pred[] compare(%x0.a, %x0.b), direction=LT
}}
ENTRY %main ({", ".join(f"{name}: {shape}" for name in names)}) -> ({results}) {{
{parameters}
  ROOT %s = ({results}) sort({operands}), dimensions={{{dimension}}}, to_apply=%less
}}
"""
    return _time(text, parse_target(topology="tpu7x:2x2x1")).seconds


def test_sorts_take_the_time_that_they_took():
    """161 ms of a step of Hy3-295B at p-state 7: 79 expert layers, with the sorts of MaxText's."""
    rows, experts = 7 * 4096 * 8, "7,4096,192"
    layer = 2 * _sort(3, rows, 0) + 3 * _sort(2, rows, 0) + 2 * _sort(1, experts, 2)
    assert 79 * layer == pytest.approx(0.161, rel=0.02)


def test_what_only_orders_instructions_takes_no_time():
    order = (
        "  %t = token[] after-all()",
        "  %a = f32[11250000] add-dependency(%big, %t)",
        "  %o = f32[11250000] opt-barrier(%a)",
    )
    assert _time(_entry(*order, _root("x"))).seconds == _time(_entry(_root("x"))).seconds


def test_xlas_cycles_are_not_read():
    text = """HloModule m
%matmul (a: bf16[1000,1000], b: bf16[1000,1000]) -> bf16[1000,1000] {
  %a = bf16[1000,1000] parameter(0)
  %b = bf16[1000,1000] parameter(1)
  ROOT %d = bf16[1000,1000] dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
ENTRY %main (a: bf16[1000,1000], b: bf16[1000,1000]) -> bf16[1000,1000] {
  %a = bf16[1000,1000] parameter(0)
  %b = bf16[1000,1000] parameter(1)
  ROOT %f = bf16[1000,1000] fusion(%a, %b), kind=kOutput, calls=%matmul, CYCLES
}
""".replace("CYCLES", 'backend_config={"window_config":{"estimated_cycles":"1"}}')
    assert _time(text).by_cause == {"matmul": pytest.approx(START + 2e9 / 197e12)}


def test_many_elementwise_operations_take_a_tpus_vector_units():
    """The scaling book's 1.4e13 a second of a v5p; the bytes would take a quarter of the time."""
    size, operations = "f32[11250000]", 200
    names = [f"%o{n}" for n in range(operations)]
    chain = (f"  {new} = {size} xor({old}, {old})" for old, new in itertools.pairwise(names))
    body = "\n".join(chain)
    text = f"""HloModule m
%bits (p: {size}) -> {size} {{
  %o0 = {size} parameter(0)
{body}
  ROOT %last = {size} xor({names[-1]}, {names[-1]})
}}
ENTRY %main (big: {size}) -> {size} {{
  %big = {size} parameter(0)
  ROOT %f = {size} fusion(%big), kind=kLoop, calls=%bits
}}
"""
    line = _time(text, parse_target(topology="v5p:2x2x1"))
    assert line.by_cause == {"vector": pytest.approx(operations * 11_250_000 / 1.4e13, rel=0.03)}


def test_transcendental_functions_take_a_tpus_vector_units_too():
    """1.52 ms by XLA's own cycles on a v5p: 64 times tanh(x) + exp(-x) of 2^26 numbers."""
    size = "f32[64,1024,1024]"
    rounds = "\n".join(
        f"  %t{n} = {size} tanh(%s{n})\n  %m{n} = {size} negate(%s{n})\n"
        f"  %e{n} = {size} exponential(%m{n})\n  %s{n + 1} = {size} add(%t{n}, %e{n})"
        for n in range(64)
    )
    text = f"""HloModule m
%rounds (p: {size}) -> {size} {{
  %s0 = {size} parameter(0)
{rounds}
  ROOT %last = {size} copy(%s64)
}}
ENTRY %main (x: {size}) -> {size} {{
  %x = {size} parameter(0)
  ROOT %f = {size} fusion(%x), kind=kLoop, calls=%rounds
}}
"""
    line = _time(text, parse_target(topology="v5p:2x2x1"))
    assert line.seconds == pytest.approx(1.516e-3, rel=0.25)


def test_a_synchronous_collective_is_exposed():
    permute = f"  %c = f32[11250000] collective-permute(%big), channel_id=1, {_PAIRS}"
    line = _time(_entry(permute, _fusion("a", "x", MILLISECOND), _root("a")))
    assert line.seconds == pytest.approx(PERMUTE + 1e-3)


def test_a_loops_body_runs_as_often_as_it_trips():
    text = f"""{_HEAD}%body (t: (s32[], f32[8])) -> (s32[], f32[8]) {{
  %t = (s32[], f32[8]) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %y = f32[8] get-tuple-element(%t), index=1
{_fusion("a", "y", MILLISECOND)}
  ROOT %out = (s32[], f32[8]) tuple(%next, %a)
}}
%condition (t: (s32[], f32[8])) -> pred[] {{
  %t = (s32[], f32[8]) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %seven = s32[] constant(7)
  ROOT %less = pred[] compare(%i, %seven), direction=LT
}}
ENTRY %main (x: f32[8]) -> (s32[], f32[8]) {{
  %x = f32[8] parameter(0)
  %zero = s32[] constant(0)
  %start = (s32[], f32[8]) tuple(%zero, %x)
  ROOT %loop = (s32[], f32[8]) while(%start), condition=%condition, body=%body
}}
"""
    line = _time(text)
    assert line.by_cause["vector"] == pytest.approx(7e-3, rel=1e-2)  # and the counter's additions


def _root(operand):
    return f"  ROOT %r = f32[8] bitcast(%{operand})"


def test_float32_in_six_passes_takes_six_at_the_peak():
    text = """HloModule m
ENTRY %main (x: f32[512,512], y: f32[512,512]) -> f32[512,512] {
  %x = f32[512,512]{1,0:T(8,128)} parameter(0)
  %y = f32[512,512]{1,0:T(8,128)} parameter(1)
  ROOT %d = f32[512,512]{1,0:T(8,128)} convolution(%x, %y), dim_labels=bf_io->bf, \
operand_precision={highest,highest}
}"""
    assert _time(text).seconds == pytest.approx(START + 6 * 2 * 512**3 / 197e12)


def test_a_wait_for_the_link_belongs_to_what_occupies_it():
    """A permutation of 1 ms has begun when another kind wants its lane at once: 1 ms for each."""
    done = _DONE.replace("%d", "%done")
    gather = (
        "  %g = f32[11250000] all-gather(%x), channel_id=2, use_global_device_ids=true, "
        "replica_groups={{0,1},{2,3},{4,5},{6,7}}, dimensions={0}"
    )
    line = _time(_entry(_START, gather, done, _root("x")))
    kinds = ("collective-permute on ici", "all-gather on ici")
    for kind in kinds:
        assert line.by_cause[kind] == pytest.approx(line.transfers[kind])
    assert line.seconds == pytest.approx(sum(line.transfers[kind] for kind in kinds))
