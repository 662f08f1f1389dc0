"""The range of a prediction where a bandwidth is not known."""

import pytest

from mfu_jax.flops.executed.instruction_costs import instruction_costs
from mfu_jax.planning.step_time.durations import Durations, Efficiencies
from mfu_jax.planning.step_time.time_range import host_notes, time_range
from mfu_jax.planning.targets import parse_target

# 8 rows of 16 MB live in the host's memory; one is read.
ROWS = "f32[8,4000000]{1,0:T(8,128)S(5)}"
TEXT = f"""HloModule m
ENTRY %main (host: f32[8,4000000], i: s32[]) -> f32[1,4000000] {{
  %host = {ROWS} parameter(0)
  %i = s32[] parameter(1)
  %r = (({ROWS}, s32[], s32[]), f32[1,4000000], u32[]) dynamic-slice-start(%host, %i, %i)
  ROOT %rd = f32[1,4000000] dynamic-slice-done(%r)
}}
"""
SECONDS = 16e6 / 16e9


def _range(topology, residuals):
    durations = Durations(
        target=parse_target(topology=topology), efficiencies=Efficiencies(host=1.0)
    )
    costs = instruction_costs(TEXT)
    return time_range(costs, durations, seconds=SECONDS, bound=1e-9, residuals=residuals)


@pytest.mark.parametrize(
    ("topology", "words"),
    [
        ("v5p-8", "16 GB/s are taken, and up to 32"),
        ("tpu7x:2x2x1", "32 GB/s are taken, and up to 64"),  # of a v6e, the generation before
    ],
)
def test_an_unknown_bandwidth_to_the_host_may_be_twice_what_is_taken(topology, words):
    assert _range(topology, (0.9, 1.2))[1] == pytest.approx(1.2 * SECONDS)
    taken = 16e6 / float(words.split()[0]) / 1e9
    assert _range(topology, (0.9, 1.2))[0] == pytest.approx(0.9 * (SECONDS - taken / 2))
    (note,) = host_notes(instruction_costs(TEXT), parse_target(topology=topology))
    assert words in note


def test_a_known_one_is_not():
    assert _range("v6e-8", (0.9, 1.2)) == pytest.approx((0.9 * SECONDS, 1.2 * SECONDS))
    assert not host_notes(instruction_costs(TEXT), parse_target(topology="v6e-8"))


def test_without_compared_runs_a_tpu_has_no_range():
    assert _range("v6e-8", None) is None
