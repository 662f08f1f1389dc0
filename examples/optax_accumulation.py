"""Optax accumulates the gradients of four calls; the four are one step in the log.

Run: python examples/optax_accumulation.py [METRICS_FILE]
"""

import sys
from functools import partial

import jax
import jax.numpy as jnp
import optax

import mfu_jax

ROWS, WIDTH, STEPS, MICRO_BATCHES = 512, 512, 12, 4
metrics_file = sys.argv[1] if len(sys.argv) > 1 else "runs/optax_accumulation.jsonl"

optimizer = optax.MultiSteps(optax.adamw(1e-3), every_k_schedule=MICRO_BATCHES)


@partial(jax.jit, donate_argnums=(0, 1))
def train_step(w, opt_state, x, y):
    loss, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w - y) ** 2))(w)
    updates, opt_state = optimizer.update(gradient, opt_state, w)
    return optax.apply_updates(w, updates), opt_state, {"loss": loss}


w = jnp.zeros((WIDTH, WIDTH))
opt_state = optimizer.init(w)
batches = jax.random.normal(jax.random.key(0), (MICRO_BATCHES, ROWS, WIDTH))

train_step = mfu_jax.instrument(
    train_step,
    metrics_file=metrics_file,
    calls_per_step=MICRO_BATCHES,
    tokens_per_step=MICRO_BATCHES * ROWS,
)
for _ in range(STEPS):
    for x in batches:
        w, opt_state, metrics = train_step(w, opt_state, x, jnp.sin(x))
train_step.close()
