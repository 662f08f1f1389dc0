"""A Flax Linen CNN with a TrainState. Run: python examples/flax_linen.py [METRICS_FILE]"""

import sys
from functools import partial

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

import mfu_jax

BATCH, SIDE, CHANNELS, FEATURES, CLASSES, STEPS = 128, 32, 3, 64, 10, 20
metrics_file = sys.argv[1] if len(sys.argv) > 1 else "runs/flax_linen.jsonl"


class Cnn(nn.Module):
    @nn.compact
    def __call__(self, images):
        x = nn.relu(nn.Conv(FEATURES, (3, 3), padding="VALID")(images))
        return nn.Dense(CLASSES)(x.mean(axis=(1, 2)))


@partial(jax.jit, donate_argnums=0)
def train_step(state, images, labels):
    def loss_fn(params):
        logits = state.apply_fn(params, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    loss, gradient = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=gradient), loss


images = jax.random.normal(jax.random.key(0), (BATCH, SIDE, SIDE, CHANNELS))
labels = jnp.arange(BATCH) % CLASSES
model = Cnn()
params = model.init(jax.random.key(1), images)
state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(1e-3))

train_step = mfu_jax.instrument(train_step, metrics_file=metrics_file)
for _ in range(STEPS):
    state, loss = train_step(state, images, labels)
train_step.close()
