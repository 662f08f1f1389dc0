"""`profile_steps` writes a device trace of these steps, and of no other."""

from __future__ import annotations

import contextlib
import gzip
import json
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

import mfu_jax
from mfu_jax.errors import UserError
from mfu_jax.hardware.peak import Peak
from mfu_jax.instrumentation.device_trace import StepProfile, TraceReading
from mfu_jax.profiling.profile import read_profile
from mfu_jax.settings import Settings
from mfu_jax.storage.trace_folders import trace_files
from mfu_jax.util.failsafe import Boundary
from tests.support.instrumented import PEAK, STEP_FLOPS, batch, make_state, run, train_step
from tests.support.sinks import ListSink
from tests.support.work import HANG_SECONDS


def marked_steps(folder: Path) -> set[str]:
    """Step numbers in the trace, as its viewer's file has them."""
    (path,) = folder.glob("plugins/profile/*/*.trace.json.gz")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return {e["args"]["step_num"] for e in events if e.get("name") == "train"}


@pytest.mark.full
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
    pauses = [r.step for r in memory.records if "goodput/profile_seconds" in r.scalars]
    assert pauses[:2] == [2, 4]
    assert_has_numbers_of(memory, tmp_path)


@pytest.mark.full
def test_steps_made_of_phases_end_the_trace_too(tmp_path: Path) -> None:
    step = mfu_jax.instrument(
        jax.jit(train_step), sinks=[], profile_steps="1-2", profile_dir=str(tmp_path), **PEAK
    )
    state = make_state()
    for _ in range(5):
        with step.logger.step(), step.logger.phase("update"):
            state, _ = step(state, batch())
    assert marked_steps(tmp_path) == {"1", "2"}  # written before the end of the run
    step.close()


def assert_has_numbers_of(memory: ListSink, folder: Path) -> None:
    """One record has the numbers that the trace's reader gives, as seconds and as points."""
    (record,) = [r for r in memory.records if "profile/coverage" in r.scalars]
    assert record.is_logged
    assert record.scalars["profile/last_step"] == 4
    numbers = {k: v for k, v in record.scalars.items() if k.startswith("profile/")}
    profile = read_profile(folder, **PEAK)
    assert numbers == pytest.approx({**profile.scalars(), "profile/last_step": 4})
    points = [v for name, v in numbers.items() if name.startswith("profile/mfu_points/")]
    assert sum(points) == pytest.approx(100)
    seconds = [v for name, v in numbers.items() if name.startswith("profile/waterfall/")]
    assert sum(seconds) == pytest.approx(profile.measured.step_seconds)


@pytest.mark.full
def test_a_trace_that_cannot_be_read_is_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The reader is another process: its error arrives, and the run goes on without numbers."""
    peak = Peak(flops_per_sec=1e12, dtype="f32", kind="flag", source="")
    options = {"hardware": "", "boundary": Boundary()}
    reading = TraceReading(str(tmp_path), "steps 3 to 4", peak=lambda: peak, **options)
    reading.wait(HANG_SECONDS)
    assert not reading.numbers
    assert "the profile of steps 3 to 4 is not in the metrics" in caplog.text
    assert "an empty folder, or one without traces; expected" in caplog.text
    unknown = TraceReading(str(tmp_path), "steps 5 to 6", peak=lambda: None, **options)
    unknown.wait(HANG_SECONDS)
    assert "no peak of the device is known; expected one" in caplog.text


@pytest.mark.full
def test_a_profiler_that_does_not_start_is_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the trainer nothing else stands between it and the step."""
    monkeypatch.setattr(jax.profiler, "start_trace", refuse)
    settings = Settings(profile_steps="0-2", profile_dir=str(tmp_path))
    with mfu_jax.MetricLogger(sinks=[]) as logger, StepProfile(settings, peak=refuse) as tracing:
        for number in range(4):
            with tracing.step(number, logger):
                pass
            logger.record(number, {"loss": 1.0})
            tracing.after(number, logger, is_last=number == 3)
    assert caplog.text.count("there is no device trace: RuntimeError: only one profile") == 1


