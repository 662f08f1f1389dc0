"""Models without an analytic count: the traced count equals arithmetic written out beside it."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

from mfu_jax.flops.executed.counting import executed_flops
from mfu_jax.flops.traced.counting import count_model_flops
from tests.support.small_functions import FIRST, SECOND, TWO_LAYERS, B, D, F, shape, two_layers


def conv(x, w, stride=1, padding="SAME", **kwargs):
    numbers = ("NHWC", "HWIO", "NHWC")
    strides = (stride, stride)
    return jax.lax.conv_general_dilated(x, w, strides, padding, dimension_numbers=numbers, **kwargs)


def mean_square(x):
    return jnp.mean(x.astype(jnp.float32) ** 2)


def train(model):
    """The step of a model(params, inputs): its loss and the gradient of every parameter."""
    return jax.value_and_grad(lambda params, *inputs: mean_square(model(params, *inputs)))


def test_cnn():
    def cnn(p, images):
        x = jax.nn.relu(conv(images, p["a"]))
        x = jax.nn.relu(conv(x, p["b"], stride=2))
        return x.reshape(x.shape[0], -1) @ p["head"]

    params = {"a": shape(3, 3, 3, 8), "b": shape(3, 3, 8, 16), "head": shape(4 * 4 * 16, 10)}
    count = count_model_flops(train(cnn), params, shape(5, 8, 8, 3))
    # a: along one axis a 3-wide kernel on 8 positions meets 3·8 − 2 elements ("SAME" pads 1, 1).
    a = 2 * 5 * 8 * 3 * (3 * 8 - 2) ** 2
    # b: stride 2 from 8 to 4 pads (0, 1), so only the last window misses one element.
    b = 2 * 5 * 16 * 8 * (3 * 4 - 1) ** 2
    head = 2 * 5 * 256 * 10
    assert count.forward == a + b + head
    # Nobody wants the gradient of the images.
    assert count.backward == a + 2 * b + 2 * head
    assert count.activations == 0
    assert count.unaccounted == ()


@pytest.mark.parametrize(
    ("kwargs", "kernel", "expected"),
    [
        ({"padding": "VALID"}, (3, 3, 4, 6), 2 * 1 * 6 * 4 * (3 * 7) ** 2),
        ({"padding": "VALID", "rhs_dilation": (2, 2)}, (3, 3, 4, 6), 2 * 6 * 4 * (3 * 5) ** 2),
        # Depthwise: each output feature meets one input feature.
        ({"padding": "VALID", "feature_group_count": 4}, (3, 3, 1, 4), 2 * 4 * 1 * (3 * 7) ** 2),
        # A transposed convolution, 9 → 17 positions with holes: a 3-wide kernel meets 2 elements at
        # the 8 odd positions and 1 at the 9 even ones.
        (
            {"padding": [(1, 1), (1, 1)], "lhs_dilation": (2, 2)},
            (3, 3, 4, 6),
            2 * 6 * 4 * (2 * 8 + 9) ** 2,
        ),
    ],
)
def test_convolutions_count_real_positions(kwargs, kernel, expected):
    fn = functools.partial(conv, **kwargs)
    assert count_model_flops(fn, shape(1, 9, 9, 4), shape(*kernel)).total == expected
    # Every pair of input and kernel element that meets does so once in each of the two gradients.
    gradient = count_model_flops(
        jax.grad(lambda x, w: mean_square(fn(x, w)), (0, 1)), shape(1, 9, 9, 4), shape(*kernel)
    )
    assert (gradient.forward, gradient.backward) == (expected, 2 * expected)


def test_a_causal_convolution_as_long_as_the_sequence_is_counted_at_once():
    """Pair by pair, its 10^10 would take minutes."""
    length = 100_000
    long = functools.partial(
        jax.lax.conv_general_dilated, window_strides=(1,), padding=[(length - 1, 0)]
    )
    count = count_model_flops(long, shape(1, 1, length), shape(1, 1, length))
    assert count.total == 2 * length * (length + 1) // 2


def test_lstm_scan():
    T, B, inputs_size, D = 11, 3, 5, 7

    def lstm(p, inputs):
        def cell(carry, x):
            h, c = carry
            i, f, g, o = jnp.split(x @ p["wx"] + h @ p["wh"], 4, axis=-1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        zeros = jnp.zeros((B, D))
        return jax.lax.scan(cell, (zeros, zeros), inputs)[1]

    params = {"wx": shape(inputs_size, 4 * D), "wh": shape(D, 4 * D)}
    count = count_model_flops(train(lstm), params, shape(T, B, inputs_size))
    wx, wh = 2 * T * B * inputs_size * 4 * D, 2 * T * B * D * 4 * D
    assert count.forward == wx + wh
    # Gradients of wx, of wh and of the hidden state; not of the inputs.
    assert count.backward == wx + 2 * wh
    assert count.activations == 0


def test_unet():
    def unet(p, x):
        skip = jax.nn.relu(conv(x, p["down"], padding="VALID"))  # 10 → 8
        low = jax.nn.relu(conv(skip, p["bottom"], stride=2, padding="VALID"))  # 8 → 4
        up = jax.lax.conv_transpose(low, p["up"], (2, 2), "VALID")  # 4 → 8
        return conv(jnp.concatenate([skip, up], axis=-1), p["out"], padding="VALID")

    params = {
        "down": shape(3, 3, 1, 4),
        "bottom": shape(2, 2, 4, 8),
        "up": shape(2, 2, 8, 4),
        "out": shape(1, 1, 8, 2),
    }
    count = count_model_flops(train(unet), params, shape(3, 10, 10, 1))
    down = 2 * 3 * 64 * 9 * 1 * 4
    bottom = 2 * 3 * 16 * 4 * 4 * 8
    up = 2 * 3 * 16 * 4 * 8 * 4  # each of the 4·4 elements meets each of the 2·2 kernel positions
    out = 2 * 3 * 64 * 8 * 2
    assert count.forward == down + bottom + up + out
    assert count.backward == down + 2 * (bottom + up + out)


def attention(p, x, context=None):
    context = x if context is None else context
    B, S, _ = x.shape
    T, heads = context.shape[1], 2
    q = (x @ p["q"]).reshape(B, S, heads, -1)
    k, v = ((context @ p[name]).reshape(B, T, heads, -1) for name in "kv")
    weights = jax.nn.softmax(jnp.einsum("bshd,bthd->bhst", q, k))
    return jnp.einsum("bhst,bthd->bshd", weights, v).reshape(B, S, -1) @ p["o"]


def mlp(p, x):
    return jax.nn.gelu(x @ p["up"]) @ p["down"]


def attention_params(D):
    return {name: shape(D, D) for name in "qkvo"}


def test_vit():
    B, D, F, patch, side = 2, 8, 16, 4, 16
    S = (side // patch) ** 2

    def vit(p, images):
        x = conv(images, p["patch"], stride=patch, padding="VALID").reshape(B, S, D)
        x = x + attention(p["attention"], x)
        x = x + mlp(p["mlp"], x)
        return x.mean(axis=1) @ p["head"]

    params = {
        "patch": shape(patch, patch, 3, D),
        "attention": attention_params(D),
        "mlp": {"up": shape(D, F), "down": shape(F, D)},
        "head": shape(D, 10),
    }
    count = count_model_flops(train(vit), params, shape(B, side, side, 3))
    embed = 2 * B * S * patch * patch * 3 * D
    scores_and_values = 2 * 2 * B * S * S * D
    block = 4 * 2 * B * S * D * D + scores_and_values + 2 * 2 * B * S * D * F
    head = 2 * B * D * 10
    assert count.forward == embed + block + head
    assert count.backward == embed + 2 * (block + head)
    assert count.activations == 3 * scores_and_values


def test_t5_encoder_decoder():
    B, S, T, D, F, V = 2, 6, 5, 8, 16, 32

    def t5(p, source, target):
        x = p["embedding"][source]
        x = x + attention(p["encoder"], x)
        x = x + mlp(p["encoder_mlp"], x)
        y = p["embedding"][target]
        y = y + attention(p["decoder"], y)
        y = y + attention(p["cross"], y, x)
        y = y + mlp(p["decoder_mlp"], y)
        return y @ p["embedding"].T

    ffn = {"up": shape(D, F), "down": shape(F, D)}
    params = {
        "embedding": shape(V, D),
        "encoder": attention_params(D),
        "decoder": attention_params(D),
        "cross": attention_params(D),
        "encoder_mlp": ffn,
        "decoder_mlp": ffn,
    }
    tokens = functools.partial(shape, dtype=jnp.int32)
    count = count_model_flops(train(t5), params, tokens(B, S), tokens(B, T))
    encoder = 4 * 2 * B * S * D * D + 2 * 2 * B * S * D * F
    decoder = 4 * 2 * B * T * D * D + 2 * 2 * B * T * D * F
    cross = 2 * 2 * B * T * D * D + 2 * 2 * B * S * D * D  # q and o on T, k and v on S positions
    pairs = 2 * 2 * B * D * (S * S + T * T + T * S)
    head = 2 * B * T * D * V
    assert count.forward == encoder + decoder + cross + pairs + head
    assert count.backward == 2 * count.forward
    assert count.activations == 3 * pairs


def test_moe_by_ragged_dot():
    tokens, D, F, experts, top = 12, 8, 16, 4, 2

    def moe(p, x):
        scores, chosen = jax.lax.top_k(x @ p["router"], top)
        order = jnp.argsort(chosen.reshape(-1))
        rows = jnp.repeat(x, top, axis=0)[order]
        sizes = jnp.bincount(chosen.reshape(-1), length=experts)
        hidden = jax.nn.relu(jax.lax.ragged_dot(rows, p["up"], sizes))
        out = jax.lax.ragged_dot(hidden, p["down"], sizes)
        back = jnp.zeros_like(out).at[order].set(out).reshape(tokens, top, D)
        return (back * jax.nn.softmax(scores)[..., None]).sum(axis=1)

    params = {
        "router": shape(D, experts),
        "up": shape(experts, D, F),
        "down": shape(experts, F, D),
    }
    count = count_model_flops(train(moe), params, shape(tokens, D))
    router = 2 * tokens * D * experts
    up = down = 2 * tokens * top * D * F  # each row meets one expert
    assert count.forward == router + up + down
    # The inputs need no gradient: the router and `up` have only their own.
    assert count.backward == router + up + 2 * down
    assert count.by_primitive["ragged_dot_general"] == 2 * up + 3 * down
    assert count.activations == 0


def test_a_ragged_batch_is_multiplied_whole_whatever_the_group_sizes():
    """JAX's third mode: six products [8, 16] × [16, 4], of which the sizes choose none."""
    numbers = jax.lax.RaggedDotDimensionNumbers((([2], [1]), ([0], [0])), [0], [])

    def product(a, b, sizes):
        return jax.lax.ragged_dot_general(a, b, sizes, numbers)

    arguments = shape(6, 8, 16), shape(6, 16, 4), shape(2, dtype=jnp.int32)
    program = jax.jit(product).lower(*arguments).compile()
    for sizes in ((), (2, 3), (1, 2, 3)):
        count = count_model_flops(product, *arguments, group_sizes=sizes)
        assert (count.total, count.unaccounted) == (6 * 2 * 8 * 16 * 4, ())
        assert executed_flops(program, group_sizes=sizes).total == count.total


