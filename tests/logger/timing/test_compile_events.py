"""Compilations, as JAX tells them."""

import gc
import threading
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest
from jax._src.monitoring import get_event_duration_listeners

import mfu_jax
from mfu_jax.logger.metric_logger import MetricLogger
from mfu_jax.logger.timing.compile_events import CompileEvent, CompileLog
from tests.support.fake_device import FakeClock
from tests.support.sinks import ListSink
from tests.support.work import HANG_SECONDS

TRACE = "/jax/core/compile/jaxpr_trace_duration"
LOWER = "/jax/core/compile/jaxpr_to_mlir_module_duration"
COMPILE = "/jax/core/compile/backend_compile_duration"


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def log(clock: FakeClock) -> Iterator[CompileLog]:
    log = CompileLog(monotonic=clock.monotonic)
    yield log
    log.close()


def test_a_trace_inside_of_a_trace_is_counted_once(log: CompileLog, clock: FakeClock) -> None:
    events: list[CompileEvent] = []
    log.subscribe(events.append)
    clock.now = 14.0
    log._on_duration(TRACE, 1.0, fun_name="inner")  # 13 to 14
    clock.now = 16.0
    log._on_duration(TRACE, 1.5, fun_name="inner")  # 14.5 to 16
    clock.now = 20.0
    log._on_duration(TRACE, 10.0, fun_name="outer")  # 10 to 20
    clock.now = 25.0
    log._on_duration(COMPILE, 4.0, fun_name="jit(outer)")  # 21 to 25
    assert log.seconds == 14.0
    assert [event.own_seconds for event in events] == [1.0, 1.5, 7.5, 4.0]
    assert [event.stage for event in events] == ["trace", "trace", "trace", "compile"]
    assert events[-1].function == "jit(outer)"
    assert log.compile_count == 1


def test_a_long_run_of_compilations_keeps_its_total(log: CompileLog, clock: FakeClock) -> None:
    for _ in range(1000):
        clock.advance(3.0)
        log._on_duration(COMPILE, 2.0)
    assert log.seconds == 2000.0
    assert len(log._spans[threading.get_ident()]) <= 256


def test_other_events_are_none_of_its_business(log: CompileLog) -> None:
    log._on_duration("/jax/checkpoint/write_duration", 5.0)
    assert log.seconds == 0.0


def test_jax_tells_of_every_compilation_and_of_no_other_call(log: CompileLog) -> None:
    log.close()
    real = CompileLog()
    functions: list[str] = []
    real.subscribe(lambda event: functions.append(f"{event.stage} {event.function}"))
    double = jax.jit(lambda x: 2 * x)
    small, large = jnp.ones(3), jnp.ones(4)
    before = real.compile_count
    functions.clear()
    double(small)
    assert real.compile_count == before + 1
    assert functions[-1].startswith("compile jit(")
    double(small)
    assert real.compile_count == before + 1
    double(large)
    assert real.compile_count == before + 2
    assert real.seconds > 0
    real.close()
    double(jnp.ones(5))
    assert real.compile_count == before + 2


def test_a_step_with_a_new_shape_is_a_compile_step() -> None:
    step = jax.jit(lambda x: {"loss": jnp.mean(x @ x)})
    batches = [jnp.ones((n, n)) for n in (8, 8, 8, 16, 16)]
    sink = ListSink()
    with MetricLogger(model_flops_per_device=1024, warmup_steps=0, sinks=[sink]) as logger:
        for number, batch in enumerate(batches):
            logger.record(number, step(batch))
    kinds = [record.kind for record in sink.records]
    assert kinds[0] == kinds[3] == "compile"
    assert kinds[1] == kinds[4] == "step"
    assert any("recompiled jit(" in note for note in sink.records[3].notes)
    assert sink.records[3].scalars["compile/seconds"] > 0
    assert sink.scalar("learning/loss") == [8.0, 8.0, 8.0, 16.0, 16.0]


def test_a_shared_log_goes_on_for_the_loggers_that_are_left() -> None:
    step = jax.jit(lambda x: {"loss": jnp.mean(x * 3)})
    log = CompileLog()
    first = MetricLogger(compile_log=log, sinks=[])
    second = MetricLogger(compile_log=log, sinks=[])
    first.close()
    before = log.compile_count
    for number in range(4):
        second.record(number, step(jnp.ones(number + 1)))
    assert log.compile_count >= before + 4
    summary = second.close()
    assert summary.compile_steps == 4
    after = log.compile_count
    step(jnp.ones(9))
    assert log.compile_count == after, "nobody is left, so it does not listen"
    third = MetricLogger(compile_log=log, sinks=[])
    step(jnp.ones(10))
    assert log.compile_count > after
    third.close()


@pytest.mark.full
def test_a_step_with_a_shared_logger_that_is_dropped_leaves_no_listener() -> None:
    before = set(get_event_duration_listeners())
    with MetricLogger(sinks=[]) as logger:
        step = mfu_jax.instrument(
            jax.jit(lambda x: x.sum()), logger=logger, peak_tflops_per_device=1.0
        )
        step(jnp.ones(3))
        _ = step.flops
        del step
    gc.collect()
    deadline = time.monotonic() + HANG_SECONDS
    while not set(get_event_duration_listeners()) <= before:  # a thread closes the step
        assert time.monotonic() < deadline
        time.sleep(0.01)
