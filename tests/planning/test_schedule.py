"""The walk of a schedule: small programs whose times are arithmetic.

v5e: 1.5 GHz, 197e12 FLOP/s, 819e9 bytes/s, 45e9 bytes/s a link; a slice of 2x4 has no rings.
"""

import pytest

from mfu_jax.flops.executed.instruction_costs import instruction_costs
from mfu_jax.planning.durations import Durations, Efficiencies
from mfu_jax.planning.schedule import timeline
from mfu_jax.planning.targets import parse_target

PERFECT = Efficiencies(kernel=1.0, matmul=1.0, hbm=1.0, link=1.0, host=1.0, cycles=1.0)
TARGET = parse_target(topology="v5e:2x4")
MEGABYTES = 45_000_000  # 11,250,000 float32: 1 ms on a link
PERMUTE = MEGABYTES / 45e9 + 1e-6
MILLISECOND = 1_500_000  # cycles


def _cycles(number):
    return f'backend_config={{"window_config":{{"estimated_cycles":"{number}"}}}}'


def _fusion(name, operand, cycles):
    return f"  %{name} = f32[8] fusion(%{operand}), kind=kLoop, calls=%add, {_cycles(cycles)}"


_HEAD = """HloModule m, num_partitions=8
%add (p: f32[8]) -> f32[8] {
  %p = f32[8] parameter(0)
  ROOT %sum = f32[8] add(%p, %p)
}
"""
_PAIRS = "source_target_pairs={{0,1},{1,0}}"


def _time(text):
    return timeline(instruction_costs(text), Durations(target=TARGET, efficiencies=PERFECT))


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


def test_instructions_follow_each_other_at_xlas_cycles():
    line = _time(_entry(_fusion("a", "x", MILLISECOND), _fusion("b", "a", MILLISECOND), _root("b")))
    assert line.seconds == pytest.approx(2e-3)
    assert line.by_cause == {"vector": pytest.approx(2e-3)}


def test_what_stands_between_start_and_done_hides_the_transfer():
    line = _time(_entry(_START, _fusion("a", "x", 2 * MILLISECOND), _DONE, _root("a")))
    assert line.seconds == pytest.approx(2e-3)
    assert line.transfers["collective-permute on ici"] == pytest.approx(PERMUTE)
    assert "collective-permute on ici" not in line.by_cause


def test_the_rest_of_a_transfer_is_exposed():
    line = _time(_entry(_START, _fusion("a", "x", MILLISECOND // 4), _DONE, _root("a")))
    assert line.seconds == pytest.approx(PERMUTE)
    assert line.by_cause["collective-permute on ici"] == pytest.approx(PERMUTE - 0.25e-3)


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
