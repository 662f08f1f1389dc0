"""The picture of one layer: spans whose times are arithmetic, and the walk's own total.

v5e: 45e9 bytes/s a link: 45 MB take 1 ms and a hop of 1 µs.
"""

import pytest

from mfu_jax.flops.executed.instruction_costs import instruction_costs
from mfu_jax.planning.step_time.durations import Durations, Efficiencies
from mfu_jax.planning.step_time.layer_timeline import largest_layer
from mfu_jax.planning.step_time.schedule import predicted_time
from mfu_jax.planning.targets import parse_target
from tests.support.told_work import with_work

PERFECT = Efficiencies(ici=1.0)
TEXT = with_work("""HloModule m, num_partitions=8
ENTRY %main (x: f32[8], big: f32[11250000]) -> f32[8] {
  %x = f32[8] parameter(0)
  %big = f32[11250000] parameter(1)
  %s = (f32[11250000], f32[11250000], u32[], u32[]) collective-permute-start(%big), \
channel_id=1, source_target_pairs={{0,1},{1,0}}
  %a = f32[8] fusion(%x), kind=kLoop, calls=%work_500
  %d = f32[11250000] collective-permute-done(%s)
  %b = f32[8] fusion(%a), kind=kLoop, calls=%work_1000
  ROOT %r = f32[8] bitcast(%b)
}
""")


def _layer(text):
    durations = Durations(target=parse_target(topology="v5e:2x4"), efficiencies=PERFECT)
    costs = instruction_costs(text)
    return largest_layer(costs, durations), predicted_time(costs, durations)


def test_a_transfer_beside_work_and_the_wait_for_its_rest():
    layer, line = _layer(TEXT)
    assert layer.runs == 1
    assert layer.seconds == pytest.approx(line.seconds) == pytest.approx(2.001e-3)
    slot = layer.seconds / 240
    spans = [(s.lane, s.cause, s.start, s.end) for s in layer.spans]
    expected = [
        ("units", "vector", 0, 0.5e-3),
        ("units", "waits", 0.5e-3, 1.001e-3),
        ("units", "vector", 1.001e-3, 2.001e-3),
        ("ici 1 up", "collective-permute on ici", 0, 1.001e-3),
    ]
    assert [span[:2] for span in spans] == [span[:2] for span in expected]
    for (*_, start, end), (*_, right_start, right_end) in zip(spans, expected, strict=True):
        assert start == pytest.approx(right_start, abs=slot)
        assert end == pytest.approx(right_end, abs=slot)
    assert layer.lanes == ("units", "ici 1 up")


def test_a_program_that_takes_no_time_has_no_picture():
    text = "HloModule m\nENTRY %main (x: f32[8]) -> f32[8] {\n  ROOT %x = f32[8] parameter(0)\n}\n"
    assert _layer(text)[0] is None
