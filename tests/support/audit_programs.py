"""Small programs that try to fool the counters, with the model FLOPs that each must have.

Each is a step as somebody might write it; its ledger must have no residual that no line names.
The expected numbers are arithmetic on the sizes of `audit`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tests.support import audit_phases  # noqa: F401  # registers its programs
from tests.support.audit import (
    AUDIT,
    BACKWARD,
    CHANNELS,
    CHUNKS,
    FORWARD,
    GROUPS,
    MLP,
    ONE,
    ROWS,
    SIZE,
    SQUARE,
    TAPS,
    Audit,
    B,
    D,
    H,
    L,
    X,
    audit,
    loss,
    mlp,
    of,
    sgd,
    square_loss,
)

# Work that XLA merges or drops


@audit(MLP, X, forward=FORWARD, backward=BACKWARD)
def train(w, x):
    value, g = jax.value_and_grad(loss)(w, x)
    return sgd(w, g), value


@audit(MLP, X, forward=2 * FORWARD, backward=BACKWARD, evaluation=FORWARD, removed=FORWARD)
def loss_again_as_a_metric(w, x):
    value, g = jax.value_and_grad(loss)(w, x)
    return sgd(w, g), value, jnp.sqrt(loss(w, x))


@audit(MLP, X, forward=2 * FORWARD, removed=FORWARD)
def forward_twice(w, x):
    return loss(w, x), jnp.max(mlp(w, x))


# Work that is dropped


@audit(MLP, X, forward=FORWARD, backward=BACKWARD)
def gradient_only(w, x):
    return jax.grad(loss)(w, x)


@audit(MLP, of(CHUNKS, B, D), forward=CHUNKS * FORWARD, backward=CHUNKS * BACKWARD)
def gradient_of_a_chunked_loss(w, xs):
    """The gradient needs no value, so the last product of every chunk is not needed."""

    def chunked(w):
        return lax.scan(lambda total, x: (total + loss(w, x), None), 0.0, xs)[0]

    return sgd(w, jax.grad(chunked)(w))


@audit(
    MLP,
    of(CHUNKS, B, D),
    forward=CHUNKS * ONE,
    backward=CHUNKS * BACKWARD,
    removed=(CHUNKS - 1) * ONE,
)
def gradient_of_a_linear_chunked_loss(w, xs):
    """What the hidden layer's gradient needs is the same in every chunk: it runs once."""

    def chunked(w):
        def add(total, x):
            return total + jnp.mean(mlp(w, x)), None

        return lax.scan(add, 0.0, xs)[0]

    return jax.grad(chunked)(w)


@audit(
    MLP,
    of(CHUNKS, B, D),
    forward=CHUNKS * FORWARD,
    backward=CHUNKS * BACKWARD,
    removed=CHUNKS * FORWARD,
)
def gradient_of_a_checkpointed_chunked_loss(w, xs):
    @jax.checkpoint
    def add(total, x):
        return total + loss(w, x), None

    return jax.grad(
        lambda w: lax.scan(lambda t, x: (t + jax.checkpoint(loss)(w, x), None), 0.0, xs)[0]
    )(w)


@audit(of(D, D), X, forward=4 * SQUARE)
def last_iteration_is_dead(w, x):
    """The loop's last product is not used: its carry's other half is."""

    def body(_, pair):
        return pair[1], jnp.tanh(pair[1] @ w)

    return lax.fori_loop(0, 4, body, (x, x))[0]


@audit(of(D, D), X, forward=SQUARE)
def times_zero(w, x):
    return (x @ w) * 0.0


@audit(of(D, D), forward=2 * D * D * D)
def of_constants(w):
    return w @ jnp.eye(D)


# Derivatives of other orders


@audit(MLP, X, MLP, forward=5 * ONE, backward=6 * ONE)
def hvp(w, x, v):
    """Forward over reverse."""
    return jax.jvp(lambda w: jax.grad(loss)(w, x), (w,), (v,))[1]