def test_a_folder_that_cannot_be_made_is_refused_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = str(tmp_path / "file" / "profile")
    with pytest.raises(UserError, match=f"profile_dir {folder!r} cannot be written"):
        mfu_jax.instrument(train_step, sinks=[], profile_steps="1-2", profile_dir=folder)


def refuse(*_: object) -> None:
    raise RuntimeError("only one profile may be run at a time")


@pytest.mark.full
def test_a_run_that_ends_inside_or_before(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name, steps, marked in (("inside", "1-9", {"1"}), ("before", "5-9", None)):
        folder = tmp_path / name
        options = {"profile_steps": steps, "tensorboard_dir": str(folder), "sinks": [], **PEAK}
        step = mfu_jax.instrument(jax.jit(train_step), **options)
        run(step, 2)
        step.close()
        assert (marked_steps(folder) if (folder / "plugins").exists() else None) == marked
    assert "profile_steps=5-9: the run had none of these steps" in caplog.text


@pytest.mark.full
@pytest.mark.parametrize("steps", ["2-9", "0-1"])
def test_what_is_left_to_do_at_the_end_is_in_no_steps_time(tmp_path: Path, steps: str) -> None:
    """A trace that is still on, or still being read: both take longer than any step."""
    memory = ListSink()
    step = mfu_jax.instrument(
        jax.jit(train_step), profile_steps=steps, profile_dir=str(tmp_path), sinks=[memory], **PEAK
    )
    run(step, 4)
    step.close()
    last = memory.records[-1].scalars
    assert last["profile/coverage"] > 0
    assert last["goodput/profile_seconds"] > last["perf/step_time_seconds"]


def test_steps_that_are_not_traced_do_nothing_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[int] = []
    monkeypatch.setattr(StepProfile, "step", lambda self, number, logger: called.append(number))
    monkeypatch.setattr(StepProfile, "after", lambda self, number, logger: called.append(number))
    options = {"profile_steps": "5-9", "profile_dir": str(tmp_path), "sinks": [], **PEAK}
    step = mfu_jax.instrument(jax.jit(train_step), **options)
    run(step, 5)
    step.close()
    assert called == []


@pytest.mark.parametrize("text", ["9-3", "all", "3-", "1,2"])
def test_wrong_steps(text: str) -> None:
    with pytest.raises(UserError, match=r"(?s)expected the first and the last step.*usually"):
        mfu_jax.instrument(train_step, profile_steps=text, profile_dir="p")


def test_what_it_cannot_be_combined_with() -> None:
    with pytest.raises(UserError, match=r"(?s)nowhere to write.*expected profile_dir"):
        Settings(profile_steps="3")
    settings = Settings(profile_steps="3", profile_dir="p", peak_tflops_per_device=1.0)
    with pytest.raises(UserError, match=r"(?s)loop that calls record\(\).*expected.*instrument"):
        mfu_jax.flags.make_logger(settings, train_step, make_state(), batch())
    with (
        mfu_jax.MetricLogger(sinks=[]) as logger,
        pytest.raises(UserError, match="both given"),
    ):
        mfu_jax.instrument(train_step, logger=logger, settings=settings)


@pytest.mark.full
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


@pytest.mark.parametrize("is_instrumented", [True, False])
def test_each_process_of_a_machine_keeps_its_trace(
    is_instrumented: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both would write to the same file, which is named after the machine."""

    def start(folder: str) -> None:
        session = Path(folder, "plugins", "profile", "2026_01_01_00_00_00")
        session.mkdir(parents=True)
        (session / "node.xplane.pb").touch()

    monkeypatch.setattr(jax.profiler, "start_trace", start)
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: None)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    for process in (2, 1):  # process 0 would read the trace
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        if is_instrumented:
            logger = SimpleNamespace(own_pause=lambda name: contextlib.nullcontext())
            settings = Settings(profile_steps="3-4", profile_dir=str(tmp_path))
            with StepProfile(settings, peak=lambda: None) as traced:
                for step in (3, 4):
                    with traced.step(step, logger):
                        pass
                    traced.after(step, logger)
        else:
            with mfu_jax.profile(tmp_path):
                pass
    names = [path.name for path in trace_files(tmp_path)]
    assert names == ["process1.node.xplane.pb", "process2.node.xplane.pb"]
    assert [path.name for path in tmp_path.iterdir()] == ["plugins"]
