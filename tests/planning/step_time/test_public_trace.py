"""The walk of a schedule against a public trace: four TPU v6e that wait for the host's memory.

The bandwidth to the host is measured on this trace; that its copies go one after the other in each
direction, both directions at once, and hide behind nothing else, is the walk's.
"""

from __future__ import annotations

import lzma
from pathlib import Path

import pytest

from mfu_jax.flops.executed.instruction_costs import instruction_costs
from mfu_jax.planning.step_time.durations import Durations, Efficiencies
from mfu_jax.planning.step_time.schedule import predicted_time
from mfu_jax.planning.step_time.time_range import bounds
from mfu_jax.planning.targets import parse_target
from mfu_jax.profiling.join.programs import protos_of, text_of
from mfu_jax.profiling.trace.xspace import Trace

FILE = Path(__file__).parents[2] / "data" / "xprof_tpu_v6e.xplane.pb.xz"
STEP_SECONDS = 0.784136  # mean of 99 steps: the sum of xprof's averages of its ops
ARRAY = 5 * 1024 * 1024 * 256 * 4  # bytes; three go down, three go up


ADDITIONS = (8.155268534375, 7.976456, 7.918009646875)  # ms, the mean of 400: xprof's HLO stats


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tpu") / "host.xplane.pb"
    path.write_bytes(lzma.decompress(FILE.read_bytes()))
    protos = protos_of(Trace(path))
    (module,) = (proto for program, proto in protos.items() if program.module == "jit_f")
    return text_of(module)


def test_offloaded_arrays_take_the_time_that_they_took(text: str) -> None:
    costs, target = instruction_costs(text), parse_target(topology="v6e:2x2")
    line = predicted_time(costs, Durations(target=target, efficiencies=Efficiencies()))
    assert line.seconds == pytest.approx(STEP_SECONDS, rel=0.05)
    least = bounds(costs, target, None)
    assert least["host"] == pytest.approx(3 * ARRAY / 32e9)
    assert max(least.values()) < STEP_SECONDS


def test_additions_take_the_time_that_they_took(text: str) -> None:
    costs, target = instruction_costs(text), parse_target(topology="v6e:2x2")
    line = predicted_time(costs, Durations(target=target, efficiencies=Efficiencies()))
    assert line.by_cause["vector"] == pytest.approx(sum(ADDITIONS) / 1e3, rel=0.02)
