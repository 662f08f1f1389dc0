"""Faults in real loops on the CPU, where the lost time is known: the loop sleeps it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mfu_jax
from mfu_jax.profiling.profile import Profile, read_profile

STEPS = 4
LOST = 0.2  # seconds of a step; the step itself takes under a millisecond
LEAST = 0.8 * LOST  # a busy machine makes the loss larger, never smaller


def train_step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    loss, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    return w - 0.1 * gradient, loss


def slow_step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    def ask(loss: np.ndarray) -> np.ndarray:
        time.sleep(LOST)
        return np.asarray(loss)

    w, loss = train_step(w, x)
    return w, jax.pure_callback(ask, jax.ShapeDtypeStruct((), jnp.float32), loss)


def batches(seconds: float) -> Iterator[np.ndarray]:
    """Runs no program: on a busy machine, one as short as the step may be taken for the step."""
    while True:
        time.sleep(seconds)
        yield np.full((64, 64), 0.5, np.float32)


def profile_of(folder: Path, step: object, *, data: float = 0, reads: bool = False) -> Profile:
    step, loader = jax.jit(step), batches(data)  # type: ignore[call-overload]
    w = jnp.zeros((64, 64))
    jax.block_until_ready(step(w, next(loader)))
    with mfu_jax.profile(folder, step, w, next(loader)):
        for number in range(STEPS):
            x = next(loader)
            with jax.profiler.StepTraceAnnotation("train", step_num=number):
                w, loss = step(w, x)
            if reads:
                float(loss)
    return read_profile(folder, peak_tflops_per_device=0.1)


def test_a_loader_that_sleeps(tmp_path: Path) -> None:
    profile = profile_of(tmp_path, train_step, data=LOST)
    first = profile.advice[0]
    assert first.cause == "slow data"
    measured = profile.measured
    assert LEAST - measured.busy_seconds < first.gain_seconds < measured.step_seconds
    assert "_next" in first.evidence or "batches" in first.evidence or "next" in first.evidence


def test_a_callback_that_sleeps(tmp_path: Path) -> None:
    profile = profile_of(tmp_path, slow_step)
    assert profile.advice[0].cause == "host callback in the step"
    assert LEAST < profile.advice[0].gain_seconds < profile.measured.step_seconds
    assert profile.program.dump.topology.memory_bytes > 0


@pytest.mark.full
def test_a_function_that_is_new_in_every_step_compiles(tmp_path: Path) -> None:
    """All its versions are the same step, whatever the trace calls them."""
    w, x = jnp.zeros((64, 64)), jnp.ones((64, 64))
    jax.block_until_ready(jax.jit(train_step)(w, x))
    with mfu_jax.profile(tmp_path, jax.jit(train_step), w, x):
        for number in range(STEPS):
            with jax.profiler.StepTraceAnnotation("train", step_num=number):
                w, _ = jax.jit(lambda w, x: train_step(w, x))(w, x)
    profile = read_profile(tmp_path, peak_tflops_per_device=0.1)
    assert profile.measured.steps == STEPS - 1
    assert profile.hfu >= profile.mfu > 0  # both of all versions
    assert profile.advice[0].cause == "recompiles"
    assert profile.advice[0].gain_seconds > 0.5 * profile.measured.step_seconds


@pytest.mark.parametrize(
    ("other", "evaluates"),
    [
        (lambda w, x: jnp.mean((x @ w) ** 2), True),
        (lambda w, x: {"loss": jnp.mean((x @ w) ** 2), "seen": jnp.int32(64)}, True),
        (lambda w, x: (w, jnp.mean((x @ w) ** 2)), True),  # as nnx.jit returns a module's state
        (lambda w, x: jnp.argmax(x @ w, axis=-1), False),  # a sampler's tokens
        (lambda w, x: jnp.sum(jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w) ** 2), False),
        (lambda w, x: jnp.sum(w * w), False),
    ],
    ids=["loss", "metrics", "state", "tokens", "gradient norm", "weight norm"],
)
def test_an_evaluation_needs_no_name(other: Callable, evaluates: bool, tmp_path: Path) -> None:
    """Twice the step's batch, four times a step, and the device is never idle."""
    step, again = jax.jit(train_step), jax.jit(other)
    w, x, held_out = jnp.zeros((512, 512)), jnp.ones((512, 512)), jnp.ones((1024, 512))
    jax.block_until_ready((step(w, x), again(w, held_out)))
    with mfu_jax.profile(tmp_path, step, w, x):
        for number in range(STEPS):
            with jax.profiler.StepTraceAnnotation("train", step_num=number):
                w, _ = step(w, x)
            last = [again(w, held_out) for _ in range(4)]
    jax.block_until_ready(last)
    profile = read_profile(tmp_path, peak_tflops_per_device=0.1)
    found = {advice.cause: advice for advice in profile.advice}
    assert ("eval in the loop" in found) == evaluates
    if evaluates:
        (row,) = [row for row in profile.table("program") if row.name != "jit_train_step"]
        assert found["eval in the loop"].gain_seconds >= 0.99 * row.seconds > 0
        assert row.name in found["eval in the loop"].evidence


