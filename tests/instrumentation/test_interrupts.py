"""Ctrl-C while an instrumented step waits for the one before it: the loop keeps its state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import mfu_jax
from mfu_jax.logger.timing import timer
from tests.support.instrumented import PEAK
from tests.support.sinks import ListSink

_WAITS_BEFORE = 2


@pytest.fixture
def interrupted_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the third wait of the timer."""
    waits: list[Any] = []
    wait = timer.block_until_ready

    def interrupted(metrics: Any) -> None:
        waits.append(wait(metrics))
        if len(waits) == _WAITS_BEFORE + 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(timer, "block_until_ready", interrupted)


def call(step: Any, state: Any) -> None:
    step(state)


def pause(step: Any, state: Any) -> None:
    step.logger.pause("checkpoint")


def wait(step: Any, state: Any) -> None:
    step.logger.waiting("data")


def summarize(step: Any, state: Any) -> None:
    step.summary()


def close(step: Any, state: Any) -> None:
    step.close()


@pytest.mark.parametrize("touch", [call, pause, wait, summarize, close])
def test_an_interrupt_is_raised_where_the_loop_next_touches_the_logger(
    touch: Callable[[Any, Any], None], interrupted_wait: None
) -> None:
    memory = ListSink()
    train = jax.jit(lambda state: {"count": state["count"] + 1}, donate_argnums=0)
    step = mfu_jax.instrument(train, sinks=[memory], metrics=lambda out: dict(out), **PEAK)
    state = {"count": jnp.int32(0)}
    done = _WAITS_BEFORE + 2  # the first call has none to wait for
    for _ in range(done):
        state = step(state)
    with pytest.raises(KeyboardInterrupt):
        touch(step, state)
    assert int(state["count"]) == done
    step.close()
    assert [record.step for record in memory.records] == list(range(done))