@audit(MLP, X, MLP, forward=6 * ONE, backward=7 * ONE, removed=ONE)
def hvp_along_the_inputs(w, x, v):
    """Both tangents of the first product are needed; that of `x` is the product itself again."""
    return jax.jvp(jax.jit(jax.grad(loss)), (w, x), (v, x))[1]


@audit(MLP, X, MLP, forward=2 * ONE, backward=9 * ONE + 2 * 2 * D * H, removed=None)
def hvp_reverse(w, x, v):
    def directional(w):
        g = jax.grad(loss)(w, x)
        return sum(
            jnp.vdot(a, b) for a, b in zip(jax.tree.leaves(g), jax.tree.leaves(v), strict=True)
        )

    return jax.grad(directional)(w)


@jax.custom_vjp
def _own(w, x):
    return jnp.tanh(x @ w)


_own.defvjp(
    lambda w, x: (_own(w, x), (w, x)),
    lambda r, g: (
        r[1].T @ (g * (1 - jnp.tanh(r[1] @ r[0]) ** 2)),
        (g * (1 - jnp.tanh(r[1] @ r[0]) ** 2)) @ r[0].T,
    ),
)


@audit(of(D, D), X, forward=SQUARE, backward=2 * SQUARE, removed=SQUARE)
def custom_vjp_that_recomputes(w, x):
    value, g = jax.value_and_grad(lambda w: jnp.sum(_own(w, x) ** 2))(w)
    return w - g, value


@audit(MLP, X, forward=5 * ONE, removed=2 * ONE)
def jacobian_vector(w, x):
    return jax.jvp(lambda w: mlp(w, x), (w,), (w,))


# Convolutions


def _convolution(stride=1, groups=1, dilation=1, padding="SAME"):
    def convolve(x, k):
        return lax.conv_general_dilated(
            x, k, (stride, stride), padding, rhs_dilation=(dilation, dilation),
            feature_group_count=groups, dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )  # fmt: skip

    def step(k, x):
        return jax.value_and_grad(lambda k, x: jnp.sum(convolve(x, k) ** 2), argnums=(0, 1))(k, x)

    return step


def _pairs(stride=1, dilation=1, padding="SAME", **_):
    """Pairs of output position and tap that read a pixel, along one side of the image."""
    reach = dilation * (TAPS - 1) + 1
    count = -(-SIZE // stride) if padding == "SAME" else (SIZE - reach) // stride + 1
    low = max(0, (count - 1) * stride + reach - SIZE) // 2 if padding == "SAME" else 0
    return sum(
        0 <= o * stride + k * dilation - low < SIZE for o in range(count) for k in range(TAPS)
    )


IMAGES = 2
CONVOLUTIONS: dict[str, dict[str, Any]] = {
    "same": {},
    "valid": {"padding": "VALID"},
    "strided": {"stride": 2},
    "strided_valid": {"stride": 2, "padding": "VALID"},
    "dilated": {"dilation": 2},
    "grouped": {"groups": 2},
    "depthwise": {"groups": CHANNELS},
    "strided_grouped": {"stride": 2, "groups": 2},
    "strided_depthwise": {"stride": 2, "groups": CHANNELS},
    "strided_dilated": {"stride": 2, "dilation": 2, "padding": "VALID"},
}
for _name, _facts in CONVOLUTIONS.items():
    _inputs = CHANNELS // _facts.get("groups", 1)
    _flops = 2 * IMAGES * CHANNELS * _inputs * _pairs(**_facts) ** 2
    AUDIT[f"convolution_{_name}"] = Audit(
        function=_convolution(**_facts),
        arguments=(of(TAPS, TAPS, _inputs, CHANNELS), of(IMAGES, SIZE, SIZE, CHANNELS)),
        forward=_flops,
        backward=2 * _flops,
        # The gradient of a depthwise kernel is computed for all pairs of channels.
        expansion=(CHANNELS - 1) * _flops if _inputs == 1 else 0,
    )


# Ragged products


@audit(
    of(GROUPS, D, H),
    of(ROWS, D),
    of(GROUPS, dtype=jnp.int32),
    forward=2 * ROWS * D * H,
    expansion=(GROUPS - 1) * 2 * ROWS * D * H,
)
def ragged(w, x, sizes):
    return lax.ragged_dot(x, w, sizes)


@audit(
    of(GROUPS, D, H),
    of(ROWS, D),
    of(GROUPS, dtype=jnp.int32),
    forward=2 * ROWS * D * H,
    backward=2 * 2 * ROWS * D * H,
    expansion=3 * (GROUPS - 1) * 2 * ROWS * D * H,
)
def ragged_training(w, x, sizes):
    return jax.value_and_grad(
        lambda w, x: jnp.sum(lax.ragged_dot(x, w, sizes) ** 2), argnums=(0, 1)
    )(w, x)


# Products of unusual shapes


@audit(of(960, 100), of(60, 960), forward=2 * 60 * 960 * 100)
def odd_sizes(w, x):
    return x @ w


@audit(of(D), X, forward=2 * B * D, backward=0, removed=None)
def matrix_vector(w, x):
    return x @ w


@audit(of(D, 1), X, forward=2 * B * D, backward=2 * B * D, removed=None)
def one_output(w, x):
    return jax.value_and_grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w)


