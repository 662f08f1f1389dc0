"""Loops of JAX and optax alone."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tests.support.client import Bare, Client

ROWS, INPUTS, HIDDEN, OUTPUTS = 4, 8, 16, 2


def matmul(m: int, k: int, n: int) -> int:
    """FLOPs of an [m, k] by [k, n] product."""
    return 2 * m * k * n


# The first layer needs no gradient of its input (2 ×), the second one does (3 ×).
MLP = 2 * matmul(ROWS, INPUTS, HIDDEN) + 3 * matmul(ROWS, HIDDEN, OUTPUTS)


def make_params() -> dict[str, jax.Array]:
    one, two = jax.random.split(jax.random.key(0))
    return {
        "w1": jax.random.normal(one, (INPUTS, HIDDEN)),
        "w2": jax.random.normal(two, (HIDDEN, OUTPUTS)),
    }


def mlp_loss(params: Any, x: jax.Array) -> jax.Array:
    return jnp.mean((jnp.tanh(x @ params["w1"]) @ params["w2"]) ** 2)


def norm_of(tree: Any) -> jax.Array:
    return jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(tree)))


def batches(rows: int = ROWS, columns: int = INPUTS) -> Iterator[jax.Array]:
    for key in jax.random.split(jax.random.key(1), 100):
        yield jax.random.normal(key, (rows, columns))


def gradient_accumulation(observer: Bare) -> Iterator[Any]:
    """A scan over three microbatches inside the step."""
    optimizer = optax.adam(1e-2)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def train_step(params: Any, opt_state: Any, x: jax.Array) -> Any:
        def add(total: Any, rows: jax.Array) -> Any:
            loss, grads = jax.value_and_grad(mlp_loss)(params, rows)
            return jax.tree.map(jnp.add, total, (loss, grads)), None

        zeros = jax.tree.map(jnp.zeros_like, (jnp.zeros(()), params))
        (loss, grads), _ = jax.lax.scan(add, zeros, x.reshape(3, ROWS, INPUTS))
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, {"loss": loss / 3}

    train_step = observer.wrap(train_step)
    params = make_params()
    opt_state = optimizer.init(params)
    for x in batches(3 * ROWS):
        params, opt_state, metrics = train_step(params, opt_state, x)
        yield params, metrics


def multi_steps(observer: Bare) -> Iterator[Any]:
    """`optax.MultiSteps`: the optimizer updates at every second call."""
    optimizer = optax.MultiSteps(optax.adamw(1e-2), every_k_schedule=2)

    @jax.jit
    def train_step(params: Any, opt_state: Any, x: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(mlp_loss)(params, x)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    train_step = observer.wrap(train_step)
    params = make_params()
    opt_state = optimizer.init(params)
    for x in batches():
        params, opt_state, loss = train_step(params, opt_state, x)
        yield params, loss


def ema_and_bf16(observer: Bare) -> Iterator[Any]:
    """float32 weights, matmuls in bf16, and a moving average of the weights."""

    @functools.partial(jax.jit, donate_argnums=0)
    def train_step(state: Any, x: jax.Array) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            params = jax.tree.map(lambda w: w.astype(jnp.bfloat16), params)
            return mlp_loss(params, x.astype(jnp.bfloat16)).astype(jnp.float32)

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        params = optax.apply_updates(state["params"], jax.tree.map(lambda g: -0.1 * g, grads))
        ema = optax.incremental_update(params, state["ema"], 0.01)
        return {"params": params, "ema": ema}, {"loss": loss, "norm": norm_of(grads)}

    train_step = observer.wrap(train_step)
    state = {"params": make_params(), "ema": make_params()}
    for x in batches():
        state, metrics = train_step(state, x)
        yield state, metrics


def lora(observer: Bare) -> Iterator[Any]:
    """Adapters beside weights that `optax.multi_transform` freezes."""
    optimizer = optax.multi_transform(
        {"train": optax.adam(1e-2), "freeze": optax.set_to_zero()},
        {"w": "freeze", "a": "train", "b": "train"},
    )

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def train_step(params: Any, opt_state: Any, x: jax.Array) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            y = x @ params["w"] + (x @ params["a"]) @ params["b"]
            return jnp.mean(jnp.tanh(y) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, {"loss": loss}

    train_step = observer.wrap(train_step)
    one, two = jax.random.split(jax.random.key(0))
    params = {
        "w": jax.random.normal(one, (INPUTS, HIDDEN)),
        "a": jax.random.normal(two, (INPUTS, 2)),
        "b": jnp.zeros((2, HIDDEN)),
    }
    opt_state = optimizer.init(params)
    for x in batches():
        params, opt_state, metrics = train_step(params, opt_state, x)
        yield params, metrics


# Nothing needs a gradient of the input: the frozen weights cost 1 ×, a 2 ×, b 3 ×.
LORA = matmul(ROWS, INPUTS, HIDDEN) + 2 * matmul(ROWS, INPUTS, 2) + 3 * matmul(ROWS, 2, HIDDEN)


def gan(observer: Bare) -> Iterator[Any]:
    """Two jitted functions in one loop, one optimizer each."""

    def judge(d: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.mean(jax.nn.softplus(x @ d))

    @jax.jit
    def train_discriminator(d: jax.Array, g: jax.Array, x: jax.Array, z: jax.Array) -> Any:
        fake = z @ g
        loss, grad = jax.value_and_grad(lambda d: judge(d, fake) - judge(d, x))(d)
        return d - 0.1 * grad, {"loss": loss}

    @jax.jit
    def train_generator(d: jax.Array, g: jax.Array, z: jax.Array) -> Any:
        loss, grad = jax.value_and_grad(lambda g: -judge(d, z @ g))(g)
        return g - 0.1 * grad, {"loss": loss}

    train_discriminator = observer.wrap(train_discriminator)
    train_generator = observer.wrap(train_generator)
    d, g = jnp.ones((INPUTS, OUTPUTS)) / 10, jnp.ones((HIDDEN, INPUTS)) / 10
    for x, z in zip(batches(), batches(columns=HIDDEN), strict=True):
        with observer.together():
            d, first = train_discriminator(d, g, x, z)
            g, second = train_generator(d, g, z)
        yield d, g, first, second


# Generates and judges twice for d's gradient; generates and judges once for g's.
_GENERATE, _JUDGE = matmul(ROWS, HIDDEN, INPUTS), matmul(ROWS, INPUTS, OUTPUTS)
GAN = (_GENERATE + 2 * 2 * _JUDGE) + (2 * _GENERATE + 2 * _JUDGE)


def diffusion(observer: Bare) -> Iterator[Any]:
    """A denoiser; the step splits the key that the state carries."""

    @functools.partial(jax.jit, donate_argnums=0)
    def train_step(state: Any, x: jax.Array) -> Any:
        key, noise_key, time_key = jax.random.split(state["key"], 3)
        noise = jax.random.normal(noise_key, x.shape)
        level = jax.random.uniform(time_key, (len(x), 1))
        noisy = jnp.sqrt(1 - level) * x + jnp.sqrt(level) * noise

        def loss_fn(params: Any) -> jax.Array:
            guess = jnp.tanh(noisy @ params["w1"]) @ params["w1"].T
            return jnp.mean((guess - noise) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        params = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)
        return {"params": params, "key": key}, loss

    train_step = observer.wrap(train_step)
    state = {"params": {"w1": make_params()["w1"]}, "key": jax.random.key(7)}
    for x in batches():
        state, loss = train_step(state, x)
        yield state, loss


def key_made_in_the_step(observer: Bare) -> Iterator[Any]:
    """Dropout with a typed key made from a constant inside the step."""

    @jax.jit
    def train_step(params: Any, x: jax.Array) -> Any:
        keep = jax.random.bernoulli(jax.random.key(0), 0.9, x.shape)
        loss, grads = jax.value_and_grad(mlp_loss)(params, jnp.where(keep, x, 0))
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    train_step = observer.wrap(train_step)
    params = make_params()
    for x in batches():
        params, loss = train_step(params, x)
        yield params, loss


def pmap(observer: Bare) -> Iterator[Any]:
    """One replica of the weights on each device."""

    @functools.partial(jax.pmap, axis_name="batch", donate_argnums=0)
    def train_step(params: Any, x: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(mlp_loss)(params, x)
        loss, grads = jax.lax.pmean((loss, grads), "batch")
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), {"loss": loss}

    train_step = observer.wrap(train_step)
    devices = jax.local_device_count()
    params = jax.tree.map(lambda w: jnp.stack([w] * devices), make_params())
    for x in batches(devices * ROWS):
        params, metrics = train_step(params, x.reshape(devices, ROWS, INPUTS))
        yield params, metrics


def shard_map(observer: Bare) -> Iterator[Any]:
    """Data parallelism written out with collectives."""
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    rows, everywhere = PartitionSpec("data"), PartitionSpec()

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(everywhere, rows), out_specs=everywhere, check_vma=False
    )
    def train_shard(params: Any, x: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(mlp_loss)(params, x)
        loss, grads = jax.lax.pmean((loss, grads), "data")
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), {"loss": loss}

    train_step = observer.wrap(jax.jit(train_shard))
    params = jax.device_put(make_params(), NamedSharding(mesh, everywhere))
    for x in batches(4 * ROWS):
        params, metrics = train_step(params, jax.device_put(x, NamedSharding(mesh, rows)))
        yield params, metrics


def sharded_jit(observer: Bare) -> Iterator[Any]:
    """Rows over one axis of a mesh, the hidden layer over the other; the compiler does the rest."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
    places = {"w1": PartitionSpec(None, "model"), "w2": PartitionSpec("model", None)}
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), places)

    @functools.partial(jax.jit, donate_argnums=0)
    def train_step(params: Any, x: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(mlp_loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), {"loss": loss}

    train_step = observer.wrap(train_step)
    params = jax.device_put(make_params(), shardings)
    for x in batches(2 * ROWS):
        rows = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))
        params, metrics = train_step(params, rows)
        yield params, metrics


CLIENTS = (
    Client(name="gradient accumulation", loop=gradient_accumulation, flops=3 * MLP),
    Client(name="optax.MultiSteps", loop=multi_steps, flops=MLP),
    Client(name="EMA, bf16 matmuls", loop=ema_and_bf16, flops=MLP),
    Client(name="LoRA", loop=lora, flops=LORA),
    Client(name="GAN", loop=gan, flops=GAN, shares_logger=True),
    Client(
        name="diffusion",
        loop=diffusion,
        flops=2 * matmul(ROWS, INPUTS, HIDDEN) + 3 * matmul(ROWS, HIDDEN, INPUTS),
    ),
    Client(name="a key made in the step", loop=key_made_in_the_step, flops=MLP),
    Client(name="pmap", loop=pmap, flops=MLP, views=8),
    Client(name="shard_map", loop=shard_map, flops=MLP),
    Client(name="jit over a mesh", loop=sharded_jit, flops=MLP // 2),
)
