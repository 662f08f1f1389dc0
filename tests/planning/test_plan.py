"""A plan of the recorded Llama-3-70B step on 512 v5p: sums that an independent reading gives."""

import lzma
import re

import pytest

from mfu_jax.dumps.program import ProgramDump
from mfu_jax.planning.compiling import TooLarge
from mfu_jax.planning.plan import Work, make_plan, refused
from mfu_jax.planning.targets import parse_target
from tests.support.paths import RECORDED

TARGET = parse_target(topology="v5p:8x8x8")
LAYERS = 80
EXECUTED = 9_134_399_006_179_328  # by hand in tests/flops/executed/test_recorded_programs.py
MODEL = 7_360_126_541_365_248
TOKENS = 16_384


@pytest.fixture(scope="module")
def text():
    return lzma.decompress((RECORDED / "v5p_llama70b.hlo.xz").read_bytes()).decode()


@pytest.fixture(scope="module")
def plan(text):
    work = Work(model_flops=MODEL, tokens=TOKENS, convention="exact")
    memory = {"peak_memory_in_bytes": 60 * 2**30, "argument_size_in_bytes": 2**30}
    return make_plan(ProgramDump(text=text, memory=memory), TARGET, work=work)


def test_the_bound_is_the_matmuls_at_their_peak(plan):
    assert plan.step_time_bound_seconds == pytest.approx(EXECUTED / 459e12)
    assert plan.mfu_ceiling == pytest.approx(MODEL / EXECUTED)


def test_xlas_cycles_are_counted_once_for_each_trip(plan, text):
    """Cycles of fusions and copies by a regular expression; the two loops run 80 times.

    Matmuls are no faster than their peak, and few other instructions have any time.
    """
    bodies = re.findall(r" while\(.*body=%([\w.]+)", text)
    cycles = 0
    for computation in re.split(r"\n\n", text):
        found = re.findall(r' (?:fusion|copy)\(.*"estimated_cycles":"(\d+)"', computation)
        in_loop = computation.strip().startswith(tuple(f"%{body} " for body in bodies))
        cycles += sum(map(int, found)) * (LAYERS if in_loop else 1)
    assert len(bodies) == 2
    scheduled = sum(plan.time_by_cause[cause] for cause in ("matmul", "vector", "copy"))
    assert scheduled == pytest.approx(cycles / 1.75e9, rel=0.02)


def test_the_parts_of_the_prediction_sum_to_it(plan):
    assert sum(plan.time_by_cause.values()) == pytest.approx(plan.step_time_seconds)
    assert plan.step_time_seconds >= plan.step_time_bound_seconds


def test_rates_follow_from_the_time(plan):
    assert plan.mfu == pytest.approx(MODEL / 459e12 / plan.step_time_seconds)
    assert plan.hfu == pytest.approx(EXECUTED / 459e12 / plan.step_time_seconds)
    assert plan.tokens_per_sec_per_chip == pytest.approx(TOKENS / plan.step_time_seconds)


def test_all_collectives_are_exposed_where_the_program_has_no_asynchronous_ones(plan):
    for row in plan.collectives:
        assert row["exposed_seconds"] == pytest.approx(row["seconds"])


def test_a_refused_program_does_not_fit():
    refusal = TooLarge(used_bytes=38 * 2**30, limit_bytes=31 * 2**30, message="38G exceeds 31G")
    plan = refused(TARGET, refusal)
    assert not plan.fits
    assert (plan.memory_peak_bytes, plan.memory_limit_bytes) == (38 * 2**30, 31 * 2**30)
    assert plan.step_time_seconds is None
