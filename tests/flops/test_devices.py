"""Work that differs between devices: both counts follow each device's index."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mfu_jax.flops.executed.counting import executed_flops
from mfu_jax.flops.traced.counting import count_model_flops
from mfu_jax.instrumentation.counts import count_program, traced_model
from tests.support.program_devices import ONE, PROGRAMS, STAGES, build
from tests.support.recorded import count

DEVICES = 8


@pytest.mark.parametrize("name", PROGRAMS)
def test_both_counts_follow_the_index_of_the_device(name: str) -> None:
    flops = PROGRAMS[name][-1]
    function, arguments = build(name, jax.devices())
    step = jax.jit(function)
    model = traced_model(step, arguments, {}, devices=DEVICES)
    counted = count_program(step.lower(*arguments).compile(), model)
    assert model.per_device * DEVICES == flops
    assert (model.unaccounted, counted.executed.unaccounted) == ((), ())
    assert counted.executed.total * DEVICES == flops
    assert counted.ledger.residual == counted.ledger.removed == 0
    (flag,) = counted.executed.flags
    assert f"counted as the mean of {DEVICES} devices" in flag.text


def test_the_flag_has_the_least_and_the_most_of_a_device() -> None:
    function, arguments = build("bounds", jax.devices())
    (flag,) = executed_flops(jax.jit(function).lower(*arguments).compile()).flags
    assert f"{ONE:,} to {DEVICES * ONE:,} FLOPs" in flag.text


@pytest.mark.parametrize("platform", ["v5e", "h100"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_recorded_programs_of_devices_that_differ(platform: str, name: str) -> None:
    executed = count(f"{platform}_devices_{name}")
    assert (executed.total - executed.duplicated) * DEVICES == PROGRAMS[name][-1]
    assert executed.unaccounted == ()


def _on_stages(stages: int, body, out):
    mesh = Mesh(np.array(jax.devices()[:stages]), ("stage",))
    whole = PartitionSpec()
    return jax.shard_map(body, mesh=mesh, in_specs=(whole, whole), out_specs=out, check_vma=False)


W, X = jax.ShapeDtypeStruct((16, 16), jnp.float32), jax.ShapeDtypeStruct((8, 16), jnp.float32)


def test_a_mean_that_is_no_whole_number_is_rounded_down_and_says_so() -> None:
    def body(w, x):
        first = jax.lax.axis_index("stage") == 1
        return jax.lax.cond(first, lambda x: jnp.tanh(x @ w) @ w[:, :3], lambda x: x[:, :3], x)

    step = _on_stages(3, body, PartitionSpec("stage"))
    flops = ONE + 2 * 8 * 16 * 3
    assert count_model_flops(step, W, X).total == flops
    executed = executed_flops(jax.jit(step).lower(W, X).compile())
    assert executed.total == flops // 3 == 1621  # of 4,864 / 3
    assert sum(executed.by_scope.values()) == sum(executed.by_dtype.values()) == executed.total
    (flag,) = executed.flags
    assert f"rounded down: {flops:,} in all" in flag.text


def test_what_a_shard_map_repeats_is_the_models_and_not_removed() -> None:
    step = jax.jit(_on_stages(STAGES, lambda w, x: x @ w, PartitionSpec("stage")))
    flops = count_program(step.lower(W, X).compile(), traced_model(step, (W, X), {}, devices=4))
    share = (STAGES - 1) * ONE // STAGES
    lines = {line.label: line.flops for line in flops.ledger.lines if line.flops}
    assert lines["repeated on every device (3 of 4)"] == share
    assert lines["repeated by the model as well"] == -share
    assert flops.model.per_device == flops.executed.total == ONE
    assert flops.ledger.residual == flops.ledger.removed == 0


def test_rows_of_constants_that_are_alike_are_no_repetition_of_the_model() -> None:
    """The gradient of a mean is the same everywhere; each device multiplies its own rows."""

    def step(w, x):
        return jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) @ w.T))(w)

    mesh = Mesh(np.array(jax.devices()), ("data",))
    rows = NamedSharding(mesh, PartitionSpec("data"))
    x = jax.ShapeDtypeStruct((DEVICES * 8, 16), jnp.float32, sharding=rows)
    w = jax.ShapeDtypeStruct((16, 16), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec()))
    model = traced_model(jax.jit(step), (w, x), {}, devices=DEVICES)
    flops = count_program(jax.jit(step).lower(w, x).compile(), model)
    assert model.per_device == flops.executed.total == 5 * ONE
    assert flops.ledger.residual == flops.ledger.removed == 0


def test_a_branch_that_depends_on_data_of_a_device_stays_a_gap() -> None:
    def body(w, x):
        return jax.lax.cond(x[0, 0] > 0, lambda x: x @ w, lambda x: x, x)

    step = _on_stages(4, body, PartitionSpec("stage"))
    assert count_model_flops(step, W, X).unaccounted
    (flag,) = executed_flops(jax.jit(step).lower(W, X).compile()).flags
    assert "depends on data" in flag.text
