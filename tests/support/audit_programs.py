"""Small programs that try to fool the counters, with the model FLOPs that each must have.

Each is a step as somebody might write it; its ledger must have no residual that no line names.
The expected numbers are arithmetic on the sizes below.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

B, D, H, L = 8, 16, 32, 3  # rows, width, hidden width, layers
ONE = 2 * B * D * H  # one matmul between width and hidden width
SQUARE = 2 * B * D * D
CHUNKS = 4
TAPS, SIZE, CHANNELS = 3, 8, 6  # of convolutions
GROUPS, ROWS = 4, 32  # of ragged products


class Audit(NamedTuple):
    """One program.

    Attributes:
        function: the step.
        arguments: their shapes.
        forward: forward model FLOPs, the evaluation included.
        backward: backward model FLOPs.
        optimizer: FLOPs on gradients, as traced.
        evaluation: the part of `forward` that evaluates.
        removed: model FLOPs for which the CPU program has no matmul; None where matmuls on vector
            units make it a matter of definition.
        expansion: FLOPs of the CPU program on the zeros of products computed densely.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    forward: int
    backward: int = 0
    optimizer: int = 0
    evaluation: int = 0
    removed: int | None = 0
    expansion: int = 0


AUDIT: dict[str, Audit] = {}


def _of(*dims: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


def _audit(*arguments: Any, **expected: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        AUDIT[function.__name__] = Audit(function, arguments, **expected)
        return function

    return add


MLP = {"up": _of(D, H), "down": _of(H, D)}
X = _of(B, D)
# Forward of the MLP's loss, and its backward: no gradient of x.
FORWARD, BACKWARD = 2 * ONE, 3 * ONE


def mlp(w: Any, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w["up"]) @ w["down"]


def loss(w: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(mlp(w, x) ** 2)


def sgd(w: Any, g: Any) -> Any:
    return jax.tree.map(lambda a, b: a - 0.1 * b, w, g)


# Work that XLA merges or drops


@_audit(MLP, X, forward=FORWARD, backward=BACKWARD)
def train(w, x):
    value, g = jax.value_and_grad(loss)(w, x)
    return sgd(w, g), value


@_audit(MLP, X, forward=2 * FORWARD, backward=BACKWARD, evaluation=FORWARD, removed=FORWARD)
def loss_again_as_a_metric(w, x):
    value, g = jax.value_and_grad(loss)(w, x)
    return sgd(w, g), value, jnp.sqrt(loss(w, x))


@_audit(MLP, X, forward=2 * FORWARD, removed=FORWARD)
def forward_twice(w, x):
    return loss(w, x), jnp.max(mlp(w, x))


# Work that is dropped


@_audit(MLP, X, forward=FORWARD, backward=BACKWARD)
def gradient_only(w, x):
    return jax.grad(loss)(w, x)


@_audit(MLP, _of(CHUNKS, B, D), forward=CHUNKS * FORWARD, backward=CHUNKS * BACKWARD)
def gradient_of_a_chunked_loss(w, xs):
    """The gradient needs no value, so the last product of every chunk is not needed."""

    def chunked(w):
        return lax.scan(lambda total, x: (total + loss(w, x), None), 0.0, xs)[0]

    return sgd(w, jax.grad(chunked)(w))


@_audit(
    MLP,
    _of(CHUNKS, B, D),
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


@_audit(
    MLP,
    _of(CHUNKS, B, D),
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


@_audit(_of(D, D), X, forward=4 * SQUARE)
def last_iteration_is_dead(w, x):
    """The loop's last product is not used: its carry's other half is."""

    def body(_, pair):
        return pair[1], jnp.tanh(pair[1] @ w)

    return lax.fori_loop(0, 4, body, (x, x))[0]


@_audit(_of(D, D), X, forward=SQUARE)
def times_zero(w, x):
    return (x @ w) * 0.0


@_audit(_of(D, D), forward=2 * D * D * D)
def of_constants(w):
    return w @ jnp.eye(D)


# Derivatives of other orders


@_audit(MLP, X, MLP, forward=5 * ONE, backward=6 * ONE)
def hvp(w, x, v):
    """Forward over reverse."""
    return jax.jvp(lambda w: jax.grad(loss)(w, x), (w,), (v,))[1]


@_audit(MLP, X, MLP, forward=2 * ONE, backward=9 * ONE + 2 * 2 * D * H, removed=None)
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


@_audit(_of(D, D), X, forward=SQUARE, backward=2 * SQUARE, removed=SQUARE)
def custom_vjp_that_recomputes(w, x):
    value, g = jax.value_and_grad(lambda w: jnp.sum(_own(w, x) ** 2))(w)
    return w - g, value


@_audit(MLP, X, forward=5 * ONE, removed=2 * ONE)
def jacobian_vector(w, x):
    return jax.jvp(lambda w: mlp(w, x), (w,), (w,))


# Phases


@_audit(MLP, X, X, forward=2 * FORWARD, backward=BACKWARD, evaluation=FORWARD)
def evaluation_after_the_update(w, x, y):
    value, g = jax.value_and_grad(loss)(w, x)
    w = sgd(w, g)
    return w, value, loss(w, y)


@_audit(MLP, X, X, forward=2 * FORWARD, backward=BACKWARD, evaluation=FORWARD)
def evaluation_before_the_update(w, x, y):
    value, g = jax.value_and_grad(loss)(w, x)
    return sgd(w, g), value, loss(w, y)


@_audit(MLP, MLP, MLP, X, X, forward=2 * FORWARD, backward=BACKWARD, evaluation=FORWARD)
def evaluation_after_adam(w, m, v, x, y):
    value, g = jax.value_and_grad(loss)(w, x)
    m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, m, g)
    v = jax.tree.map(lambda v, g: 0.9 * v + 0.1 * g * g, v, g)
    w = jax.tree.map(lambda w, m, v: w - 0.1 * (m / (jnp.sqrt(v) + 1e-8) + 0.1 * w), w, m, v)
    return w, m, v, value, loss(w, y)


@_audit(MLP, MLP, X, X, forward=2 * FORWARD, backward=BACKWARD, evaluation=FORWARD)
def evaluation_of_averaged_weights(w, mean, x, y):
    w = sgd(w, jax.grad(loss)(w, x))
    mean = jax.tree.map(lambda a, b: 0.99 * a + 0.01 * b, mean, w)
    return w, mean, loss(mean, y)


@_audit(
    MLP, X, _of(CHUNKS, B, D),
    forward=(1 + CHUNKS) * FORWARD, backward=BACKWARD, evaluation=CHUNKS * FORWARD,
)  # fmt: skip
def evaluation_in_a_loop(w, x, ys):
    value, g = jax.value_and_grad(loss)(w, x)
    w = sgd(w, g)
    return w, value, lax.scan(lambda total, y: (total + loss(w, y), None), 0.0, ys)[0]


@_audit(
    MLP, _of(CHUNKS, B, D), X,
    forward=2 * CHUNKS * FORWARD, backward=CHUNKS * BACKWARD, evaluation=CHUNKS * FORWARD,
)  # fmt: skip
def evaluation_after_every_update(w, xs, y):
    def one(w, x):
        value, g = jax.value_and_grad(loss)(w, x)
        w = sgd(w, g)
        return w, (value, loss(w, y))

    return lax.scan(one, w, xs)


@_audit(MLP, X, X, forward=2 * FORWARD, backward=BACKWARD, evaluation=FORWARD)
def learning_rate_from_an_evaluation(w, x, y):
    value, g = jax.value_and_grad(loss)(w, x)
    rate = jnp.where(loss(w, y) > value, 0.1, 0.01)
    return jax.tree.map(lambda a, b: a - rate * b, w, g), value


@_audit(
    MLP,
    _of(D, D),
    X,
    X,
    forward=2 * FORWARD + SQUARE,
    backward=BACKWARD,
    evaluation=FORWARD + SQUARE,
)
def confusion_matrix(w, counts, x, y):
    value, g = jax.value_and_grad(loss)(w, x)
    w = sgd(w, g)
    chosen = jax.nn.one_hot(mlp(w, y).argmax(-1), D)
    return w, value, counts + chosen.T @ y


@_audit(MLP, X, forward=FORWARD, backward=BACKWARD)
def layer_named_optimizer(w, x):
    def named(w, x):
        with jax.named_scope("optimizer"):
            h = jnp.tanh(x @ w["up"])
        with jax.named_scope("apply_updates"):
            return jnp.mean((h @ w["down"]) ** 2)

    value, g = jax.value_and_grad(named)(w, x)
    return sgd(w, g), value


@_audit(MLP, X, X, forward=2 * FORWARD, backward=BACKWARD, evaluation=FORWARD)
def evaluation_of_a_layer_named_optimizer(w, x, y):
    value, g = jax.value_and_grad(loss)(w, x)
    w = sgd(w, g)
    with jax.named_scope("opt_update"):
        return w, value, loss(w, y)


@_audit(MLP, X, forward=FORWARD)
def inference_of_a_layer_named_optimizer(w, x):
    with jax.named_scope("optimizer"):
        return mlp(w, x)


def _orthogonal(g):
    for _ in range(2):
        g = 1.5 * g - 0.5 * (g @ g.T) @ g
    return g


NEWTON_SCHULZ = 2 * 2 * 2 * D**3


def _square_loss(w, x):
    return jnp.mean(jnp.tanh(x @ w) ** 2)


@_audit(
    _of(D, D), _of(D, D), X, X,
    forward=2 * SQUARE, backward=SQUARE, optimizer=NEWTON_SCHULZ, evaluation=SQUARE,
)  # fmt: skip
def muon_and_an_evaluation(w, m, x, y):
    value, g = jax.value_and_grad(_square_loss)(w, x)
    m = 0.9 * m + g
    w = w * 0.99 - 0.1 * _orthogonal(m)
    return w, m, value, _square_loss(w, y)


@_audit(_of(D, D), _of(D, D), X, forward=SQUARE, backward=SQUARE, optimizer=NEWTON_SCHULZ)
def muon_with_weight_decay_in_the_gradient(w, m, x):
    value, g = jax.value_and_grad(_square_loss)(w, x)
    m = 0.9 * m + g + 0.1 * w
    return w - 0.1 * _orthogonal(m), m, value


@_audit(_of(D, D), _of(D, D), X, forward=SQUARE, backward=SQUARE, optimizer=3 * 2 * D**3)
def preconditioner_of_the_last_step(w, p, x):
    """Shampoo, with a root of statistics that are one step old: no gradient is in it."""
    value, g = jax.value_and_grad(_square_loss)(w, x)
    root = p @ p
    return w - 0.1 * root @ g, 0.9 * p + g @ g.T, value


@_audit(
    MLP, MLP, X, forward=2 * FORWARD, backward=BACKWARD,
)  # fmt: skip
def teacher(w, t, x):
    target = mlp(t, x)
    value, g = jax.value_and_grad(lambda w: jnp.mean((mlp(w, x) - target) ** 2))(w)
    return sgd(w, g), value


@_audit(MLP, X, forward=2 * FORWARD, backward=BACKWARD, removed=FORWARD)
def rollout(w, x):
    chosen = mlp(w, x).argmax(-1)
    value, g = jax.value_and_grad(
        lambda w: -jnp.take_along_axis(jax.nn.log_softmax(mlp(w, x)), chosen[:, None], 1).mean()
    )(w)
    return sgd(w, g), value


@_audit(MLP, X, forward=FORWARD, backward=BACKWARD, optimizer=2 * 2 * D * H, removed=None)
def gradient_norm_by_a_dot(w, x):
    value, g = jax.value_and_grad(loss)(w, x)
    norm = jnp.sqrt(sum(jnp.vdot(a, a) for a in jax.tree.leaves(g)))
    return jax.tree.map(lambda a, b: a - b / norm, w, g), value


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
        arguments=(_of(TAPS, TAPS, _inputs, CHANNELS), _of(IMAGES, SIZE, SIZE, CHANNELS)),
        forward=_flops,
        backward=2 * _flops,
        # The gradient of a depthwise kernel is computed for all pairs of channels.
        expansion=(CHANNELS - 1) * _flops if _inputs == 1 else 0,
    )


# Ragged products


@_audit(
    _of(GROUPS, D, H),
    _of(ROWS, D),
    _of(GROUPS, dtype=jnp.int32),
    forward=2 * ROWS * D * H,
    expansion=(GROUPS - 1) * 2 * ROWS * D * H,
)
def ragged(w, x, sizes):
    return lax.ragged_dot(x, w, sizes)


@_audit(
    _of(GROUPS, D, H),
    _of(ROWS, D),
    _of(GROUPS, dtype=jnp.int32),
    forward=2 * ROWS * D * H,
    backward=2 * 2 * ROWS * D * H,
    expansion=3 * (GROUPS - 1) * 2 * ROWS * D * H,
)
def ragged_training(w, x, sizes):
    return jax.value_and_grad(
        lambda w, x: jnp.sum(lax.ragged_dot(x, w, sizes) ** 2), argnums=(0, 1)
    )(w, x)


# Products of unusual shapes


@_audit(_of(960, 100), _of(60, 960), forward=2 * 60 * 960 * 100)
def odd_sizes(w, x):
    return x @ w


@_audit(_of(D), X, forward=2 * B * D, backward=0, removed=None)
def matrix_vector(w, x):
    return x @ w


@_audit(_of(D, 1), X, forward=2 * B * D, backward=2 * B * D, removed=None)
def one_output(w, x):
    return jax.value_and_grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w)


@_audit(_of(D), _of(H), forward=2 * D * H, backward=0, removed=None)
def outer(a, b):
    return jnp.einsum("i,j->ij", a, b)


@_audit(_of(L, D, D), X, forward=L * SQUARE, backward=2 * L * SQUARE)
def scanned(w, x):
    def total(w):
        return jnp.sum(lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0] ** 2)

    return jax.value_and_grad(total)(w)


@_audit(_of(L, D, D), X, forward=L * SQUARE, backward=2 * L * SQUARE)
def scanned_checkpointed(w, x):
    def total(w):
        body = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None))
        return jnp.sum(lax.scan(body, x, w)[0] ** 2)

    return jax.value_and_grad(total)(w)


