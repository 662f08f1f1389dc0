"""Sweeps over models whose memory and time are formulas: the best point is known beforehand."""

import dataclasses
import random

import pytest

from mfu_jax.errors import UserError
from mfu_jax.planning.compilation.compiling import NoCompilerError
from mfu_jax.planning.sweep.running import Sweep, run
from mfu_jax.planning.sweep.space import SweepPoint, split
from tests.support.planned_models import GIB, LIMIT, Model

SPACE = {"remat_policy": "none,minimal,full", "per_device_batch_size": "1..8"}
POINTS = split(SPACE)[1]
MODEL = Model(
    state_gib=8,
    fixed_gib=4,
    activations_gib={"none": 30, "minimal": 5, "full": 2},
    fixed_seconds=0.2,
    matmul_seconds=0.2,
    other_seconds=0.1,
)


class Compiler:
    """Counts its compiles; dies, fails or takes its time at one of them."""

    def __init__(self, model=MODEL, at=0, error=None, seconds=0.0):
        self.model, self.at, self.error = model, at, error
        self.seconds, self.now = seconds, 0.0
        self.points = []

    def __call__(self, point, seconds):
        if len(self.points) + 1 == self.at:
            self.at = 0
            raise self.error
        self.points.append(point)
        self.now += self.seconds
        return self.model.plan(point)


def _sweep(compiler, points=POINTS, **options):
    return Sweep(
        target="8 chips",
        points=points,
        flags=lambda point: ["model_name=m", str(point)],
        compile=compiler,
        invalid=lambda point: "",
        analytic=compiler.model.analytic,
        limit_bytes=LIMIT,
        monotonic=lambda: compiler.now,
        **options,
    )


def test_the_fastest_point_that_fits_is_found_with_a_third_of_the_compiles():
    """By hand: minimal holds (32 − 12) / 5 = 4 sequences, full 10, so all 8; none not one.

    Seconds: minimal at 4: 0.2 + 4 (3.2 × 0.2 + 0.1) = 3.16; full at 8: 0.2 + 8 × 0.9 = 7.4.
    """
    compiler = Compiler()
    result = run(_sweep(compiler))
    assert result.winner.values == {"remat_policy": "minimal", "per_device_batch_size": "4"}
    assert result.winner.step_time_seconds == pytest.approx(3.16)
    assert result.flags == "model_name=m remat_policy=minimal per_device_batch_size=4"
    assert result.compiles == len(compiler.points) <= 8
    assert all(row.source == "compiled" or row.note or row.fits is not None for row in result.rows)


def test_what_was_not_compiled_says_so():
    compiler = Compiler()
    result = run(_sweep(compiler))
    compiled = [p.values for p in compiler.points]
    for row in result.rows:
        assert (row.source == "compiled") == (row.values in compiled)


@pytest.mark.parametrize("seed", range(60))
def test_random_models(seed):
    compiler = Compiler(Model.random(random.Random(seed)))
    speeds = {p: compiler.model.plan(p).tokens_per_sec_per_chip or 0 for p in POINTS}
    result = run(_sweep(compiler))
    assert len(compiler.points) <= len(POINTS) // 3
    if result.winner is None:
        assert max(speeds.values()) == 0
    else:
        assert result.winner.tokens_per_sec_per_chip == max(speeds.values())


def test_estimates_on_a_line_are_exact():
    """Memory and time of these models are straight lines in the batch."""
    result = run(_sweep(Compiler()))
    rows = {str(p): row for p, row in zip(POINTS, result.rows, strict=True)}
    row = rows["remat_policy=minimal per_device_batch_size=3"]
    assert row.source == "estimated"
    assert row.memory_peak_bytes == (8 + 4 + 3 * 5) * GIB
    assert row.step_time_seconds == pytest.approx(0.2 + 3 * 0.74)


