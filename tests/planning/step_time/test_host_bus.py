"""Copies that share the bus to the host: the one that is waited for first goes first."""

import pytest

from mfu_jax.flops.executed.instruction_costs import instruction_costs
from mfu_jax.planning.step_time.durations import Durations, Efficiencies
from mfu_jax.planning.step_time.schedule import HostBus, Interval, predicted_time
from mfu_jax.planning.targets import parse_target
from tests.support.told_work import with_work

TARGET = parse_target(topology="v5e:2x4")  # 16 GB/s to the host are taken


def carried(start, end):
    return Interval(("host up",), "host", start, end)


def test_a_short_copy_that_is_waited_for_passes_a_long_one():
    bus = HostBus(lane="host up")
    bus.begin("long", "host", 10.0, waited_for=9)
    assert list(bus.serve(2.0)) == [carried(0.0, 2.0)]
    bus.begin("short", "host", 1.0, waited_for=3)
    assert list(bus.finish("short")) == [carried(2.0, 3.0)]
    assert list(bus.serve(5.0)) == [carried(3.0, 5.0)]
    assert list(bus.finish("long")) == [carried(5.0, 11.0)]
    assert (bus.now, bus.left) == (11.0, {})


def test_an_idle_bus_saves_no_time_for_later():
    bus = HostBus(lane="host up")
    assert list(bus.serve(4.0)) == []
    bus.begin("copy", "host", 1.0, waited_for=0)
    assert list(bus.finish("copy")) == [carried(4.0, 5.0)]


def _write(name, rows):
    return (
        f"  %{name} = ((f32[8,{rows}]{{1,0:T(8,128)S(5)}}, f32[1,{rows}], s32[], s32[]), "
        f"f32[8,{rows}]{{1,0:T(8,128)S(5)}}, u32[]) "
        f"dynamic-update-slice-start(%host_{rows}, %row_{rows}, %i, %i)"
    )


def _done(name, rows, root=""):
    of = f"dynamic-update-slice-done(%{name})"
    return f"  {root}%{name}_done = f32[8,{rows}]{{1,0:T(8,128)S(5)}} {of}"


LONG, SHORT = 8_000_000, 4_000_000  # float32: 2 ms and 1 ms


@pytest.mark.parametrize(
    ("work", "milliseconds"),
    # The short one is done after 1 ms, the long one after both, or after the work between them.
    [(0.5, 1.0 + 2.0), (2.0, 2.0 + 1.0), (3.5, 3.5)],
)
def test_the_program_waits_for_the_short_copy_only(work, milliseconds):
    """A long copy starts, then a short one; work; the short one's end, then the long one's."""
    arguments = ", ".join(
        [f"host_{n}: f32[8,{n}], row_{n}: f32[1,{n}]" for n in (LONG, SHORT)]
        + ["i: s32[], x: f32[8]"]
    )
    parameters = "\n".join(
        f"  %host_{n} = f32[8,{n}]{{1,0:T(8,128)S(5)}} parameter({place})\n"
        f"  %row_{n} = f32[1,{n}] parameter({place + 1})"
        for n, place in ((LONG, 0), (SHORT, 2))
    )
    text = f"""HloModule m, num_partitions=8
ENTRY %main ({arguments}) -> f32[8,{LONG}] {{
{parameters}
  %i = s32[] parameter(4)
  %x = f32[8] parameter(5)
{_write("a", LONG)}
{_write("b", SHORT)}
  %work = f32[8] fusion(%x), kind=kLoop, calls=%work_{round(work * 1000)}
{_done("b", SHORT)}
{_done("a", LONG, "ROOT ")}
}}
"""
    costs = instruction_costs(with_work(text))
    perfect = Efficiencies(host=1.0, hbm=1.0)
    line = predicted_time(costs, Durations(target=TARGET, efficiencies=perfect))
    assert line.seconds == pytest.approx(milliseconds * 1e-3, rel=1e-6)
    assert line.transfers["host"] == pytest.approx(3e-3)
