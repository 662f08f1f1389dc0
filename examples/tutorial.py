"""The tutorial's step, from as it was found (0) to as it is left (3); see docs/tutorial.md.

Run: python examples/tutorial.py STAGE [METRICS_FILE]
"""

import sys

import jax
import jax.numpy as jnp
import optax

import mfu_jax

LENGTH, WIDTH, HEADS, LAYERS, VOCABULARY, STEPS = 128, 384, 6, 2, 512, 24

stage = int(sys.argv[1])
metrics_file = sys.argv[2] if len(sys.argv) > 2 else f"runs/tutorial{stage}.jsonl"
is_update_jitted, is_remat, batch = stage >= 1, stage < 2, 4 if stage >= 3 else 1
optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


def block(x, w):
    """One layer: causal attention, then an MLP. x: [batch, length, width]."""
    q, k, v = jnp.split(norm(x) @ w["qkv"], 3, axis=-1)
    q, k, v = (a.reshape(*x.shape[:2], HEADS, -1) for a in (q, k, v))
    attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x = x + attended.reshape(x.shape) @ w["out"]
    return x + jax.nn.relu(norm(x) @ w["up"]) @ w["down"]


def norm(x):
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)


def loss_fn(params, tokens):
    layer = jax.checkpoint(block) if is_remat else block
    x = params["embedding"][tokens]
    for w in params["layers"]:
        x = layer(x, w)
    logits = norm(x) @ params["embedding"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()


def update(params, opt_state, gradient):
    updates, opt_state = optimizer.update(gradient, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, optax.global_norm(gradient)


@jax.jit
def loss_and_gradient(params, tokens):
    return jax.value_and_grad(loss_fn)(params, tokens)


def train_step(params, opt_state, tokens):
    loss, gradient = jax.value_and_grad(loss_fn)(params, tokens)
    params, opt_state, norm = update(params, opt_state, gradient)
    return params, opt_state, {"loss": loss, "grad_norm": norm}


def init(key):
    shapes = {"qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH)}
    shapes |= {"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    keys = iter(jax.random.split(key, 1 + LAYERS * len(shapes)))
    layers = [
        {name: 0.02 * jax.random.normal(next(keys), shape) for name, shape in shapes.items()}
        for _ in range(LAYERS)
    ]
    return {
        "embedding": jax.random.normal(next(keys), (VOCABULARY, WIDTH)) * 0.02,
        "layers": layers,
    }


params = init(jax.random.key(0))
opt_state = optimizer.init(params)
tokens = (jnp.arange(batch)[:, None] + 3 * jnp.arange(LENGTH)) % VOCABULARY

options = {
    "metrics_file": metrics_file,
    "tokens_per_step": batch * LENGTH,
    "profile_steps": "16-19",
    "profile_dir": f"{metrics_file}.profile",
}
if is_update_jitted:
    step = mfu_jax.instrument(jax.jit(train_step, donate_argnums=(0, 1)), **options)
    for _ in range(STEPS):
        params, opt_state, metrics = step(params, opt_state, tokens)
else:
    step = mfu_jax.instrument(loss_and_gradient, metrics=lambda output: output[0], **options)
    for _ in range(STEPS):
        loss, gradient = step(params, tokens)
        params, opt_state, norm = update(params, opt_state, gradient)  # op by op
step.close()
