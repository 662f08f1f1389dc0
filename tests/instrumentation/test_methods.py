"""`instrument` on methods: inside the body of a class, and bound, with more arguments bound."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import mfu_jax
from tests.support.instrumented import PEAK, batch
from tests.support.sinks import ListSink

_FLOPS = 2 * 4 * 8 * 3


class Model:
    def __init__(self) -> None:
        self.scale = 2.0

    @functools.partial(jax.jit, static_argnums=0)
    def step(self, w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(x @ w) * self.scale


@pytest.mark.parametrize("is_on", [True, False])
def test_as_a_decorator_in_a_class_it_is_a_method(is_on: bool) -> None:
    memory = ListSink()

    class Trainer(Model):
        @mfu_jax.instrument(sinks=[memory], enable_mfu=is_on, **PEAK)
        @functools.partial(jax.jit, static_argnums=0)
        def step(self, w: jax.Array, x: jax.Array) -> jax.Array:
            return jnp.sum(x @ w) * self.scale

    trainer, w = Trainer(), jnp.ones((8, 3))
    loss = [trainer.step(w, batch()) for _ in range(3)][-1]
    assert loss == Model().step(w, batch())
    trainer.step.close()
    assert len(memory.records) == 3 * is_on
    if is_on:
        assert Trainer.step.flops.model.per_device == _FLOPS


@pytest.mark.filterwarnings("ignore:functools.partial will be:FutureWarning")  # Python 3.13's own
def test_what_is_no_method_of_a_class_stays_none() -> None:
    class Trainer:
        step: Any = mfu_jax.instrument(functools.partial(Model().step, jnp.ones((8, 3))), sinks=[])

    assert Trainer().step(batch()) == Model().step(jnp.ones((8, 3)), batch())
    Trainer.step.close()


def test_a_partial_of_a_jitted_method_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    step = mfu_jax.instrument(functools.partial(Model().step, x=batch()), sinks=[], **PEAK)
    assert step(jnp.ones((8, 3))) == Model().step(jnp.ones((8, 3)), batch())
    step.close()
    assert step.flops.model.per_device == _FLOPS
    assert not caplog.records


def test_methods_of_equinox_modules() -> None:
    eqx = pytest.importorskip("equinox")
    w = jnp.ones((8, 3))

    class Bare(eqx.Module):
        w: jax.Array

        @eqx.filter_jit
        def step(self, x: jax.Array) -> jax.Array:
            return jnp.sum(x @ self.w)

    class Decorated(eqx.Module):
        w: jax.Array

        @mfu_jax.instrument(sinks=[], **PEAK)
        @eqx.filter_jit
        def step(self, x: jax.Array) -> jax.Array:
            return jnp.sum(x @ self.w)

    outside = mfu_jax.instrument(Bare(w).step, sinks=[], **PEAK)
    inside = Decorated(w).step  # a method of Equinox's kind around the instrumented step
    expected = Bare(w).step(batch())
    for call, step in ((outside, outside), (inside, inside.__func__)):
        assert call(batch()) == expected
        step.close()
        assert step.flops.model.per_device == _FLOPS


def test_a_wrapper_that_refers_to_a_name_without_a_value_yet_is_jitted() -> None:
    jitted = jax.jit(lambda w, x: jnp.sum(x @ w))

    @mfu_jax.instrument(sinks=[], **PEAK)
    @functools.wraps(jitted)
    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return scale * jitted(w, x)

    scale = 2.0
    assert step(jnp.ones((8, 3)), batch()) == 2 * jitted(jnp.ones((8, 3)), batch())
    step.close()
    assert step.flops.model.per_device == _FLOPS
