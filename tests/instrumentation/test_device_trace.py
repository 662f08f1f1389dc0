"""`profile_steps` writes a device trace of these steps, and of no other."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import jax
import pytest

import mfu_jax
from mfu_jax.errors import UserError
from mfu_jax.profiling.profile import read_profile
from mfu_jax.settings import Settings
from tests.support.instrumented import PEAK, STEP_FLOPS, batch, make_state, run, train_step
from tests.support.sinks import ListSink


def marked_steps(folder: Path) -> set[str]:
    """Step numbers in the trace, as its viewer's file has them."""
    (path,) = folder.glob("plugins/profile/*/*.trace.json.gz")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return {e["args"]["step_num"] for e in events if e.get("name") == "train"}


@pytest.mark.slow
def test_the_trace_holds_the_steps_asked_for(tmp_path: Path) -> None:
    memory = ListSink()
    step = mfu_jax.instrument(
        jax.jit(train_step), profile_steps="3-4", profile_dir=str(tmp_path), sinks=[memory], **PEAK
    )
    run(step, 7)
    step.close()
    assert marked_steps(tmp_path) == {"3", "4"}
    assert [record.step for record in memory.records] == list(range(7))
    # Starting and writing the trace is not part of any step's time.
    assert sum("goodput/profile_seconds" in record.scalars for record in memory.records) == 2


def test_a_run_that_ends_inside_or_before(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name, steps, marked in (("inside", "1-9", {"1"}), ("before", "5-9", None)):
        folder = tmp_path / name
        options = {"profile_steps": steps, "tensorboard_dir": str(folder), "sinks": [], **PEAK}
        step = mfu_jax.instrument(jax.jit(train_step), **options)
        run(step, 2)
        step.close()
        assert (marked_steps(folder) if (folder / "plugins").exists() else None) == marked
    assert "profile_steps=5-9: the run had none of these steps" in caplog.text


@pytest.mark.parametrize("text", ["9-3", "all", "3-", "1,2"])
def test_wrong_steps(text: str) -> None:
    with pytest.raises(UserError, match=r"expected the first and the last step.*usually"):
        mfu_jax.instrument(train_step, profile_steps=text, profile_dir="p")


def test_what_it_cannot_be_combined_with() -> None:
    with pytest.raises(UserError, match=r"nowhere to write.*expected profile_dir"):
        Settings(profile_steps="3")
    settings = Settings(profile_steps="3", profile_dir="p", peak_tflops_per_device=1.0)
    with pytest.raises(UserError, match=r"loop that calls record\(\).*expected.*instrument"):
        mfu_jax.flags.make_logger(settings, train_step, make_state(), batch())
    with (
        mfu_jax.MetricLogger(sinks=[]) as logger,
        pytest.raises(UserError, match="both given"),
    ):
        mfu_jax.instrument(train_step, logger=logger, settings=settings)


@pytest.mark.slow
def test_the_folder_has_the_program_and_its_model_flops(tmp_path: Path) -> None:
    options = {"profile_steps": "2-4", "profile_dir": str(tmp_path), "sinks": []}
    step = mfu_jax.instrument(jax.jit(train_step), **options, **PEAK)
    run(step, 6)
    step.close()
    dump = mfu_jax.dumps.load(tmp_path / "programs" / "train_step.mfu")
    assert dump.model is not None
    assert dump.model.per_device == STEP_FLOPS
    profile = read_profile(tmp_path, **PEAK)
    assert profile.program.ledger.model == STEP_FLOPS
    assert profile.coverage > 0.95
    rate = PEAK["peak_tflops_per_device"] * 1e12
    assert profile.mfu == pytest.approx(STEP_FLOPS / (profile.measured.step_seconds * rate))