def test_a_complex_ragged_product_takes_four_real_ones():
    arguments = shape(6, 8, dtype=jnp.complex64), shape(3, 8, 4, dtype=jnp.complex64)
    sizes = shape(3, dtype=jnp.int32)
    assert count_model_flops(jax.lax.ragged_dot, *arguments, sizes).total == 8 * 6 * 8 * 4


def test_mamba2_block_in_chunks():
    """State-space duality (arXiv 2405.21060, listing 1): matmuls in chunks, a scan between them."""
    B, C, Q, H, P, N, D = 2, 3, 4, 2, 5, 6, 10  # batch, chunks, chunk, heads, head, state, width

    def ssd(x, decay, b, c):
        cumulative = jnp.cumsum(decay, axis=2)
        within = jnp.exp(cumulative[:, :, :, None] - cumulative[:, :, None])
        pairs = jnp.einsum("bcqn,bcsn->bcqs", c, b)[..., None] * within
        inside = jnp.einsum("bcqsh,bcshp->bcqhp", pairs, x)
        states = jnp.einsum("bcsn,bcshp->bchpn", b, x)

        def combine(left, right):
            return left[0] * right[0], left[1] * right[0][..., None, None] + right[1]

        gates = jnp.exp(cumulative[:, :, -1])
        _, carried = jax.lax.associative_scan(combine, (gates, states), axis=1)
        return inside + jnp.einsum("bcqn,bchpn->bcqhp", c, carried)

    def block(p, tokens):
        x = tokens @ p["in"]
        b, c, decay = tokens @ p["b"], tokens @ p["c"], tokens @ p["dt"]
        split = functools.partial(jnp.reshape)
        y = ssd(
            split(x, (B, C, Q, H, P)),
            -jax.nn.softplus(split(decay, (B, C, Q, H))),
            split(b, (B, C, Q, N)),
            split(c, (B, C, Q, N)),
        )
        return y.reshape(B, C * Q, H * P) @ p["out"]

    params = {
        "in": shape(D, H * P),
        "b": shape(D, N),
        "c": shape(D, N),
        "dt": shape(D, H),
        "out": shape(H * P, D),
    }
    count = count_model_flops(train(block), params, shape(B, C * Q, D))
    S = C * Q
    inner = 2 * B * S * D * (H * P + 2 * N + H)
    out = 2 * B * S * H * P * D
    scan = (
        2 * B * C * Q * Q * N  # C·Bᵀ within a chunk
        + 2 * B * C * Q * Q * H * P  # … times x
        + 2 * B * C * Q * N * H * P  # each chunk's state
        + 2 * B * C * Q * N * H * P  # the carried state, read
    )
    assert count.forward == inner + scan + out
    assert count.backward == inner + 2 * scan + 2 * out
    assert count.activations == 3 * scan
    assert count.unaccounted == ()


