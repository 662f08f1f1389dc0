"""An index that travels around devices decides what they run: both counts follow it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from mfu_jax.flops.executed.control_flow import evaluation
from mfu_jax.flops.executed.counting import executed_flops
from mfu_jax.flops.traced.counting import count_model_flops
from mfu_jax.flops.traced.integers import shards
from tests.support.program_rings import (
    BODIES,
    DEVICES,
    ONE,
    PLATFORMS,
    RECORDED,
    Counted,
    causal,
    mapped,
    multiplied,
    onwards,
)
from tests.support.recorded import count


def what_ran(program: Any, arguments: tuple[Any, ...]) -> list[int]:
    """The products of each device, which it counted itself."""
    arrays = [jax.device_put(np.ones(a.shape, a.dtype), a.sharding) for a in arguments]
    return np.asarray(program(*arrays)[1]).tolist()


@pytest.mark.parametrize("name", BODIES)
def test_both_counts_are_what_the_devices_ran(name: str) -> None:
    step, arguments = mapped(BODIES[name], jax.devices())
    program = jax.jit(step).lower(*arguments).compile()
    ran = what_ran(program, arguments)
    traced, executed = count_model_flops(step, *arguments), executed_flops(program)
    assert (traced.unaccounted, executed.unaccounted) == ((), ())
    assert traced.total == sum(ran) * ONE
    assert executed.total == sum(ran) * ONE // DEVICES
    if len(set(ran)) > 1:
        (flag,) = executed.flags
        assert f"{min(ran) * ONE:,} to {max(ran) * ONE:,} FLOPs" in flag.text
    else:
        assert executed.flags == ()


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("name", RECORDED)
def test_recorded_rings(platform: str, name: str) -> None:
    step, arguments = mapped(BODIES[name], jax.devices())
    ran = what_ran(jax.jit(step).lower(*arguments).compile(), arguments)
    executed = count(f"{platform}_rings_{name}")
    assert executed.total == sum(ran) * ONE // DEVICES
    assert executed.unaccounted == ()


def test_the_gradient_of_a_ring() -> None:
    step, arguments = mapped(causal, jax.devices())

    def loss(w: jax.Array, x: jax.Array) -> Any:
        y, n = step(w, x)
        return jnp.sum(y), n

    def gradient(w: jax.Array, x: jax.Array) -> Any:
        (value, n), grads = jax.value_and_grad(loss, (0, 1), has_aux=True)(w, x)
        return value, n, grads

    program = jax.jit(gradient).lower(*arguments).compile()
    flops = 3 * sum(what_ran(program, arguments)) * ONE
    traced, executed = count_model_flops(gradient, *arguments), executed_flops(program)
    assert (traced.unaccounted, executed.unaccounted) == ((), ())
    assert (traced.total, executed.total * DEVICES) == (flops, flops)


def from_data(w: jax.Array, x: jax.Array) -> Counted:
    """The index starts from the batch."""

    def run(_: Any, carry: Any) -> Any:
        counted, index = carry
        counted = lax.cond(index > 1, lambda c: multiplied(w, c), lambda c: c, counted)
        return counted, lax.ppermute(index, "ring", onwards(4))

    return lax.fori_loop(0, 4, run, ((x, jnp.int32(0)), jnp.argmax(x[0])))[0]


def from_data_of_one(w: jax.Array, x: jax.Array) -> Counted:
    """One device's index is from the batch: it reaches all of them."""
    own = lax.axis_index("ring")

    def run(_: Any, carry: Any) -> Any:
        counted, index = carry
        counted = lax.cond(index > 1, lambda c: multiplied(w, c), lambda c: c, counted)
        return counted, lax.ppermute(index, "ring", onwards(4))

    start = jnp.where(own == 2, jnp.argmax(x[0]).astype(own.dtype), own)
    return lax.fori_loop(0, 4, run, ((x, jnp.int32(0)), start))[0]