def test_the_budget_ends_a_sweep():
    compiler = Compiler(seconds=100.0)
    result = run(_sweep(compiler, budget_seconds=250.0))
    assert len(compiler.points) == 2  # a third would end at 300 s
    assert "the budget is spent" in result.notes[0]


def test_the_most_compiles_are_a_limit():
    compiler = Compiler()
    result = run(_sweep(compiler, most_compiles=2))
    assert len(compiler.points) == 2
    assert "2 of 24 points compiled" in result.notes[0]
    assert result.winner.source == "compiled"
    assert "may be faster" in result.notes[1]


def test_invalid_points_are_not_compiled():
    wrong = {str(point): "no such mesh" for point in POINTS[:8]}
    compiler = Compiler()
    sweep = _sweep(compiler)
    result = run(dataclasses.replace(sweep, invalid=lambda point: wrong.get(str(point), "")))
    assert not set(compiler.points) & set(POINTS[:8])
    assert {row.source for row in result.rows[:8]} == {"invalid"}
    assert result.rows[0].note == "no such mesh"


def test_a_failure_is_a_row():
    result = run(_sweep(Compiler(at=2, error=UserError("libtpu crashed"))))
    failed = [row for row in result.rows if row.source == "failed"]
    assert [row.note for row in failed] == ["libtpu crashed"]
    assert result.winner


def test_without_a_compiler_nothing_is_tried_again():
    compiler = Compiler(at=1, error=NoCompilerError("needs libtpu"))
    with pytest.raises(NoCompilerError):
        run(_sweep(compiler))
    assert not compiler.points


def test_weights_that_do_not_fit_are_not_compiled():
    large = Model(
        state_gib=40,
        fixed_gib=0,
        activations_gib={"none": 1, "minimal": 1, "full": 1},
        fixed_seconds=0,
        matmul_seconds=1,
        other_seconds=0,
    )
    compiler = Compiler(large)
    result = run(_sweep(compiler))
    assert not compiler.points
    assert result.winner is None
    assert {(row.source, row.fits) for row in result.rows} == {("ruled out", False)}


def test_the_pareto_front_by_brute_force():
    rows = run(_sweep(Compiler())).rows
    known = [r for r in rows if r.fits and r.memory_peak_bytes and r.tokens_per_sec_per_chip]
    for row in known:
        better = [
            r
            for r in known
            if r.memory_peak_bytes <= row.memory_peak_bytes
            and r.tokens_per_sec_per_chip >= row.tokens_per_sec_per_chip
            and r is not row
        ]
        assert row.pareto == (not better)


def test_points_of_a_mesh_are_not_compared_with_another():
    space = {"fsdp": "4,8", "remat_policy": "none,full"}
    points = split(space)[1]
    result = run(_sweep(Compiler(), points=points))
    assert result.compiles >= 2
    assert {r.values["fsdp"] for r in result.rows if r.source == "compiled"} == {"4", "8"}


def test_a_point_is_its_pairs():
    assert SweepPoint((("a", "1"),)) == SweepPoint((("a", "1"),))


class Squeezing(Model):
    """Memory is no line, and a refusal says little: XLA recomputes until little is missing."""

    def peak(self, policy, batch):
        held = super().peak(policy, batch + max(0.0, batch - 3))
        return held if held <= LIMIT else LIMIT + GIB // 4 + round(batch * GIB / 100)


@pytest.mark.parametrize("largest", [12, 31, 57])
def test_refusals_that_say_little_are_halved(largest):
    """20 GiB are left; every sequence but the first three takes twice as much as those."""
    model = Squeezing(**{**vars(MODEL), "activations_gib": {"full": 20 / (2 * largest - 2.5)}})
    assert model.peak("full", largest) <= LIMIT < model.peak("full", largest + 1)
    batches = map(str, range(1, 97))
    points = [SweepPoint((("remat_policy", "full"), ("per_device_batch_size", b))) for b in batches]
    result = run(_sweep(Compiler(model), points))
    assert result.winner.values["per_device_batch_size"] == str(largest)
    assert result.compiles <= 9
