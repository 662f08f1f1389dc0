"""Routers and experts against loops over tokens, written out in numpy."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from mfu_jax.layers.building import Inputs
from mfu_jax.layers.feed_forward.experts import Experts, ExpertsSpec
from mfu_jax.layers.feed_forward.routers import Router, RouterSpec, Routing, highest, moved_bias
from mfu_jax.layers.projections.grouped_matmuls import grouped_dot
from mfu_jax.layers.projections.lora import Lora

from tests.support.floats import assert_close_as_float32
from tests.support.tiny_layers import tiny_builder

B, S, D, F, E = 2, 6, 5, 7, 8
X = np.random.default_rng(0).normal(size=(B, S, D)).astype(np.float32)


def inputs() -> Inputs:
    tokens = jnp.arange(B * S).reshape(B, S)
    return Inputs(tokens=tokens, positions=tokens % S, segment_ids=jnp.ones_like(tokens))


def expert(layer: Experts, number: int, x: np.ndarray) -> np.ndarray:
    gate, up = (x @ np.asarray(w[number]) for w in (layer.wi_0[...], layer.wi_1[...]))
    return (gate / (1 + np.exp(-gate)) * up) @ np.asarray(layer.wo[number])


@pytest.mark.parametrize("count", [1, 3, E])
def test_the_highest_are_those_of_top_k_and_need_no_other_device(count: int) -> None:
    scores = jnp.round(jax.random.normal(jax.random.key(0), (16, S, E)), 1) + 0.0  # some equal
    np.testing.assert_array_equal(highest(scores, count), jax.lax.top_k(scores, count)[1])
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, PartitionSpec("data"))
    run = jax.jit(lambda x: highest(x, count), in_shardings=rows)
    assert "all-" not in run.lower(scores).compile().as_text()


@pytest.mark.full
def test_dropless_experts_are_the_weighted_sum_of_the_chosen() -> None:
    layer = ExpertsSpec(router=RouterSpec(experts=E, per_token=3), hidden=F).make(tiny_builder(D))
    logits = X @ np.asarray(layer.router.gate.kernel[...])
    want = np.zeros_like(X)
    for b, s in np.ndindex(B, S):
        best = np.argsort(-logits[b, s])[:3]
        weights = np.exp(logits[b, s, best])
        for number, weight in zip(best, weights / weights.sum(), strict=True):
            want[b, s] += weight * expert(layer, number, X[b, s])
    assert_close_as_float32(layer(jnp.asarray(X), inputs()), want, terms=F * D)


@pytest.mark.full
@pytest.mark.parametrize("weigh_inputs", [False, True])
def test_what_a_tpus_kernel_leaves_of_other_devices_rows_is_in_no_gradient(
    weigh_inputs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device of experts 2 to 4, of which 3 has no row; interpreted, those rows are NaN."""
    interpreted = functools.partial(grouped_dot, interpret=True)
    monkeypatch.setattr("mfu_jax.layers.feed_forward.experts.grouped_dot", interpreted)
    lora = Lora(rank=2, scale=2.0, targets=frozenset({"wi_0", "wo"}))
    builder = dataclasses.replace(tiny_builder(D), lora=lora)
    router = RouterSpec(experts=E, per_token=2)
    spec = ExpertsSpec(router=router, hidden=F, bias=True, clamp=1.0, weigh_inputs=weigh_inputs)
    layer, random = spec.make(builder), np.random.default_rng(1)
    x, shares = (jnp.asarray(random.normal(size=(2, 32, width)), "float32") for width in (D, 2))
    chosen = np.stack([random.permutation([0, 1, 2, 4, 5, 6, 7])[:2] for _ in range(64)])
    weights = {
        name: jnp.asarray(random.normal(size=(3, *weight.shape[1:])), "float32")
        for name, weight in layer._weights().items()
    }

    def gradients(on_tpu: bool) -> Any:
        layer.on_tpu = on_tpu

        def loss(x: jax.Array, shares: jax.Array, weights: dict[str, jax.Array]) -> jax.Array:
            routing = Routing(jnp.asarray(chosen.reshape(2, 32, 2)), shares)
            return (layer._sorted_rows(x, routing, weights, first=2, own=3) ** 2).sum()

        return jax.tree.leaves(jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(x, shares, weights))

    for kernels, xlas in zip(gradients(True), gradients(False), strict=True):
        assert_close_as_float32(kernels, xlas, terms=F * D * 64)


