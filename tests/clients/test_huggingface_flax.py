"""A Flax model of Hugging Face, in a plain optax step, against hand arithmetic."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import mfu_jax

BATCH, LENGTH, WIDTH, LAYERS, HEADS, VOCABULARY = 2, 12, 16, 2, 2, 64


@pytest.mark.full
def test_flax_gpt2(capsys: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers")  # two seconds of every collection otherwise
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=HEADS,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = transformers.FlaxGPT2LMHeadModel(config, _do_init=False)
    init = jax.jit(model.init_weights, static_argnums=1)
    params = init(jax.random.key(0), (1, LENGTH))
    optimizer = optax.adamw(1e-2)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def train_step(params: Any, opt_state: Any, tokens: jax.Array, dropout: jax.Array) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            logits = model(tokens, params=params, dropout_rng=dropout, train=True).logits
            return optax.softmax_cross_entropy_with_integer_labels(
                logits[:, :-1], tokens[:, 1:]
            ).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    train_step = mfu_jax.instrument(train_step, peak_tflops_per_device=1)
    opt_state = optimizer.init(params)
    tokens = jnp.arange(BATCH * LENGTH).reshape(BATCH, LENGTH)
    for key in jax.random.split(jax.random.key(0), 4):
        params, opt_state, loss = train_step(params, opt_state, tokens, key)
    train_step.close()

    # A layer: q, k, v and out; up to 4 × the width and down. The head is the embedding again.
    layer = 4 * WIDTH * WIDTH + 2 * WIDTH * 4 * WIDTH
    matmuls = 2 * BATCH * LENGTH * (LAYERS * layer + WIDTH * VOCABULARY)
    # Scores and values over all pairs; convention maxtext has half of them under a causal mask.
    all_pairs = 2 * (2 * BATCH * LENGTH * LENGTH * WIDTH) * LAYERS
    flops = train_step.flops
    assert flops.model.dense == 3 * (matmuls + all_pairs)
    assert flops.executed.total == 3 * (matmuls + all_pairs)
    assert flops.model.per_device == 3 * (matmuls + all_pairs // 2)

    lines = [
        line
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("completed step: 3,")
    ]
    assert len(lines) == 1
    assert f"loss: {float(loss):.3f}" in lines[0]