@audit(of(D), of(H), forward=2 * D * H, backward=0, removed=None)
def outer(a, b):
    return jnp.einsum("i,j->ij", a, b)


@audit(of(L, D, D), X, forward=L * SQUARE, backward=2 * L * SQUARE)
def scanned(w, x):
    def total(w):
        return jnp.sum(lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0] ** 2)

    return jax.value_and_grad(total)(w)


@audit(of(L, D, D), X, forward=L * SQUARE, backward=2 * L * SQUARE)
def scanned_checkpointed(w, x):
    def total(w):
        body = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None))
        return jnp.sum(lax.scan(body, x, w)[0] ** 2)

    return jax.value_and_grad(total)(w)


@audit(of(L, D, D), X, forward=L * SQUARE, backward=(2 * L - 1) * SQUARE)
def unrolled_checkpointed(w, x):
    def total(w):
        h = x
        for i in range(L):
            h = jax.checkpoint(lambda h, w: jnp.tanh(h @ w))(h, w[i])
        return jnp.sum(h**2)

    return jax.value_and_grad(total)(w)


QKV = of(2, 8, 4, 16)


@audit(QKV, QKV, QKV, forward=2 * 2 * (2 * 4 * 8 * 8 * 16), backward=4 * 2 * (2 * 4 * 8 * 8 * 16))
def attention(q, k, v):
    return jax.value_and_grad(
        lambda q, k, v: jnp.sum(jax.nn.dot_product_attention(q, k, v) ** 2), argnums=(0, 1, 2)
    )(q, k, v)


@audit(of(D, D), of(D, B), X, forward=2 * D * D * B + 2 * B * D * B)
def chain_of_products(w, y, x):
    return x @ (w @ y)


@audit(of(D, D), of(2, B, D), forward=2 * SQUARE)
def one_by_one_over_a_batch(w, xs):
    return lax.map(lambda x: x @ w, xs)


@audit(of(D, D), of(2, B, D), forward=2 * SQUARE, backward=2 * SQUARE)
def gradient_per_example(w, xs):
    return jax.vmap(jax.value_and_grad(square_loss), in_axes=(None, 0))(w, xs)


@audit(of(D, D), X, forward=SQUARE, backward=SQUARE)
def dot_with_a_transposed(w, x):
    value, g = jax.value_and_grad(lambda w: jnp.sum(jnp.tanh(w.T @ x.T)))(w)
    return w - g, value
