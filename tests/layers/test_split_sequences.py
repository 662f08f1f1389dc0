"""Attention over sequences that are split over devices, against attention written out in numpy."""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AxisType
from mfu_jax.layers.attention import kernels, ring, ring_splash  # noqa: F401, they register
from mfu_jax.layers.attention.multi_head import AttentionSpec
from mfu_jax.layers.attention.ops import (
    ATTENTION_OPS,
    SPLIT,
    WHOLE,
    AttentionInputs,
    AttentionPattern,
    choose_attention,
)
from mfu_jax.layers.building import Inputs

from tests.layers.attention.test_ops import PATTERNS, attention_inputs, inputs, written_out
from tests.support.floats import assert_close_as_float32
from tests.support.tiny_layers import tiny_builder

AXES = ("data", "fsdp", "fsdp_transpose", "context", "expert", "tensor")


def mesh(data: int, context: int, tensor: int) -> Any:
    return jax.make_mesh((data, 1, 1, context, 1, tensor), AXES, axis_types=(AxisType.Auto,) * 6)


def attended(op: str, x: AttentionInputs) -> jax.Array:
    """The result of the jitted operation over 2 × 2 × 2 devices."""

    def run(arrays: dict[str, Any]) -> jax.Array:
        return ATTENTION_OPS[op](AttentionInputs(**arrays, pattern=x.pattern))

    names = ("q", "k", "v", "segment_ids", "sinks")
    with jax.set_mesh(mesh(2, 2, 2)):
        return jax.jit(run)({name: getattr(x, name) for name in names})


@pytest.mark.parametrize("op", ["dot_product", "ring"])
@pytest.mark.parametrize("need", [None, *PATTERNS])
def test_a_split_sequence_attends_as_a_whole_one(op: str, need: str | None) -> None:
    options, pattern = PATTERNS.get(need or "", ({}, AttentionPattern()))
    arrays = inputs(24, 4, 2, 8)
    sinks = jnp.asarray(options["sinks"]) if "sinks" in options else None
    got = attended(op, attention_inputs(arrays, pattern=pattern, sinks=sinks))
    assert_close_as_float32(got, written_out(*arrays, **options), terms=24)


@pytest.mark.full
def test_the_rings_gradients_are_those_of_the_matrix() -> None:
    arrays = inputs(32, 4, 2, 8)
    sinks = jnp.array([0.3, -1.0, 2.0, 0.0])
    segments = jnp.asarray(arrays[3])

    def total(op: str, parameters: tuple[Any, ...]) -> jax.Array:
        q, k, v, sinks = parameters
        x = AttentionInputs(
            q, k, v, segments, pattern=AttentionPattern(window=9, soft_cap=2), sinks=sinks
        )
        return jnp.sum(jnp.sin(ATTENTION_OPS[op](x)))

    parameters = (*map(jnp.asarray, arrays[:3]), sinks)
    expected = jax.grad(functools.partial(total, "dot_product"))(parameters)
    with jax.set_mesh(mesh(1, 8, 1)):
        got = jax.jit(jax.grad(functools.partial(total, "ring")))(parameters)
    assert_close_as_float32(got, expected, terms=4 * 32)


@pytest.fixture
def interpreted_splash(monkeypatch: pytest.MonkeyPatch) -> None:
    from jax.experimental.pallas.ops.tpu import splash_attention as kernel

    interpreted = functools.partial(kernel.make_splash_mha, interpret=True)
    monkeypatch.setattr(kernel, "make_splash_mha", interpreted)