@pytest.mark.full
@pytest.mark.parametrize("weigh_inputs", [False, True])
@pytest.mark.parametrize("by_matmul", [False, True])
def test_experts_of_a_capacity_drop_what_comes_after_it_is_full(
    by_matmul: bool, weigh_inputs: bool
) -> None:
    router = RouterSpec(experts=E, per_token=2)
    spec = ExpertsSpec(
        router=router,
        hidden=F,
        capacity_factor=1.0,
        slots_by_matmul=by_matmul,
        weigh_inputs=weigh_inputs,
    )
    layer = spec.make(tiny_builder(D))
    routing = layer.router(jnp.asarray(X), inputs())
    capacity = -(-S * 2 // E)
    want = np.zeros_like(X)
    dropped = 0
    for b in range(B):
        taken = dict.fromkeys(range(E), 0)
        for s in range(S):
            chosen = zip(routing.experts[b, s].tolist(), routing.weights[b, s], strict=True)
            for number, weight in chosen:
                taken[number] += 1
                dropped += taken[number] > capacity
                if taken[number] <= capacity:
                    before, after = (weight, 1.0) if weigh_inputs else (1.0, weight)
                    out = expert(layer, number, float(before) * X[b, s])
                    want[b, s] += float(after) * out
    assert dropped
    assert_close_as_float32(layer(jnp.asarray(X), inputs()), want, terms=F * D)


@pytest.mark.full
def test_moving_rows_by_matmuls_has_the_gradients_of_gathers() -> None:
    spec = ExpertsSpec(router=RouterSpec(experts=E, per_token=2), hidden=F, capacity_factor=1.0)
    layer = spec.make(tiny_builder(D))

    def gradients(by_matmul: bool) -> Any:
        layer.spec = dataclasses.replace(spec, slots_by_matmul=by_matmul)
        graph, weights = nnx.split(layer)
        loss = jax.grad(lambda w, x: (nnx.merge(graph, w)(x, inputs()) ** 2).sum(), (0, 1))
        return jax.tree.leaves(jax.jit(loss)(weights, jnp.asarray(X)))

    for by_matmul, by_gather in zip(gradients(True), gradients(False), strict=True):
        assert_close_as_float32(by_matmul, by_gather, terms=F * D * S)


@pytest.mark.full
def test_slots_and_their_gradients_stay_where_the_experts_are() -> None:
    """Slots, both products, the result: else XLA gathers all batches for the matrices' gradients.

    Forward and backward: eight devices as fsdp 4 × expert 2.
    """
    sizes = {"data": 1, "fsdp": 4, "fsdp_transpose": 1, "context": 1, "expert": 2, "tensor": 1}
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * 6)
    spec = ExpertsSpec(router=RouterSpec(experts=E, per_token=2), hidden=8, capacity_factor=1.0)
    layer = spec.make(tiny_builder(8))
    tokens = jnp.zeros((8, S), jnp.int32)
    read = Inputs(tokens=tokens, positions=tokens, segment_ids=tokens + 1)
    with jax.set_mesh(mesh):
        jaxpr = jax.make_jaxpr(jax.grad(lambda x: layer(x, read).sum()))(jnp.ones((8, S, 8)))
    specs = [
        eqn.params["sharding"].spec
        for eqn in jaxpr.eqns
        if eqn.primitive.name == "sharding_constraint"
    ]
    assert sum(len(spec) > 1 and spec[0] == "expert" for spec in specs) == 2 * 4


def router(**keys: Any) -> Router:
    return RouterSpec(**{"experts": E, "per_token": 2, **keys}).make(tiny_builder(D))


