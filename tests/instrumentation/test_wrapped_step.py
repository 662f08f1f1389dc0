"""What is done with a function without calling it can be done with the instrumented step, too."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import jax
import pytest

import mfu_jax


def scaled(w: jax.Array, factor: float = 3.0) -> jax.Array:
    """Scales."""
    return w * factor


@pytest.fixture(params=[True, False])
def step(request: pytest.FixtureRequest) -> Any:
    return mfu_jax.instrument(jax.jit(scaled), sinks=[], enable_mfu=request.param)


def test_it_has_the_attributes_of_the_wrapped_function(step: Any) -> None:
    for name in ("__module__", "__name__", "__qualname__", "__doc__", "__annotations__"):
        assert getattr(step, name) == getattr(scaled, name), name
    assert step.__wrapped__.__wrapped__ is scaled
    assert inspect.signature(step) == inspect.signature(scaled)


def test_a_copy_is_the_step_itself(step: Any) -> None:
    assert copy.copy(step) is step
    assert copy.deepcopy({"step": step})["step"] is step


def test_pickled_is_the_bare_function() -> None:
    assert pickle.loads(pickle.dumps(mfu_jax.instrument(scaled, sinks=[]))) is scaled