def is_flagged(step: Any, arguments: tuple[Any, ...]) -> tuple[bool, bool]:
    """Whether the traced count lists a gap, and the executed one a choice that data makes."""
    traced = count_model_flops(step, *arguments)
    executed = executed_flops(jax.jit(step).lower(*arguments).compile())
    flags = [flag.text for flag in executed.flags]
    return bool(traced.unaccounted), any("depends on data" in text for text in flags)


@pytest.mark.parametrize("body", [from_data, from_data_of_one])
def test_an_index_from_data_stays_a_gap(body: Any) -> None:
    assert is_flagged(*mapped(body, jax.devices())) == (True, True)


def test_past_the_limits_it_stays_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "_MOST_SHARES", DEVICES // 2 - 1)
    monkeypatch.setattr(evaluation, "MAX_STEPS", 100)
    assert is_flagged(*mapped(causal, jax.devices())) == (True, True)


RING = """HloModule ring, num_partitions=4

%body (s: (s32[], s32[], f32[4,4])) -> (s32[], s32[], f32[4,4]) {{
  %s = (s32[], s32[], f32[4,4]) parameter(0)
  %t = s32[] get-tuple-element(%s), index=0
  %i = s32[] get-tuple-element(%s), index=1
  %x = f32[4,4] get-tuple-element(%s), index=2
  %one = s32[] constant(1)
  %later = s32[] add(%t, %one)
  %next = s32[] collective-permute(%i), {attributes}
  %even = s32[] and(%i, %one)
  %y = f32[4,4] conditional(%even, %x, %x), branch_computations={{%same, %product}}
  ROOT %r = (s32[], s32[], f32[4,4]) tuple(%later, %next, %y)
}}

%same (a: f32[4,4]) -> f32[4,4] {{
  ROOT %a = f32[4,4] parameter(0)
}}

%product (b: f32[4,4]) -> f32[4,4] {{
  %b = f32[4,4] parameter(0)
  ROOT %d = f32[4,4] dot(%b, %b), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
}}

%goes_on (s2: (s32[], s32[], f32[4,4])) -> pred[] {{
  %s2 = (s32[], s32[], f32[4,4]) parameter(0)
  %t2 = s32[] get-tuple-element(%s2), index=0
  %end = s32[] constant(3)
  ROOT %c = pred[] compare(%t2, %end), direction=LT
}}

ENTRY %main (x0: f32[4,4]) -> (s32[], s32[], f32[4,4]) {{
  %x0 = f32[4,4] parameter(0)
  %zero = s32[] constant(0)
  %p = u32[] partition-id()
  %own = s32[] convert(%p)
  %start = (s32[], s32[], f32[4,4]) tuple(%zero, %own, %x0)
  ROOT %w = (s32[], s32[], f32[4,4]) while(%start), condition=%goes_on, body=%body
}}
"""
PAIRS = "source_target_pairs={{0,1},{1,2},{2,3}}"
PRODUCT = 2 * 4**3


def test_an_exchange_in_a_text() -> None:
    # Devices' indices in three steps: 0 0 0, 1 0 0, 2 1 0 and 3 2 1; four of them are odd.
    counted = executed_flops(RING.format(attributes=f"channel_id=1, {PAIRS}"))
    assert counted.total == 4 * PRODUCT // 4
    assert not any("depends on data" in flag.text for flag in counted.flags)


@pytest.mark.parametrize(
    "attributes",
    [PAIRS, f"channel_id=1, {PAIRS}, slice_sizes={{{{1}}}}"],
    ids=["among replicas", "parts of arrays"],
)
def test_an_exchange_that_is_not_evaluated_stays_a_gap(attributes: str) -> None:
    counted = executed_flops(RING.format(attributes=attributes))
    # Two devices multiply in the first step; in the other two, all of them may.
    assert counted.total == (2 + 2 * 4) * PRODUCT // 4
    assert any("depends on data" in flag.text for flag in counted.flags)