def test_second_derivative():
    """d/dx of ‖df/dx‖² for f = Σ tanh(x·a)·b: the forward-over-reverse of a gradient penalty."""

    def penalty(x, w):
        return jnp.sum(jax.grad(two_layers, 1)(w, x) ** 2)

    count = count_model_flops(jax.grad(penalty), shape(B, D), TWO_LAYERS)
    # Inner gradient: x·a forward (the sum needs no value of ·b), b's and a's products backward.
    # Its gradient: back through the product with aᵀ (·a), through tanh' to x·a (·aᵀ): ·b carries
    # no gradient of x.
    assert count.total == FIRST + (SECOND + FIRST) + (FIRST + FIRST)
    assert count.unaccounted == ()


def test_hessian():
    """Forward over reverse: the gradient once, and its tangent for each of the D inputs."""
    w = shape(D, F)

    def f(x, w):
        return jnp.sum(jnp.tanh(x @ w))

    count = count_model_flops(jax.hessian(f), shape(D), w)
    # x·w, and its tangent for D directions; then the tangents of the product with wᵀ.
    assert count.total == 2 * D * F + D * 2 * D * F + D * 2 * D * F
    assert count.unaccounted == ()


def test_per_example_gradients():
    def example_loss(w, x):
        return two_layers(w, x[None])

    count = count_model_flops(
        jax.vmap(jax.value_and_grad(example_loss), (None, 0)), TWO_LAYERS, shape(B, D)
    )
    assert count.forward == FIRST + SECOND
    # The cotangent of the sum is 1 for every example: its product with bᵀ is done once for all.
    assert count.backward == FIRST + SECOND + 2 * F
    assert count.activations == 0


