"""A two-layer network in plain JAX. Run: python examples/plain_jax.py [METRICS_FILE]"""

import sys
from functools import partial

import jax
import jax.numpy as jnp

import mfu_jax

ROWS, WIDTH, HIDDEN, STEPS = 1024, 256, 1024, 20
metrics_file = sys.argv[1] if len(sys.argv) > 1 else "runs/plain_jax.jsonl"


@partial(jax.jit, donate_argnums=0)
def train_step(params, x, y):
    def loss_fn(params):
        prediction = jax.nn.gelu(x @ params["up"]) @ params["down"]
        return jnp.mean((prediction - y) ** 2)

    loss, gradient = jax.value_and_grad(loss_fn)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient), {"loss": loss}


keys = jax.random.split(jax.random.key(0), 3)
params = {
    "up": 0.05 * jax.random.normal(keys[0], (WIDTH, HIDDEN)),
    "down": 0.05 * jax.random.normal(keys[1], (HIDDEN, WIDTH)),
}
x = jax.random.normal(keys[2], (ROWS, WIDTH))

train_step = mfu_jax.instrument(train_step, metrics_file=metrics_file)
for _ in range(STEPS):
    params, metrics = train_step(params, x, jnp.sin(x))
train_step.close()
