"""What `instrument` reads from outputs that lie on several devices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import mfu_jax
from tests.support.instrumented import PEAK
from tests.support.sinks import ListSink


def _learning(step: Any, memory: ListSink) -> dict[str, float]:
    step.close()
    scalars = memory.records[0].scalars
    return {k.removeprefix("learning/"): v for k, v in scalars.items() if k.startswith("learning/")}


@pytest.mark.parametrize(
    "options", [{}, {"metrics": lambda out: out[1]["loss"]}, {"metrics": lambda out: out[1]}]
)
def test_one_example_on_each_device_is_no_replica(options: Any) -> None:
    devices = jax.device_count()
    mesh = jax.make_mesh((devices,), ("data",), axis_types=(AxisType.Auto,))
    x = jax.device_put(jnp.arange(devices) / 4, NamedSharding(mesh, PartitionSpec("data")))
    memory = ListSink()
    step = mfu_jax.instrument(
        jax.jit(lambda w, x: (w * 2, {"loss": x * w})), sinks=[memory], **PEAK, **options
    )
    step(jnp.float32(1), x)
    assert _learning(step, memory) == {"loss": np.mean(np.arange(devices) / 4)}


def test_pmap_gives_the_first_device_s_values() -> None:
    devices = jax.device_count()
    memory = ListSink()

    def train(w: jax.Array, x: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        return w * 2, {"loss": jax.lax.pmean(jnp.sum(w), "batch"), "own": x}

    step = mfu_jax.instrument(jax.pmap(train, axis_name="batch"), sinks=[memory], **PEAK)
    step(jnp.ones((devices, 3)), jnp.arange(devices) + 5.0)
    assert _learning(step, memory) == {"loss": 3, "own": 5}


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_step_that_returns_only_its_state_is_timed_inside_a_mesh(
    kind: AxisType, caplog: pytest.LogCaptureFixture
) -> None:
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(kind,))
    state = jax.device_put(
        jnp.ones((jax.device_count(), 8)), NamedSharding(mesh, PartitionSpec("data"))
    )
    memory = ListSink()
    step = mfu_jax.instrument(
        jax.jit(lambda s: s * 1.5, donate_argnums=0), sinks=[memory], warmup_steps=0, **PEAK
    )
    with jax.set_mesh(mesh):
        for _ in range(3):
            state = step(state)
    assert _learning(step, memory) == {}
    assert np.asarray(state)[0, 0] == 1.5**3
    assert not caplog.records