def test_a_bias_changes_the_choice_but_not_the_weights() -> None:
    plain = router(score="sigmoid", bias="choice", normalize=False)
    plain.choice_bias.set_value(jnp.zeros(E).at[5].set(10.0))
    routing = plain(jnp.asarray(X), inputs())
    assert (np.asarray(routing.experts) == 5).any(-1).all()
    scores = 1 / (1 + np.exp(-(X @ np.asarray(plain.gate.kernel[...]))))
    want = np.take_along_axis(scores, np.asarray(routing.experts), -1)
    assert_close_as_float32(routing.weights, want, terms=D)


def test_only_the_best_groups_are_open() -> None:
    layer = router(score="sigmoid", groups=4, top_groups=1)
    scores = 1 / (1 + np.exp(-(X @ np.asarray(layer.gate.kernel[...]))))
    best = scores.reshape(B, S, 4, 2).sum(-1).argmax(-1)  # groups of two: both count
    chosen = np.asarray(layer(jnp.asarray(X), inputs()).experts)
    assert (chosen // 2 == best[..., None]).all()


def test_a_token_goes_to_an_expert_once_though_too_few_are_open() -> None:
    layer = router(score="sigmoid", groups=4, top_groups=1, per_token=5)
    chosen = np.sort(np.asarray(layer(jnp.asarray(X), inputs()).experts), axis=-1)
    assert (np.diff(chosen) > 0).all()


def test_hashed_routing_depends_on_the_token_alone() -> None:
    layer, read = router(hashed=True, score="sigmoid"), inputs()
    chosen = np.asarray(layer(jnp.asarray(X), read).experts)
    again = np.asarray(layer(jnp.asarray(X[::-1].copy()), read).experts)
    assert (chosen == again).all()
    assert (chosen[..., 0] != chosen[..., 1]).all()
    assert len(set(chosen[..., 0].ravel().tolist())) > 2


@pytest.mark.full
def test_the_balance_loss_is_one_for_an_even_load() -> None:
    layer = router(balance_weight=0.5, per_token=E)
    layer.gate.kernel.set_value(jnp.zeros((D, E)))
    read = inputs()
    layer(jnp.asarray(X), read)
    # All experts are chosen alike and have the same probability: E · Σ (1/E) · (1/E) = 1.
    assert float(read.notes["balance_loss"]) == pytest.approx(0.5)


def test_the_bias_moves_against_the_load() -> None:
    moved = moved_bias(jnp.zeros(4), jnp.array([0.0, 4.0, 2.0, 2.0]), 0.25)
    assert moved.tolist() == [0.25, -0.25, 0.0, 0.0]


@pytest.mark.full
def test_each_expert_has_an_adapter_of_its_own() -> None:
    rank, scale = 2, 0.5
    spec = ExpertsSpec(router=RouterSpec(experts=E, per_token=3), hidden=F)
    lora = Lora(rank=rank, scale=scale, targets=frozenset({"wi_1", "wo", "q_proj"}))
    layer = spec.make(dataclasses.replace(tiny_builder(D), lora=lora))
    assert set(layer.adapters) == {"wi_1", "wo"}
    rng = np.random.default_rng(3)
    merged = spec.make(tiny_builder(D))
    for name, adapter in layer.adapters.items():
        b = rng.normal(size=adapter.lora_b[...].shape).astype(np.float32)
        adapter.lora_b.set_value(jnp.asarray(b))
        added = np.einsum("eir,ero->eio", np.asarray(adapter.lora_a[...]), b) * scale
        getattr(merged, name).set_value(getattr(layer, name)[...] + added)
    merged.wi_0.set_value(layer.wi_0[...])
    merged.router.gate.kernel.set_value(layer.router.gate.kernel[...])
    want = merged(jnp.asarray(X), inputs())
    assert_close_as_float32(layer(jnp.asarray(X), inputs()), np.asarray(want), terms=F * D)
    for each in (layer, merged):
        each.spec = dataclasses.replace(spec, capacity_factor=1.0)
    want = merged(jnp.asarray(X), inputs())
    assert_close_as_float32(layer(jnp.asarray(X), inputs()), np.asarray(want), terms=F * D)
