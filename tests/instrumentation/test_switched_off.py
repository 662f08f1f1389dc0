"""A step that is switched off, or closed, is only called."""

from __future__ import annotations

import threading
from typing import Any

import jax
import pytest

import mfu_jax
from mfu_jax.errors import UserError
from mfu_jax.instrumentation.instrumented_step import DisabledStep, InstrumentedStep
from mfu_jax.util import jax_internals
from tests.support.instrumented import (
    PEAK,
    batch,
    make_state,
    run,
    train_step,
)


def test_switched_off_it_only_calls_the_step() -> None:
    calls = []
    step = mfu_jax.instrument(lambda x: calls.append(x) or x, enable_mfu=False)
    threads = threading.active_count()
    assert step(3) == 3
    with step.logger.pause("eval"), step.logger.step() as scope, step.logger.phase("a"):
        scope.log(loss=1.0)
    with pytest.raises(UserError, match="enable_mfu is false"):
        _ = step.flops
    with pytest.raises(UserError, match="enable_mfu is false"):
        step.summary()
    with step as same:
        assert same is step
    assert step.close() is None
    assert calls == [3]
    assert threading.active_count() == threads


def test_the_disabled_step_has_everything_that_the_instrumented_one_has() -> None:
    public = {name for name in vars(InstrumentedStep) if not name.startswith("_")}
    assert public <= set(vars(DisabledStep))
    step = mfu_jax.instrument(jax.jit(train_step), enable_mfu=False)
    assert step.__name__ == "train_step"
    assert step.lower(make_state(), batch()).compile() is not None


def test_a_closed_step_no_longer_listens_to_compilations(monkeypatch: pytest.MonkeyPatch) -> None:
    register = jax.monitoring.register_event_duration_secs_listener
    unregister = jax_internals.unregister_event_duration_listener
    listening: list[Any] = []
    monkeypatch.setattr(
        jax.monitoring,
        "register_event_duration_secs_listener",
        lambda listener: (listening.append(listener), register(listener)),
    )
    monkeypatch.setattr(
        jax_internals,
        "unregister_event_duration_listener",
        lambda listener: (listening.remove(listener), unregister(listener)),
    )
    step = mfu_jax.instrument(jax.jit(train_step), sinks=[], **PEAK)
    run(step, 1)
    assert len(listening) == 1
    step.close()
    assert listening == []