@pytest.mark.full
@pytest.mark.usefixtures("interpreted_splash")
def test_the_ring_of_splash_kernels_has_the_results_and_gradients_of_the_matrix() -> None:
    *arrays, segments = map(jnp.asarray, inputs(1024, 4, 2, 128))
    rows = jnp.cumsum(jnp.arange(1024) % 300 == 299)[None] + jnp.ones_like(segments)

    def total(op: str, given: Any, segments: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = AttentionInputs(*given, segments, pattern=AttentionPattern(soft_cap=2))
        context = ATTENTION_OPS[op](x)
        return jnp.sum(jnp.sin(context)), context

    def found(op: str) -> Any:
        return jax.jit(jax.grad(functools.partial(total, op), has_aux=True))

    expected = found("dot_product")(arrays, rows)
    with jax.set_mesh(mesh(1, 4, 2)):
        placed = jax.tree.map(ring_splash.in_halves, (arrays, rows))
        got = found("ring_splash")(*placed)
        expected = jax.tree.map(ring_splash.in_halves, expected)
    assert_close_as_float32(got, expected, terms=4 * 1024)


def test_halves_give_every_device_the_same_pairs() -> None:
    """Device i of four has the parts i and 7 - i of eight: every two of them have as many pairs."""
    with jax.set_mesh(mesh(1, 4, 1)):
        places = ring_splash.in_halves(jnp.arange(32)[None])[0].reshape(4, 8)
    assert places[1].tolist() == [4, 5, 6, 7, 24, 25, 26, 27]
    seen = places[:, :, None, None] >= places
    pairs = seen.sum((1, 3))
    own = 8 * 9 // 2
    assert pairs.tolist() == [[own if i == j else 32 for j in range(4)] for i in range(4)]


@pytest.mark.full
@pytest.mark.usefixtures("interpreted_splash")
@pytest.mark.parametrize("need", [None, "window"])
def test_splash_attends_from_each_part(need: str | None) -> None:
    options, pattern = PATTERNS.get(need or "", ({}, AttentionPattern()))
    arrays = inputs(256, 4, 2, 128)
    got = attended("splash", attention_inputs(arrays, pattern=pattern))
    assert_close_as_float32(got, written_out(*arrays, **options), terms=256)


def test_splash_over_parts_is_one_kernel_with_all_keys_on_a_tpu() -> None:
    x = attention_inputs(inputs(256, 4, 2, 128))
    with jax.set_mesh(mesh(1, 4, 2)):
        traced = jax.jit(lambda q: ATTENTION_OPS["splash"](dataclasses.replace(x, q=q))).trace(x.q)
        text = traced.lower(lowering_platforms=("tpu",)).as_text()
    call = next(line for line in text.splitlines() if "tpu_custom_call" in line)
    # A device has 64 of 256 queries and 2 of 4 heads; keys are those of the whole sequence.
    assert "tensor<2x2x64x128xf32>" in call
    assert "tensor<2x1x256x128xf32>" in call
    # Queries, keys and values are pinned to the parts, then keys and values gathered.
    pinned = re.findall(r"sdy.sharding_constraint .*", text)
    assert ['"context"' in line for line in pinned] == [True, True, True, False, False]


def test_what_a_split_sequence_cannot_have_is_said() -> None:
    with pytest.raises(ValueError, match="sequences split over devices"):
        choose_attention("cudnn_flash", platform="gpu", dtype="bfloat16", needs={SPLIT})
    with pytest.raises(ValueError, match="whole sequences"):
        choose_attention("auto", platform="cpu", dtype="float32", needs={SPLIT, WHOLE})
    for platform, op in (("gpu", "dot_product"), ("tpu", "splash")):
        chosen = choose_attention("auto", platform=platform, dtype="bfloat16", needs={SPLIT})
        assert chosen == op


@pytest.mark.full
def test_what_remat_saves_of_a_split_sequence_is_split() -> None:
    """Queries, keys and values are pinned where they have their names: else XLA may gather them."""
    build = tiny_builder(8, rngs=nnx.Rngs(params=1))
    layer = AttentionSpec(heads=4, kv_heads=2, head_dim=4).make(build)
    tokens = jnp.zeros((4, 8), jnp.int32)
    read = Inputs(tokens=tokens, positions=tokens, segment_ids=tokens)
    with jax.set_mesh(mesh(2, 2, 2)):
        jaxpr = jax.make_jaxpr(lambda x: layer(x, read))(jnp.ones((4, 8, 8)))
    names = ("query_proj", "key_proj", "value_proj")
    used = {eqn.invars[0]: eqn for eqn in jaxpr.eqns if eqn.primitive.name == "sharding_constraint"}
    pinned = {
        eqn.params["name"]: str(used[eqn.outvars[0]].params["sharding"].spec)
        for eqn in jaxpr.eqns
        if eqn.primitive.name == "name" and eqn.params["name"] in names
    }
    assert tuple(pinned) == names
    assert all("context" in spec for spec in pinned.values())
