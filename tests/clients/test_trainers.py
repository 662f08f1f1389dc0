"""Training steps as users of JAX's libraries write them, counted against hand arithmetic."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import mfu_jax
from tests.support.jax_versions import has_nnx_list
from tests.support.sinks import ListSink

ignore_unused_donations = pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")


def instrumented(step: Callable[..., Any], **options: Any) -> tuple[Any, ListSink]:
    memory = ListSink()
    return mfu_jax.instrument(step, sinks=[memory], peak_tflops_per_device=1, **options), memory


def test_plain_optax_loop() -> None:
    optimizer = optax.adamw(1e-3)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def train_step(params: Any, opt_state: Any, x: jax.Array, y: jax.Array) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            return optax.squared_error(jax.nn.relu(x @ params["w1"]) @ params["w2"], y).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    train_step, memory = instrumented(train_step)
    params = {"w1": jnp.ones((8, 16)), "w2": jnp.ones((16, 4))}
    opt_state = optimizer.init(params)
    for _ in range(4):
        params, opt_state, loss = train_step(params, opt_state, jnp.ones((4, 8)), jnp.ones((4, 4)))
    train_step.close()
    flops = train_step.flops
    # No gradient of the first layer's input is needed.
    assert flops.model.per_device == 2 * (2 * 4 * 8 * 16) + 3 * (2 * 4 * 16 * 4)
    assert flops.executed.total == flops.model.per_device
    assert memory.records[-1].scalars["learning/loss"] == float(loss)


class TinyLm(nnx.Module):
    """One causal block over S tokens of width D."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(64, 16, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 16, decode=False, rngs=rngs)
        self.up = nnx.Linear(16, 32, rngs=rngs)
        self.down = nnx.Linear(32, 16, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        x = x + self.attention(x, mask=nn.make_causal_mask(tokens))
        x = x + self.down(nnx.gelu(self.up(x)))
        return self.embed.attend(x)


@pytest.mark.full
@ignore_unused_donations
@pytest.mark.parametrize("donated", [(), (0, 1)])
def test_nnx_language_model_changed_in_place(donated: tuple[int, ...]) -> None:
    model = TinyLm(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    @functools.partial(nnx.jit, donate_argnums=donated)
    def train_step(model: TinyLm, optimizer: nnx.Optimizer, tokens: jax.Array) -> jax.Array:
        def loss_fn(model: TinyLm) -> jax.Array:
            logits = model(tokens)
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return loss

    train_step, memory = instrumented(train_step, convention="dense")
    tokens = jnp.arange(24).reshape(2, 12)
    for _ in range(5):
        train_step(model, optimizer, tokens)
    train_step.close()
    losses = [record.scalars["learning/loss"] for record in memory.records]
    assert losses[-1] < losses[0]
    # A token: q, k, v, out; scores and values over 12 keys; up and down; the tied head.
    token = 2 * (4 * 16 * 16 + 2 * 12 * 16 + 2 * 16 * 32 + 16 * 64)
    assert train_step.flops.model.per_device == 3 * 24 * token
    assert train_step.flops.executed.total == 3 * 24 * token


class Block(nn.Module):
    """A residual block; [B, 8, 8, 4]."""

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        y = nn.Conv(4, (3, 3), use_bias=False)(x)
        y = nn.relu(nn.BatchNorm(use_running_average=not train)(y))
        return x + nn.Conv(4, (1, 1), use_bias=False)(y)


class ResNet(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool = True) -> jax.Array:
        x = nn.Conv(4, (1, 1), use_bias=False)(x)
        x = Block()(x, train=train)
        return nn.Dense(10)(x.mean((1, 2)))


class BatchNormState(TrainState):
    batch_stats: Any


@pytest.mark.full
def test_linen_resnet_with_batch_norm() -> None:
    model, images = ResNet(), jnp.ones((4, 8, 8, 3))
    variables = model.init(jax.random.key(0), images)
    state = BatchNormState.create(
        apply_fn=model.apply,
        params=variables["params"],
        tx=optax.sgd(0.1, momentum=0.9),
        batch_stats=variables["batch_stats"],
    )

    @functools.partial(jax.jit, donate_argnums=0)
    def train_step(state: BatchNormState, images: jax.Array, labels: jax.Array) -> Any:
        def loss_fn(params: Any) -> Any:
            logits, updates = state.apply_fn(
                {"params": params, "batch_stats": state.batch_stats},
                images,
                mutable=["batch_stats"],
            )
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return losses.mean(), (updates, logits)

        (loss, (updates, logits)), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        state = state.apply_gradients(grads=grads).replace(batch_stats=updates["batch_stats"])
        accuracy = jnp.mean(jnp.argmax(logits, -1) == labels)
        return state, {"loss": loss, "accuracy": accuracy}

    train_step, memory = instrumented(train_step)
    for _ in range(3):
        state, _ = train_step(state, images, jnp.arange(4))
    train_step.close()
    stem = 2 * 4 * 64 * 3 * 4
    # A 3×3 window with zero padding touches 3·8 − 2 = 22 real rows, and as many columns.
    block = 2 * 4 * (22 * 22) * 4 * 4 + 2 * 4 * 64 * 4 * 4
    head = 2 * 4 * 4 * 10
    assert train_step.flops.model.per_device == 2 * stem + 3 * (block + head)
    assert {"learning/loss", "learning/accuracy"} < set(memory.records[0].scalars)


class Vit(nnx.Module):
    """Patches of 4×4, a class token, one pre-norm block, a head; images [B, 8, 8, 3]."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.patches = nnx.Conv(3, 16, (4, 4), strides=(4, 4), padding="VALID", rngs=rngs)
        self.token = nnx.Param(jnp.zeros((1, 1, 16)))
        self.norms = nnx.List([nnx.LayerNorm(16, rngs=rngs) for _ in range(2)])
        self.attention = nnx.MultiHeadAttention(2, 16, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(16, 32, rngs=rngs), nnx.Linear(32, 16, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.head = nnx.Linear(16, 10, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = self.patches(images).reshape(len(images), -1, 16)
        x = jnp.concatenate([jnp.broadcast_to(self.token[...], (len(x), 1, 16)), x], axis=1)
        x = x + self.dropout(self.attention(self.norms[0](x)))
        x = x + self.down(nnx.gelu(self.up(self.norms[1](x))))
        return self.head(x[:, 0])


@pytest.mark.full
@ignore_unused_donations
@has_nnx_list
def test_nnx_vision_transformer() -> None:
    model = Vit(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
    metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"), accuracy=nnx.metrics.Accuracy())

    @nnx.jit
    def train_step(model: Vit, optimizer: Any, metrics: Any, images: Any, labels: Any) -> Any:
        def loss_fn(model: Vit) -> Any:
            logits = model(images)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return losses.mean(), logits

        (loss, logits), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model)
        metrics.update(loss=loss, logits=logits, labels=labels)
        optimizer.update(model, grads)
        return {"loss": loss}

    train_step, memory = instrumented(train_step)
    for _ in range(3):
        out = train_step(model, optimizer, metrics, jnp.ones((2, 8, 8, 3)), jnp.arange(2))
    train_step.close()
    images, tokens = 2, 2 * (1 + 4)
    patches = 2 * (images * 4) * (4 * 4 * 3) * 16
    block = 2 * tokens * (4 * 16 * 16 + 2 * (1 + 4) * 16 + 2 * 16 * 32)
    head = 2 * images * 16 * 10
    assert train_step.flops.model.per_device == 2 * patches + 3 * (block + head)
    assert train_step.flops.executed.total == 2 * patches + 3 * (block + head)
    assert memory.records[-1].scalars["learning/loss"] == float(out["loss"])


class Cnn(nn.Module):
    """What Flax's MNIST example is; images [B, 28, 28, 1]."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for features in (4, 8):
            x = nn.relu(nn.Conv(features, (3, 3))(x))
            x = nn.avg_pool(x, (2, 2), strides=(2, 2))
        x = nn.relu(nn.Dense(16)(x.reshape(len(x), -1)))
        return nn.Dense(10)(x)


@pytest.mark.full
def test_linen_cnn() -> None:
    images = jnp.ones((4, 28, 28, 1))
    state = TrainState.create(
        apply_fn=Cnn().apply,
        params=Cnn().init(jax.random.key(0), images)["params"],
        tx=optax.sgd(0.1, 0.9),
    )

    @jax.jit
    def train_step(state: TrainState, images: jax.Array, labels: jax.Array) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            logits = state.apply_fn({"params": params}, images)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    train_step, _ = instrumented(train_step)
    for _ in range(2):
        state, _ = train_step(state, images, jnp.arange(4))
    train_step.close()
    # Of a 3×3 window, 3·28 − 2 rows and columns are real, and 3·14 − 2 after the first pool.
    first, second = 2 * 4 * (82 * 82) * 1 * 4, 2 * 4 * (40 * 40) * 4 * 8
    dense = 2 * 4 * (7 * 7 * 8 * 16 + 16 * 10)
    assert train_step.flops.model.per_device == 2 * first + 3 * (second + dense)


@pytest.mark.full
def test_pmap_trainer() -> None:
    devices = jax.local_device_count()

    @functools.partial(jax.pmap, axis_name="batch", donate_argnums=0)
    def train_step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        loss, grads = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        grads = jax.lax.pmean(grads, "batch")
        return w - 0.1 * grads, {"loss": jax.lax.pmean(loss, "batch")}

    train_step, memory = instrumented(train_step)
    w = jnp.ones((devices, 8, 4))
    for _ in range(3):
        w, metrics = train_step(w, jnp.ones((devices, 16, 8)))
    train_step.close()
    assert train_step.flops.model.per_device == 2 * (2 * 16 * 8 * 4)
    assert train_step.flops.executed.total == 2 * (2 * 16 * 8 * 4)
    assert memory.records[-1].scalars["learning/loss"] == float(metrics["loss"][0])


def test_gan_of_two_jitted_functions() -> None:
    def discriminate(d: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.mean(jax.nn.softplus(x @ d))

    @jax.jit
    def train_discriminator(d: jax.Array, g: jax.Array, x: jax.Array, z: jax.Array) -> Any:
        fake = z @ g
        loss, grad = jax.value_and_grad(lambda d: discriminate(d, fake) - discriminate(d, x))(d)
        return d - 0.1 * grad, {"loss": loss}

    @jax.jit
    def train_generator(d: jax.Array, g: jax.Array, z: jax.Array) -> Any:
        loss, grad = jax.value_and_grad(lambda g: -discriminate(d, z @ g))(g)
        return g - 0.1 * grad, {"loss": loss}

    memory = ListSink()
    with mfu_jax.MetricLogger(sinks=[memory]) as logger:
        first = mfu_jax.instrument(train_discriminator, logger=logger, peak_tflops_per_device=1)
        second = mfu_jax.instrument(train_generator, logger=logger, peak_tflops_per_device=1)
        d, g, x, z = jnp.ones((8, 4)), jnp.ones((6, 8)), jnp.ones((16, 8)), jnp.ones((16, 6))
        for _ in range(3):
            with logger.step():
                d, _ = first(d, g, x, z)
                g, _ = second(d, g, z)
    generate, judge = 2 * 16 * 6 * 8, 2 * 16 * 8 * 4
    # The first generates without gradient and judges twice with the gradient of d; the second has
    # no gradient of d, but needs it of what it generated.
    expected = (generate + 2 * 2 * judge) + (2 * generate + 2 * judge)
    last = memory.records[-1].scalars
    assert last["perf/per_device_tflops"] * 1e12 == pytest.approx(expected, rel=1e-12)
    assert "learning/train_generator/loss" in last


def test_lora_with_frozen_weights() -> None:
    layers, width, rank, rows = 3, 16, 2, 8
    frozen = [jnp.eye(width)] * layers
    adapters = [(jnp.ones((width, rank)), jnp.zeros((rank, width))) for _ in range(layers)]

    @functools.partial(jax.jit, donate_argnums=0)
    def train_step(adapters: Any, frozen: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        def loss_fn(adapters: Any) -> jax.Array:
            h = x
            for w, (a, b) in zip(frozen, adapters, strict=True):
                h = jnp.tanh(h @ w + (h @ a) @ b)
            return jnp.mean(h**2)

        loss, grads = jax.value_and_grad(loss_fn)(adapters)
        return jax.tree.map(lambda p, g: p - 0.1 * g, adapters, grads), loss

    train_step, _ = instrumented(train_step)
    for _ in range(2):
        adapters, _ = train_step(adapters, frozen, jnp.ones((rows, width)))
    train_step.close()
    base, low = 2 * rows * width * width, 2 * rows * width * rank
    # Frozen weights pass the gradient on (2 ×), adapters have one of their own, too (3 ×). The
    # first layer's input needs none: there the frozen weights cost 1 ×, a 2 ×, and b 3 ×.
    later = 2 * base + 3 * (low + low)
    first = base + 2 * low + 3 * low
    assert train_step.flops.model.per_device == first + (layers - 1) * later
    assert train_step.flops.executed.total == first + (layers - 1) * later


@pytest.mark.full
def test_outputs_of_a_stateful_model_are_those_of_the_bare_step() -> None:
    def losses(wrap: Callable[[Any], Any]) -> list[Any]:
        model = TinyLm(nnx.Rngs(0))

        @nnx.jit
        def step(model: TinyLm, tokens: jax.Array) -> jax.Array:
            loss, grads = nnx.value_and_grad(lambda m: jnp.mean(m(tokens) ** 2))(model)
            nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model), grads))
            return loss

        wrapped = wrap(step)
        return [np.asarray(wrapped(model, jnp.arange(8).reshape(1, 8))) for _ in range(3)]

    steps: list[Any] = []

    def observed(step: Any) -> Any:
        steps.append(instrumented(step)[0])
        return steps[0]

    ours = losses(observed)
    steps[0].close()
    np.testing.assert_array_equal(losses(lambda step: step), ours)
