"""Profiles of real CPU traces: every second has a place, every op its instruction."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import mfu_jax
from mfu_jax import cli
from mfu_jax.errors import UserError
from mfu_jax.profiling.profile import Profile, read_profile
from tests.profiling.conftest import LAYERS, MODEL_FLOPS, STEPS
from tests.support.instrumented import batch, make_state, train_step
from tests.support.xspace import Plane, space

PEAK = 0.01  # TFLOP/s of one of the eight devices


@pytest.fixture(scope="module")
def profile(cpu_folder: Path) -> Profile:
    return read_profile(cpu_folder, peak_tflops_per_device=PEAK)


@pytest.mark.full
def test_the_waterfall_sums_to_the_step_time_and_to_the_peak(profile: Profile) -> None:
    bars = profile.waterfall
    assert sum(bar.seconds for bar in bars) == pytest.approx(profile.measured.step_seconds)
    assert sum(bar.mfu_points for bar in bars) == pytest.approx(100)
    assert bars[-1].name == "MFU"
    assert profile.coverage > 0.99
    assert (profile.measured.steps, len(profile.measured.devices)) == (STEPS - 1, 8)


def test_mfu_is_model_flops_over_the_peak(profile: Profile) -> None:
    ledger = profile.program.ledger
    assert ledger.model == MODEL_FLOPS // 8
    assert ledger.residual == 0
    step = profile.measured.step_seconds
    assert profile.mfu == pytest.approx(MODEL_FLOPS / 8 / (step * PEAK * 1e12))


def test_communication_has_its_kind_and_its_mesh_axis(profile: Profile) -> None:
    names = {bar.name for bar in profile.waterfall}
    assert any(name.startswith("exposed communication: all-gather over data") for name in names)
    assert any(name.startswith("exposed communication: all-reduce over model") for name in names)
    assert not any("groups of" in name for name in names)


def test_tables_hold_the_same_seconds_and_flops(profile: Profile) -> None:
    busy = profile.measured.busy_seconds
    for by in ("scope", "op", "phase", "dtype", "kernel"):
        rows = profile.table(by)
        assert sum(row.seconds for row in rows) == pytest.approx(busy)
        assert sum(row.flops for row in rows) == profile.program.costs.executed.total
    phases = {row.name: row.flops for row in profile.table("phase")}
    executed = profile.program.costs.executed
    assert phases["rematerialized"] == executed.rematerialized > 0
    scopes = {row.name for row in profile.table("scope")}
    assert "mlp" in scopes
    in_layers = [row for row in profile.table("op") if row.flops]
    assert {row.runs for row in in_layers} == {LAYERS}


def test_the_trace_alone_has_no_model_but_the_program(cpu_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(cpu_folder / "plugins", tmp_path / "plugins")
    profile = read_profile(tmp_path, peak_tflops_per_device=PEAK)
    executed = profile.program.costs.executed
    assert profile.program.ledger.model == executed.forward + executed.backward
    assert any("model FLOPs are the program's forward and backward" in n for n in profile.notes)
    assert any("groups of 4, 2 apart" in bar.name for bar in profile.waterfall)
    assert (
        profile.program.costs == read_profile(cpu_folder, peak_tflops_per_device=PEAK).program.costs
    )
    given = read_profile(tmp_path, peak_tflops_per_device=PEAK, model_flops=1000)
    assert given.mfu == pytest.approx(1000 / (given.measured.step_seconds * PEAK * 1e12))


def test_another_version_of_the_program_is_not_taken(cpu_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(cpu_folder, tmp_path / "t")
    dump = mfu_jax.dumps.load(tmp_path / "t" / "programs" / "step.mfu")
    other = "HloModule jit_step\nENTRY %e (p: f32[]) -> f32[] {\n  ROOT %p = f32[] parameter(0)\n}"
    (tmp_path / "t" / "programs" / "step.mfu").unlink()
    mfu_jax.dumps.write(type(dump)(text=other, model=dump.model), tmp_path / "t/programs/o.mfu")
    profile = read_profile(tmp_path / "t", peak_tflops_per_device=PEAK)
    assert profile.coverage > 0.99
    assert not profile.program.has_model


def test_the_command(cpu_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    peak = f"peak_tflops_per_device={PEAK}"
    assert cli.main(["profile", str(cpu_folder), peak, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    keys = {"coverage", "step_time_seconds", "waterfall", "by_scope", "by_op", "advice"}
    assert keys <= set(answer)
    assert {"name", "seconds", "mfu_points", "scopes"} == set(answer["waterfall"][0])
    total = sum(bar["seconds"] for bar in answer["waterfall"])
    assert total == pytest.approx(answer["step_time_seconds"])
    words = ["profile", str(cpu_folder), peak, "by=phase", "top=1", "depth=1"]
    assert cli.main(words) == 0
    text = capsys.readouterr().out
    assert "- exposed communication: all-gather over data" in text
    assert "by phase" in text
    assert "more, " in text
    wrong = (
        "by=color",
        "sort=size",
        "top=-1",
        "peak_tflops_per_device=0",
        "model_flops=many",
        "model_flops=0",
        "model_flops=-5",
    )
    for word in wrong:
        assert cli.main(["profile", str(cpu_folder), word]) == 2
    assert cli.main(["profile", str(cpu_folder / "nothing")]) == 2


@pytest.mark.parametrize(("hardware", "platforms"), [("v5e", "cpu"), ("calibrate", None)])
def test_the_command_leaves_accelerators_alone_unless_it_measures_one(
    hardware: str,
    platforms: str | None,
    cpu_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "")
    monkeypatch.delenv("JAX_PLATFORMS")
    assert cli.main(["profile", str(cpu_folder), f"hardware={hardware}", "--json"]) == 0
    assert os.environ.get("JAX_PLATFORMS") == platforms
    assert json.loads(capsys.readouterr().out)["platform"] == "cpu"


def test_traces_without_a_program(tmp_path: Path) -> None:
    host, device = Plane("/host:CPU"), Plane("/device:TPU:0")
    host.line("python", [("train", 0, 5, {"step_num": 1})])
    device.line("XLA Modules", [("jit_step(7)", 0, 10, {})])
    device.line("XLA Ops", [("%f.1 = f32[] fusion()", 0, 10, {})])
    file = tmp_path / "a.xplane.pb"
    file.write_bytes(space(host))
    with pytest.raises(UserError, match=r"no device ran a program in it \(planes: /host:CPU\)"):
        read_profile(file)
    file.write_bytes(space(host, device))
    with pytest.raises(UserError, match="the program 'jit_step' that ran in it is not known"):
        read_profile(file)


def test_the_note_on_a_peak_that_is_too_low_knows_where_it_is_from(cpu_folder: Path) -> None:
    notes = " ".join(read_profile(cpu_folder, peak_tflops_per_device=1e-5).notes)
    assert "too low; usually the one given is of other units" in notes
    assert "calibrated" not in notes


def test_what_profile_cannot_trace_is_an_error_before_the_loop(tmp_path: Path) -> None:
    """A file as the folder, or a step without its arguments; the next trace runs."""
    step, state = jax.jit(train_step), make_state()
    (tmp_path / "file").write_text("")
    for folder, args, why in (
        ("file", (state, batch()), "(?s)does not start .*the folder cannot be written"),
        ("traces", (), "(?s)missing a required argument: .*pass the arguments"),
        (
            "traces",
            (state, batch(), 1, 2),
            "too many positional arguments\nhint: pass the arguments",
        ),
    ):
        with pytest.raises(UserError, match=why), mfu_jax.profile(tmp_path / folder, step, *args):
            raise AssertionError
    data = batch()
    with mfu_jax.profile(tmp_path / "traces", step, state, data):
        for _ in range(3):
            state, _ = step(state, data)
    assert read_profile(tmp_path / "traces", peak_tflops_per_device=PEAK).program.has_model


@pytest.mark.full
def test_what_was_started_before_is_not_in_the_trace(tmp_path: Path) -> None:
    step, state, data = jax.jit(train_step), make_state(), batch()
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 50, lambda _, x: jnp.sin(x @ x), x))
    kept = slow(jnp.ones((400, 400)))
    for _ in range(6):  # in the queue
        kept = slow(kept)
    with mfu_jax.profile(tmp_path):
        state, _ = step(state, data)
    profile = read_profile(tmp_path, peak_tflops_per_device=PEAK)
    assert profile.measured.main.module == "jit_train_step"
    assert bool(jnp.isfinite(kept).all())


@pytest.mark.full
def test_the_step_asked_for_is_measured_beside_an_evaluation_that_takes_longer(
    tmp_path: Path,
) -> None:
    step, state, data = jax.jit(train_step), make_state(), batch()
    evaluate = jax.jit(lambda x: jax.lax.fori_loop(0, 50, lambda _, x: jnp.sin(x @ x), x))
    x = evaluate(jnp.ones((400, 400)))
    for folder, asked in (("asked", (step, state, data)), ("not", ())):
        with mfu_jax.profile(tmp_path / folder, *asked):
            for _ in range(4):
                state, _ = step(state, data)
                x = evaluate(x).block_until_ready()
    modules = [
        read_profile(tmp_path / folder, peak_tflops_per_device=PEAK).measured.main.module
        for folder in ("asked", "not")
    ]
    assert modules == ["jit_train_step", "jit__lambda"]


def test_a_trace_that_is_not_written_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stop = jax.profiler.stop_trace

    def fail() -> None:
        stop()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(jax.profiler, "stop_trace", fail)
    with pytest.raises(ZeroDivisionError), mfu_jax.profile(tmp_path):
        raise ZeroDivisionError
    assert caplog.text.count("there is no device trace: OSError: [Errno 28] No space left") == 1


def test_profile_takes_compiled_steps_and_refuses_plain_ones(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="expected a jitted step"), mfu_jax.profile("x", train_step):
        pass
    state = make_state()
    compiled = jax.jit(train_step).lower(state, batch()).compile()
    with mfu_jax.profile(tmp_path, compiled):
        for _ in range(3):
            state, _ = compiled(state, batch())
    (dump,) = (tmp_path / "programs").iterdir()
    assert mfu_jax.dumps.load(dump).name == "jit_train_step"
    assert read_profile(tmp_path, peak_tflops_per_device=PEAK).coverage > 0.95
