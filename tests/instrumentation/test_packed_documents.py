"""ΣL² of the step's own batch, from its segment ids to the record, read one step late."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import mfu_jax
from mfu_jax.flops.traced.masks.pairs import document_pairs, read_pairs
from tests.support.sinks import ListSink

B, S, D = 2, 12, 4
LENGTHS = ([5, 7], [12], [1, 2, 3], [4, 4, 4])


@jax.jit
def train_step(w: jax.Array, x: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    def loss(w: jax.Array) -> jax.Array:
        with mfu_jax.attention_mask("documents"):
            y = x @ w
            scores = jnp.where(ids[:, :, None] == ids[:, None], y @ y.swapaxes(1, 2), -1e9)
            return jnp.mean((jax.nn.softmax(scores) @ x) ** 2)

    value, gradient = jax.value_and_grad(loss)(w)
    return w - 0.1 * gradient, value


def ids_of(lengths: list[int]) -> jax.Array:
    row = [document for document, n in enumerate(lengths, 1) for _ in range(n)]
    return jnp.array([row + [0] * (S - len(row))] * B)


def flops_of(sink: ListSink) -> list[float]:
    return [record.scalars["perf/per_device_tflops"] * 1e12 for record in sink.records]


@pytest.mark.full
def test_every_step_has_the_flops_of_its_own_documents() -> None:
    w, x = jnp.eye(D), jnp.ones((B, S, D))
    count = mfu_jax.count_model_flops(train_step, w, x, ids_of([S]))
    readers: set[int] = set()

    def cost_of(pairs: jax.Array) -> Callable[[], mfu_jax.StepCost]:
        def cost() -> mfu_jax.StepCost:
            readers.add(threading.get_ident())
            flops = count.total_for_documents(read_pairs(pairs), of=B * S * S)
            return mfu_jax.StepCost(model_flops_per_device=flops, peak_flops_per_sec=1e12)

        return cost

    memory = ListSink()
    with mfu_jax.MetricLogger(sinks=[memory]) as logger:
        for step, lengths in enumerate(LENGTHS):
            pairs = jax.jit(document_pairs)(ids_of(lengths))
            w, loss = train_step(w, x, ids_of(lengths))
            logger.record(step, {"loss": loss}, cost=cost_of(pairs))
    # y = x w needs no gradient of x. Scores y yᵀ have two gradients, values only that of the
    # scores: 3 + 2 times a product over the pairs.
    weights, pair = 2 * (2 * B * S * D * D), 5 * 2 * D
    expected = [weights + pair * B * sum(n * n for n in lengths) for lengths in LENGTHS]
    assert flops_of(memory) == pytest.approx(expected, rel=1e-12)
    assert threading.get_ident() not in readers


def test_other_masks_are_left_as_they_are() -> None:
    def attend(q: jax.Array) -> Any:
        with mfu_jax.attention_mask("causal"):
            return q @ q.swapaxes(1, 2) @ q

    count = mfu_jax.count_model_flops(attend, jax.ShapeDtypeStruct((B, S, D), "float32"))
    assert count.total_for_documents(1, of=B * S * S) == count.total == 2 * (2 * B * S * S * D)


def test_an_instrumented_step_has_the_flops_of_its_own_documents() -> None:
    memory = ListSink()
    step = mfu_jax.instrument(
        train_step,
        segment_ids=lambda w, x, ids: ids,
        peak_tflops_per_device=1.0,
        sinks=[memory],
    )
    w, x = jnp.eye(D), jnp.ones((B, S, D))
    for lengths in LENGTHS:
        w, _ = step(w, x, ids_of(lengths))
    step.close()
    weights, pair = 2 * (2 * B * S * D * D), 5 * 2 * D  # as above
    expected = [weights + pair * B * sum(n * n for n in lengths) for lengths in LENGTHS]
    assert flops_of(memory) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("convention", ["maxtext", "dense"])
def test_densely_all_pairs_of_every_batch_are_counted(convention: str) -> None:
    memory = ListSink()
    step = mfu_jax.instrument(
        train_step,
        segment_ids=lambda w, x, ids: ids,
        convention=convention,
        peak_tflops_per_device=1.0,
        sinks=[memory],
    )
    step(jnp.eye(D), jnp.ones((B, S, D)), ids_of([5, 7]))
    step.close()
    pairs = S * S if convention == "dense" else 5**2 + 7**2
    assert flops_of(memory) == pytest.approx([4 * B * S * D * D + 10 * D * B * pairs], rel=1e-12)
    shown = "\n".join(text for tag, text in memory.texts if tag.startswith("setup"))
    assert ("with all pairs of packed documents" in shown) == (convention != "dense")


def test_causal_documents_have_the_pairs_up_to_each_query() -> None:
    @jax.jit
    @mfu_jax.attention_mask("causal_documents")
    def step(x: jax.Array, ids: jax.Array) -> jax.Array:
        return jnp.sum(x @ x.swapaxes(1, 2) @ x)

    memory = ListSink()
    instrumented = mfu_jax.instrument(
        step, segment_ids=lambda x, ids: ids, peak_tflops_per_device=1.0, sinks=[memory]
    )
    for lengths in LENGTHS:
        instrumented(jnp.ones((B, S, D)), ids_of(lengths))
    instrumented.close()
    causal = [sum(n * (n + 1) // 2 for n in lengths) for lengths in LENGTHS]
    assert flops_of(memory) == pytest.approx([2 * 2 * B * D * pairs for pairs in causal], rel=1e-12)


def test_without_segment_ids_all_pairs_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    memory = ListSink()
    step = mfu_jax.instrument(
        train_step, segment_ids=lambda w, x, ids: x, peak_tflops_per_device=1.0, sinks=[memory]
    )
    for _ in range(3):
        step(jnp.eye(D), jnp.ones((B, S, D)), ids_of([S]))
    step.close()
    whole = 2 * (2 * B * S * D * D) + 5 * 2 * D * B * S * S  # as above
    assert flops_of(memory) == pytest.approx([whole] * 3, rel=1e-12)
    (line,) = caplog.messages
    assert "all its pairs are counted" in line
    assert "expected an array of ints" in line
