"""A Flax NNX model, changed in place. Run: python examples/flax_nnx.py [METRICS_FILE]"""

import sys

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import mfu_jax

ROWS, WIDTH, HIDDEN, CLASSES, STEPS = 1024, 512, 1024, 10, 20
metrics_file = sys.argv[1] if len(sys.argv) > 1 else "runs/flax_nnx.jsonl"


class Mlp(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, HIDDEN, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, CLASSES, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


@nnx.jit
def train_step(model, optimizer, x, labels):
    def loss_fn(model):
        logits = model(x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    loss, gradient = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, gradient)
    return loss


model = Mlp(nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
x = jax.random.normal(jax.random.key(0), (ROWS, WIDTH))
labels = jnp.argmax(x[:, :CLASSES], axis=1)

train_step = mfu_jax.instrument(train_step, metrics_file=metrics_file)
for _ in range(STEPS):
    train_step(model, optimizer, x, labels)
train_step.close()