@_audit(_of(L, D, D), X, forward=L * SQUARE, backward=(2 * L - 1) * SQUARE)
def unrolled_checkpointed(w, x):
    def total(w):
        h = x
        for i in range(L):
            h = jax.checkpoint(lambda h, w: jnp.tanh(h @ w))(h, w[i])
        return jnp.sum(h**2)

    return jax.value_and_grad(total)(w)


QKV = _of(2, 8, 4, 16)


@_audit(QKV, QKV, QKV, forward=2 * 2 * (2 * 4 * 8 * 8 * 16), backward=4 * 2 * (2 * 4 * 8 * 8 * 16))
def attention(q, k, v):
    return jax.value_and_grad(
        lambda q, k, v: jnp.sum(jax.nn.dot_product_attention(q, k, v) ** 2), argnums=(0, 1, 2)
    )(q, k, v)


@_audit(_of(D, D), _of(D, B), X, forward=2 * D * D * B + 2 * B * D * B)
def chain_of_products(w, y, x):
    return x @ (w @ y)


@_audit(_of(D, D), _of(2, B, D), forward=2 * SQUARE)
def one_by_one_over_a_batch(w, xs):
    return lax.map(lambda x: x @ w, xs)


@_audit(_of(D, D), _of(2, B, D), forward=2 * SQUARE, backward=2 * SQUARE)
def gradient_per_example(w, xs):
    return jax.vmap(jax.value_and_grad(_square_loss), in_axes=(None, 0))(w, xs)


@_audit(_of(D, D), X, forward=SQUARE, backward=SQUARE)
def dot_with_a_transposed(w, x):
    value, g = jax.value_and_grad(lambda w: jnp.sum(jnp.tanh(w.T @ x.T)))(w)
    return w - g, value