def test_gradient_accumulation_by_scan():
    micro = 4

    @jax.jit
    def step(w, batches):
        def accumulate(total, x):
            value, gradient = jax.value_and_grad(two_layers)(w, x)
            return jax.tree.map(jnp.add, total, gradient), value

        zeros = jax.tree.map(jnp.zeros_like, w)
        return jax.lax.scan(accumulate, zeros, batches)

    count = count_model_flops(step, TWO_LAYERS, shape(micro, B, D))
    assert count.forward == micro * (FIRST + SECOND)
    assert count.backward == micro * (FIRST + 2 * SECOND)


def test_checkpoint_inside_scan_inside_checkpoint():
    outer, inner = 3, 4

    def layer(x, w):
        return jnp.tanh(x @ w["up"]) @ w["down"]

    @jax.checkpoint
    def group(x, ws):
        return jax.lax.scan(lambda x, w: (jax.checkpoint(layer)(x, w), None), x, ws)[0]

    def loss(ws, x):
        return jnp.sum(jax.lax.scan(lambda x, w: (group(x, w), None), x, ws)[0] ** 2)

    ws = {"up": shape(outer, inner, D, F), "down": shape(outer, inner, F, D)}
    count = count_model_flops(jax.value_and_grad(loss), ws, shape(B, D))
    up = down = outer * inner * 2 * B * D * F
    assert count.forward == up + down
    assert count.backward == 2 * (up + down)
    # Each group is run again for its layers' inputs (both matmuls of every layer, as one loop), and
    # each layer again for its own residuals, for which `down` is not needed.
    assert count.rematerialized == (up + down) + up


def test_gradient_of_a_weight_is_distinguished_from_a_product_of_activations():
    """Both multiply activations; the first comes from the line where a parameter is used."""

    def loss(w, x):
        y = x @ w
        return jnp.sum(jnp.tanh(y.T @ y))

    count = count_model_flops(jax.grad(loss), shape(D, F), shape(B, D))
    assert count.weights == 2 * (2 * B * D * F)
    assert count.activations == 3 * (2 * F * B * F)
