"""An Equinox MLP. Run: python examples/equinox_mlp.py [METRICS_FILE]"""

import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import mfu_jax

ROWS, WIDTH, HIDDEN, STEPS = 256, 256, 1024, 20
metrics_file = sys.argv[1] if len(sys.argv) > 1 else "runs/equinox_mlp.jsonl"

optimizer = optax.adamw(1e-3)


@eqx.filter_jit(donate="all-except-first")
def train_step(batch, model, opt_state):
    def loss_fn(model):
        x, y = batch
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    loss, gradient = eqx.filter_value_and_grad(loss_fn)(model)
    updates, opt_state = optimizer.update(gradient, opt_state, model)
    return eqx.apply_updates(model, updates), opt_state, loss


keys = jax.random.split(jax.random.key(0))
x = jax.random.normal(keys[0], (ROWS, WIDTH))
# depth=2: two hidden layers, so three matmuls.
model = eqx.nn.MLP(WIDTH, WIDTH, HIDDEN, depth=2, key=keys[1])
opt_state = optimizer.init(eqx.filter(model, eqx.is_array))

train_step = mfu_jax.instrument(
    train_step, metrics_file=metrics_file, metrics=lambda output: {"loss": output[2]}
)
for _ in range(STEPS):
    model, opt_state, loss = train_step((x, jnp.sin(x)), model, opt_state)
train_step.close()