def read_by_numpy(loss: jax.Array) -> None:
    np.asarray(loss)


def read_by_item(loss: jax.Array) -> None:
    loss.item()


def read_by_device_get(loss: jax.Array) -> None:
    jax.device_get(loss)


@pytest.mark.full
@pytest.mark.parametrize("read", [float, read_by_numpy, read_by_item, read_by_device_get])
def test_reading_the_loss_is_a_sync_by_whatever_name(read: Callable, tmp_path: Path) -> None:
    """A CPU array's memory is read by NumPy without a call that the trace names."""

    def long_step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = jax.lax.fori_loop(0, 40, lambda _, y: jnp.tanh(y @ w), x)
        return w * 0.999, jnp.sum(y)

    step = jax.jit(long_step)
    w, x = jnp.eye(512), jnp.ones((512, 512))
    jax.block_until_ready(step(w, x))
    with mfu_jax.profile(tmp_path, step, w, x):
        for _ in range(STEPS + 2):
            w, loss = step(w, x)
            read(loss)
            time.sleep(LOST)
    found = {one.cause: one for one in read_profile(tmp_path, peak_tflops_per_device=0.1).advice}
    assert "sync in the loop" in found
    assert "read_by" in (evidence := found["sync in the loop"].evidence) or "__float__" in evidence


def test_a_generator_in_a_for_loop_is_data(tmp_path: Path) -> None:
    step, w = jax.jit(train_step), jnp.zeros((64, 64))
    jax.block_until_ready(step(w, next(batches(0))))
    with mfu_jax.profile(tmp_path, step, w, w):
        for number, x in enumerate(batches(LOST)):
            w, _ = step(w, x)
            if number == STEPS:
                break
    first = read_profile(tmp_path, peak_tflops_per_device=0.1).advice[0]
    assert first.cause == "slow data"
    assert "batches" in first.evidence


def test_what_saving_waits_for_is_its_own(tmp_path: Path) -> None:
    step, w, x = jax.jit(train_step), jnp.zeros((64, 64)), jnp.ones((64, 64))
    jax.block_until_ready(step(w, x))

    def save_weights(w: jax.Array) -> None:
        np.save(tmp_path / "w.npy", w)
        time.sleep(LOST)

    with mfu_jax.profile(tmp_path, step, w, x):
        for _ in range(STEPS):
            w, _ = step(w, x)
            save_weights(w)
    first = read_profile(tmp_path, peak_tflops_per_device=0.1).advice[0]
    assert first.cause == "host-bound loop"
    assert "save_weights" in first.evidence


