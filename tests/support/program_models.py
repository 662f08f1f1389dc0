"""Programs that are no transformer step, with the FLOPs that each must execute.

Each entry: the function, the shapes of its arguments, matmul FLOPs by hand or None.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Model = tuple[Callable[..., Any], tuple[Any, ...], int | None]


def _of(*dims: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


# Mixture of experts
TOKENS, WIDTH, HIDDEN, EXPERTS, TOP = 256, 128, 256, 8, 2
CAPACITY = TOKENS * TOP // EXPERTS


def _router(x: jax.Array, router: jax.Array) -> tuple[jax.Array, jax.Array]:
    with jax.named_scope("router"):
        return lax.top_k(jax.nn.softmax(x @ router), TOP)


def moe_dense(x: jax.Array, router: jax.Array, wi: jax.Array, wo: jax.Array) -> jax.Array:
    """Every expert computes every token; one-hot weights choose."""
    weights, chosen = _router(x, router)
    gate = jnp.sum(jax.nn.one_hot(chosen, EXPERTS) * weights[..., None], 1)
    hidden = jax.nn.relu(jnp.einsum("td,edf->tef", x, wi))
    return (jnp.einsum("tef,efd->ted", hidden, wo) * gate[..., None]).sum(1)


def moe_ragged(x: jax.Array, router: jax.Array, wi: jax.Array, wo: jax.Array) -> jax.Array:
    """Tokens sorted by expert, then one ragged matmul a layer."""
    weights, chosen = _router(x, router)
    order = jnp.argsort(chosen.reshape(-1))
    sizes = jnp.bincount(chosen.reshape(-1), length=EXPERTS)
    rows = x[order // TOP]
    with jax.named_scope("experts"):
        out = lax.ragged_dot(jax.nn.relu(lax.ragged_dot(rows, wi, sizes)), wo, sizes)
    out = out * weights.reshape(-1)[order][:, None]
    return jnp.zeros_like(x).at[order // TOP].add(out)


def moe_capacity(x: jax.Array, router: jax.Array, wi: jax.Array, wo: jax.Array) -> jax.Array:
    """GShard: one-hot dispatch and combine matmuls, tokens over capacity dropped."""
    weights, chosen = _router(x, router)
    mask = jax.nn.one_hot(chosen, EXPERTS)  # [tokens, top, experts]
    position = jnp.cumsum(mask.reshape(-1, EXPERTS), 0).reshape(mask.shape) * mask - 1
    slots = jax.nn.one_hot(position.astype(jnp.int32), CAPACITY) * mask[..., None]
    dispatch = slots.sum(1)  # [tokens, experts, capacity]
    combine = (slots * weights[..., None, None]).sum(1)
    with jax.named_scope("dispatch"):
        rows = jnp.einsum("tec,td->ecd", dispatch, x)
    with jax.named_scope("experts"):
        rows = jnp.einsum("ecf,efd->ecd", jax.nn.relu(jnp.einsum("ecd,edf->ecf", rows, wi)), wo)
    with jax.named_scope("combine"):
        return jnp.einsum("tec,ecd->td", combine, rows)


MOE_ARGUMENTS = (
    _of(TOKENS, WIDTH),
    _of(WIDTH, EXPERTS),
    _of(EXPERTS, WIDTH, HIDDEN),
    _of(EXPERTS, HIDDEN, WIDTH),
)
ROUTER_FLOPS = 2 * TOKENS * WIDTH * EXPERTS
EXPERT_FLOPS = 2 * (2 * WIDTH * HIDDEN)  # of one token in one expert
MOE_DENSE_FLOPS = ROUTER_FLOPS + TOKENS * EXPERTS * EXPERT_FLOPS
MOE_RAGGED_FLOPS = ROUTER_FLOPS + TOKENS * TOP * EXPERT_FLOPS
MOE_DISPATCH_FLOPS = 2 * (2 * TOKENS * EXPERTS * CAPACITY * WIDTH)
MOE_CAPACITY_FLOPS = ROUTER_FLOPS + EXPERTS * CAPACITY * EXPERT_FLOPS + MOE_DISPATCH_FLOPS

# ResNet-50
IMAGE, IMAGES = 64, 4
_STAGES = ((64, 3), (128, 4), (256, 6), (512, 3))


def resnet_layers() -> list[tuple[int, int, int, int, int]]:
    """Every convolution: kernel, stride, input and output channels, input size (He et al. 2015)."""
    layers = [(7, 2, 3, 64, IMAGE)]
    size, channels = IMAGE // 4, 64
    for stage, (width, blocks) in enumerate(_STAGES):
        for block in range(blocks):
            stride = 2 if stage and not block else 1
            layers.append((1, 1, channels, width, size))
            layers.append((3, stride, width, width, size))
            if not block:
                layers.append((1, stride, channels, 4 * width, size))
            size //= stride
            layers.append((1, 1, width, 4 * width, size))
            channels = 4 * width
    return layers


def _convolve(x: jax.Array, kernel: jax.Array, stride: int) -> jax.Array:
    pad = kernel.shape[0] // 2
    return lax.conv_general_dilated(
        x, kernel, (stride, stride), [(pad, pad)] * 2, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def _norm(x: jax.Array) -> jax.Array:
    mean = x.mean((0, 1, 2))
    return (x - mean) * lax.rsqrt(((x - mean) ** 2).mean((0, 1, 2)) + 1e-5)


def resnet50(kernels: list[jax.Array], images: jax.Array, labels: jax.Array) -> jax.Array:
    """The loss of ResNet-50 without scale and shift of its norms."""
    weights = iter(kernels)
    x = jax.nn.relu(_norm(_convolve(images, next(weights), 2)))
    x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
    for stage, (_, blocks) in enumerate(_STAGES):
        for block in range(blocks):
            stride = 2 if stage and not block else 1
            y = jax.nn.relu(_norm(_convolve(x, next(weights), 1)))
            y = jax.nn.relu(_norm(_convolve(y, next(weights), stride)))
            if not block:
                x = _norm(_convolve(x, next(weights), stride))
            x = jax.nn.relu(x + _norm(_convolve(y, next(weights), 1)))
    logits = x.mean((1, 2)) @ next(weights)
    return -jnp.mean(jnp.sum(jax.nn.log_softmax(logits) * jax.nn.one_hot(labels, 1000), -1))


RESNET_ARGUMENTS = (
    [_of(k, k, i, o) for k, _, i, o, _ in resnet_layers()] + [_of(2048, 1000)],
    _of(IMAGES, IMAGE, IMAGE, 3),
    _of(IMAGES, dtype=jnp.int32),
)

# LSTM and loops
STEPS, ROWS, UNITS = 20, 16, 128


def lstm(weights: dict[str, jax.Array], inputs: jax.Array) -> jax.Array:
    """The summed last state of an LSTM, as a scan over time."""

    def cell(state: tuple[jax.Array, jax.Array], x: jax.Array) -> tuple[Any, None]:
        h, c = state
        i, f, g, o = jnp.split(x @ weights["x"] + h @ weights["h"], 4, -1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        return (jax.nn.sigmoid(o) * jnp.tanh(c), c), None

    zeros = jnp.zeros((ROWS, UNITS))
    return lax.scan(cell, (zeros, zeros), inputs)[0][0].sum()


LSTM_ARGUMENTS = (
    {"x": _of(UNITS, 4 * UNITS), "h": _of(UNITS, 4 * UNITS)},
    _of(STEPS, ROWS, UNITS),
)
# Forward: x and h through four gates each. Backward: both weights' gradients, and that of h.
LSTM_FLOPS = STEPS * (2 + 2 + 1) * (2 * ROWS * UNITS * 4 * UNITS)

ONE = 2 * 64**3  # one 64 × 64 matmul


def _times(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w)


def nested_loops(x: jax.Array, stacks: jax.Array) -> jax.Array:
    """A scan of 5 in a scan of 3."""

    def inner(x: jax.Array, stack: jax.Array) -> tuple[jax.Array, None]:
        return lax.scan(lambda x, w: (_times(x, w), None), x, stack)[0], None

    return lax.scan(inner, x, stacks)[0]


def counting_down(x: jax.Array, w: jax.Array) -> jax.Array:
    """20, 17, …, 2: seven iterations."""
    return lax.while_loop(lambda s: s[0] >= 0, lambda s: (s[0] - 3, _times(s[1], w)), (20, x))[1]


def doubling(x: jax.Array, w: jax.Array) -> jax.Array:
    """1, 2, …, 512: ten iterations."""
    return lax.while_loop(lambda s: s[0] < 1000, lambda s: (s[0] * 2, _times(s[1], w)), (1, x))[1]


def growing_stride(x: jax.Array, w: jax.Array) -> jax.Array:
    """0, 1, …, 10, 20, …, 90: nineteen iterations."""

    def step(s: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return jnp.where(s[0] < 10, s[0] + 1, s[0] + 10), _times(s[1], w)

    return lax.while_loop(lambda s: s[0] < 100, step, (0, x))[1]


def causal_chunks(x: jax.Array, w: jax.Array) -> jax.Array:
    """Chunk i attends to the chunks up to i: 1 + 2 + … + 7 iterations."""

    def chunk(x: jax.Array, i: jax.Array) -> tuple[jax.Array, None]:
        return lax.fori_loop(0, i + 1, lambda _, x: _times(x, w), x), None

    return lax.scan(chunk, x, jnp.arange(7))[0]


PATTERN = (0, 1, 2, 0, 0, 1, 0, 2)  # a layer's kind: two matmuls, one, none


def layer_pattern(x: jax.Array, w: jax.Array) -> jax.Array:
    """Layers of three kinds by a table, and a matmul more in every other one."""
    kinds = (lambda x: _times(_times(x, w), w), lambda x: _times(x, w), jnp.sin)

    def layer(x: jax.Array, i: jax.Array) -> tuple[jax.Array, None]:
        x = lax.switch(jnp.array(PATTERN)[i], kinds, x)
        return lax.cond(i % 2 == 0, lambda x: _times(x, w), jnp.cos, x), None

    return lax.scan(layer, x, jnp.arange(len(PATTERN)))[0]


_X = _of(64, 64)
_N = _of(dtype=jnp.int32)

MODELS: dict[str, Model] = {
    "moe_dense": (moe_dense, MOE_ARGUMENTS, MOE_DENSE_FLOPS),
    "moe_ragged": (moe_ragged, MOE_ARGUMENTS, None),
    "moe_capacity": (moe_capacity, MOE_ARGUMENTS, MOE_CAPACITY_FLOPS),
    "resnet50": (jax.grad(resnet50), RESNET_ARGUMENTS, None),
    "lstm": (jax.grad(lstm), LSTM_ARGUMENTS, LSTM_FLOPS),
    "loops_nested": (nested_loops, (_X, _of(3, 5, 64, 64)), 15 * ONE),
    "loops_reversed": (
        lambda x, s: lax.scan(lambda x, w: (_times(x, w), None), x, s, reverse=True)[0],
        (_X, _of(5, 64, 64)),
        5 * ONE,
    ),
    "loops_down": (counting_down, (_X, _X), 7 * ONE),
    "loops_doubling": (doubling, (_X, _X), 10 * ONE),
    "loops_stride": (growing_stride, (_X, _X), 19 * ONE),
    "loops_causal": (causal_chunks, (_X, _X), 28 * ONE),
    "loops_pattern": (
        layer_pattern,
        (_X, _X),
        (2 * PATTERN.count(0) + PATTERN.count(1) + len(PATTERN) // 2) * ONE,
    ),
    "loops_data": (
        lambda x, n: lax.fori_loop(0, n, lambda i, y: _times(y, x), x),
        (_X, _N),
        ONE,
    ),
    "branches": (
        lambda x, n: lax.switch(n, [lambda x: x @ x @ x, lambda x: x @ x, jnp.sin], x),
        (_X, _N),
        2 * ONE,
    ),
    "fft": (lambda x, w: jnp.abs(jnp.fft.fft(x)) @ w, (_X, _X), None),
    "cholesky": (lambda x, w: jnp.linalg.cholesky(x) @ w, (_X, _X), None),
}