@pytest.mark.full
def test_a_loop_with_many_python_calls_says_what_recording_them_takes(tmp_path: Path) -> None:
    step = jax.jit(train_step)
    w, x = jnp.zeros((64, 64)), jnp.ones((64, 64))
    jax.block_until_ready(step(w, x))
    calls = 100_000
    with mfu_jax.profile(tmp_path, step, w, x):
        for _ in range(STEPS):
            w, _ = step(w, x)
            for number in range(calls):
                isinstance(number, int)
    profile = read_profile(tmp_path, peak_tflops_per_device=0.1)
    assert sum("recording Python's calls" in note for note in profile.notes) == 1
    recording = profile.measured.recording
    assert 1e-8 * calls < recording <= profile.measured.step_seconds
    gain = sum(one.gain_seconds for one in profile.advice if one.cause == "host-bound loop")
    assert gain < profile.measured.step_seconds - 0.9 * recording


def test_without_python_functions_late_calls_have_no_cause(tmp_path: Path) -> None:
    step, loader = jax.jit(train_step), batches(LOST)
    w = jnp.zeros((64, 64))
    jax.block_until_ready(step(w, next(loader)))
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    jax.profiler.start_trace(tmp_path, profiler_options=options)
    for _ in range(STEPS):
        w, _ = step(w, next(loader))
    jax.block_until_ready(w)
    jax.profiler.stop_trace()
    profile = read_profile(tmp_path, peak_tflops_per_device=0.1)
    assert profile.measured.late_calls > LEAST
    assert not {one.cause for one in profile.advice} & {"slow data", "host-bound loop"}
    assert sum("python_tracer_level is 0" in note for note in profile.notes) == 1


@pytest.mark.parametrize(("after", "is_seen"), [({1, 4}, True), ({1}, False)])
def test_an_evaluation_that_recurs_owns_the_wait_for_it(
    after: set[int], is_seen: bool, tmp_path: Path
) -> None:
    """Once in a trace may be any schedule's; its wait is not the loop's in either case."""
    step, evaluate = jax.jit(train_step), jax.jit(lambda w, x: jnp.mean((x @ w) ** 2))
    w, x, held_out = jnp.zeros((512, 512)), jnp.ones((512, 512)), jnp.ones((16384, 512))
    jax.block_until_ready((step(w, x), evaluate(w, held_out)))
    with mfu_jax.profile(tmp_path, step, w, x):
        for number in range(8):
            w, _ = step(w, x)
            if number in after:
                float(evaluate(w, held_out))
                time.sleep(LOST)
    profile = read_profile(tmp_path, peak_tflops_per_device=0.1)
    causes = [advice.cause for advice in profile.advice]
    assert "sync in the loop" not in causes
    assert ("eval in the loop" in causes) == is_seen


def _as_it_is(step: Callable, *_: object) -> Callable:
    return step


def _compiled(step: Callable, *args: object) -> Callable:
    return jax.jit(step).lower(*args).compile()


@pytest.mark.parametrize("make", [jax.jit, nnx.jit], ids=["jit", "nnx"])
@pytest.mark.parametrize("compile_step", [_as_it_is, _compiled], ids=["called", "compiled"])
@pytest.mark.parametrize("cause", ["slow data", "host-bound loop"])
def test_calls_of_the_step_are_as_good_as_marks(
    cause: str, compile_step: Callable, make: Callable, tmp_path: Path
) -> None:
    w, loader = jnp.zeros((64, 64)), batches(LOST if cause == "slow data" else 0)
    step = make(train_step)
    called = compile_step(step, w, next(loader))
    jax.block_until_ready(called(w, next(loader)))
    with mfu_jax.profile(tmp_path):
        for _ in range(STEPS):
            w, _ = called(w, next(loader))
            if cause == "host-bound loop":
                time.sleep(LOST)
        jax.block_until_ready(w)
    profile = read_profile(tmp_path, peak_tflops_per_device=0.1)
    assert profile.measured.steps == STEPS - 1
    assert profile.advice[0].cause == cause
    gain, measured = profile.advice[0].gain_seconds, profile.measured
    assert LEAST - measured.busy_seconds < gain < measured.step_seconds  # a busy device hides some
    assert not any("mark each call" in note for note in profile.notes)
