"""Attention masks: recognised where the trace shows them, declared where it does not."""

from __future__ import annotations

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from hypothesis import given
from hypothesis import strategies as st

from mfu_jax.errors import UserError
from mfu_jax.flops.traced.counting import count_model_flops
from mfu_jax.flops.traced.masks.declared import attention_mask
from mfu_jax.flops.traced.masks.pairs import Band, Chunks, document_pairs, read_pairs
from tests.support.program_kernel_bodies import causal_attention
from tests.support.small_functions import shape

B, S, H, D = 2, 12, 4, 8
PAIR = 2 * 2 * H * D  # scores and values, for one query and one key, all heads


bounds = st.one_of(st.none(), st.integers(-9, 9))
chunks = st.one_of(
    st.none(), st.builds(Chunks, st.integers(1, 5), st.integers(0, 6), st.integers(0, 6))
)


@given(bounds, bounds, chunks, st.integers(1, 7), st.integers(1, 7))
def test_pairs_of_a_band_are_those_counted_one_by_one(low, high, chunks, queries, keys):
    counted = sum(
        (low is None or i - j >= low)
        and (high is None or i - j <= high)
        and (
            chunks is None
            or (i + chunks.of_query) // chunks.size == (j + chunks.of_key) // chunks.size
        )
        for i in range(queries)
        for j in range(keys)
    )
    assert Band(low, high, chunks).pairs(queries, keys) == counted


def step(attend):
    """Forward and backward of attention whose operands are activations."""

    def loss(w, x):
        q, k, v = (jnp.tanh(x @ p).reshape(*x.shape[:-1], -1, D) for p in (w["q"], w["k"], w["v"]))
        return jnp.sum(attend(q, k, v))

    return jax.value_and_grad(loss)


def count_attention(attend, kv_heads=H):
    width = H * D
    weights = {"q": shape(width, width), "k": shape(width, kv_heads * D)}
    weights["v"] = weights["k"]
    return count_model_flops(step(attend), weights, shape(B, S, width))


def naive(q, k, v, mask):
    scores = jnp.einsum("bshd,bthd->bhst", q, k)
    return jnp.einsum("bhst,bthd->bshd", jax.nn.softmax(jnp.where(mask, scores, -jnp.inf)), v)


def position_difference():
    return jnp.arange(S)[:, None] - jnp.arange(S)[None, :]


def additive(q, k, v):
    scores = jnp.einsum("bshd,bthd->bhst", q, k)
    scores += jnp.where(position_difference() >= 0, 0.0, -1e9)
    return jnp.einsum("bhst,bthd->bshd", jax.nn.softmax(scores), v)


def from_linen(q, k, v):
    mask = linen.make_causal_mask(jnp.ones((B, S)))
    return linen.dot_product_attention(q, k, v, mask=mask)


def from_nnx(q, k, v):
    mask = nnx.make_causal_mask(jnp.ones((B, S)))
    return nnx.dot_product_attention(q, k, v, mask=mask)


CAUSAL = {
    "jax.nn": lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True),
    "tril": lambda q, k, v: naive(q, k, v, jnp.tril(jnp.ones((S, S), bool))),
    "iota": lambda q, k, v: naive(q, k, v, position_difference() >= 0),
    "constant": lambda q, k, v: naive(q, k, v, np.tril(np.ones((S, S), bool))),
    "additive": additive,
    "linen": from_linen,
    "nnx": from_nnx,
}


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("remat", [True, False])
def test_causal_masks_are_recognised(name, remat):
    attend = jax.checkpoint(CAUSAL[name]) if remat else CAUSAL[name]
    count = count_attention(attend)
    dense = 3 * B * S * S * PAIR
    assert count.activations == dense
    assert count.by_mask == {"causal": dense}
    assert count.total - count.total_in("exact") == dense - 3 * B * (S * (S + 1) // 2) * PAIR
    assert count.total - count.total_in("maxtext") == dense // 2
    assert count.total_in("dense") == count.total


def test_windows_are_recognised():
    window = 4  # itself and three before it
    kept = sum(min(i + 1, window) for i in range(S))
    dense = 3 * B * S * S * PAIR

    def jax_nn(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=(3, 0))

    def iota(q, k, v):
        difference = position_difference()
        return naive(q, k, v, (difference >= 0) & (difference < window))

    for attend in (jax_nn, iota):
        count = count_attention(attend)
        assert count.by_mask == {"window 4": dense}
        assert count.skipped["exact"] == dense - 3 * B * kept * PAIR
        assert count.skipped["maxtext"] == dense - 3 * B * (S * window - window**2 // 2) * PAIR


def test_grouped_queries_under_a_causal_mask():
    def attend(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, is_causal=True)

    count = count_attention(attend, kv_heads=2)
    assert count.by_mask == {"causal": 3 * B * S * S * PAIR}
    assert count.skipped["exact"] == 3 * B * (S * (S - 1) // 2) * PAIR


def test_layers_of_one_scan_with_their_mask_made_inside_or_outside():
    def loss(ws, x, outside):
        mask = jnp.tril(jnp.ones((S, S), bool))

        def layer(x, w):
            heads = (x @ w).reshape(B, S, H, D)
            inner = mask if outside else jnp.tril(jnp.ones((S, S), bool))
            return naive(heads, heads, heads, inner).reshape(B, S, H * D), None

        return jnp.sum(jax.lax.scan(layer, x, ws)[0])

    for outside in (True, False):
        count = count_model_flops(
            jax.value_and_grad(lambda ws, x, o=outside: loss(ws, x, o)),
            shape(3, H * D, H * D),
            shape(B, S, H * D),
        )
        assert count.by_mask == {"causal": 3 * 3 * B * S * S * PAIR}


def test_alternating_windows_are_distinguished():
    def loss(w, x):
        for window in (4, S):
            heads = (x @ w).reshape(B, S, H, D)
            difference = position_difference()
            mask = (difference >= 0) & (difference < window)
            x = naive(heads, heads, heads, mask).reshape(B, S, H * D)
        return jnp.sum(x)

    count = count_model_flops(jax.value_and_grad(loss), shape(H * D, H * D), shape(B, S, H * D))
    dense = 3 * B * S * S * PAIR
    assert count.by_mask == {"window 4": dense, "causal": dense}
    kept = sum(min(i + 1, 4) for i in range(S)) + S * (S + 1) // 2
    assert count.skipped["exact"] == 2 * dense - 3 * B * kept * PAIR


def test_a_mask_that_is_data_is_not_seen_but_can_be_declared():
    def fn(w, x, mask):
        heads = (x @ w).reshape(B, S, H, D)
        return jnp.sum(naive(heads, heads, heads, mask))

    arguments = shape(H * D, H * D), shape(B, S, H * D), shape(S, S, dtype=jnp.bool_)
    dense = 3 * B * S * S * PAIR
    unseen = count_model_flops(jax.value_and_grad(fn), *arguments)
    assert unseen.by_mask == {}
    assert unseen.total_in("exact") == unseen.total

    with attention_mask("causal"):
        around = count_model_flops(jax.value_and_grad(fn), *arguments)
    inside = count_model_flops(jax.value_and_grad(attention_mask("causal")(fn)), *arguments)
    for count in (around, inside):
        assert count.total == unseen.total
        assert count.by_mask == {"causal": dense}
        assert count.skipped["exact"] == 3 * B * (S * (S - 1) // 2) * PAIR
        assert count.by_scope == unseen.by_scope

    with attention_mask("causal", window=4):
        assert count_model_flops(jax.value_and_grad(fn), *arguments).by_mask == {"window 4": dense}


def test_a_mask_declared_in_the_model_overrides_the_recognised_one():
    def attend(q, k, v):
        with attention_mask("full"):
            return CAUSAL["tril"](q, k, v)

    count = count_attention(attend)
    assert count.by_mask == {"full": 3 * B * S * S * PAIR}
    assert count.total_in("exact") == count.total


def test_kernels_take_a_declared_mask_too():
    from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention

    def loss(w, x):
        heads = (x @ w).reshape(1, 256, 2, 128).transpose(0, 2, 1, 3)
        return jnp.sum(flash_attention(heads, heads, heads, causal=True))

    dense = 3 * 2 * 2 * 2 * 256**2 * 128
    arguments = shape(256, 256), shape(1, 256, 256)
    seen = count_model_flops(jax.value_and_grad(loss), *arguments)
    assert seen.by_mask == {"blocks skipped by a kernel": dense}
    assert seen.skipped["exact"] == dense // 4  # one of 2·2 blocks of 128
    with attention_mask("causal"):
        declared = count_model_flops(jax.value_and_grad(attention_mask("causal")(loss)), *arguments)
    assert declared.skipped["exact"] == dense * (256 * 255 // 2) // 256**2


@pytest.mark.parametrize("window", [None, 17])
def test_cudnn_attention(monkeypatch, window):
    from jax._src.cudnn import fused_attention_stablehlo

    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91300)
    B, S, N, kv_heads, width = 2, 256, 4, 2, 64

    def loss(q, k, v):
        out = jax.nn.dot_product_attention(
            q,
            k,
            v,
            is_causal=True,
            local_window_size=window and (window - 1, 0),
            implementation="cudnn",
        )
        return out.astype(jnp.float32).sum()

    q = shape(B, S, N, width, dtype=jnp.bfloat16)
    k = shape(B, S, kv_heads, width, dtype=jnp.bfloat16)
    count = count_model_flops(jax.value_and_grad(loss, (0, 1, 2)), q, k, k)
    dense = 2 * 2 * B * N * S * S * width
    assert (count.forward, count.backward) == (dense, 2 * dense)
    kept = sum(min(i + 1, window or S) for i in range(S))
    assert count.by_mask == {f"window {window}" if window else "causal": 3 * dense}
    assert count.total_in("exact") == 3 * 2 * 2 * B * N * kept * width


def test_cudnn_attention_with_values_narrower_than_keys(monkeypatch):
    from jax._src.cudnn import fused_attention_stablehlo

    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91300)
    for check in ("check_compute_capability", "is_cuda_compute_capability_equal"):
        monkeypatch.setattr(
            fused_attention_stablehlo, check, lambda capability: capability == "9.0"
        )
    q, v = (shape(2, 256, 4, width, dtype=jnp.bfloat16) for width in (192, 128))
    gradients = jax.value_and_grad(causal_attention, (1, 2, 3))
    einsums, cudnn = (
        count_model_flops(functools.partial(gradients, name), q, q, v)
        for name in ("dot_product", "cudnn_flash")
    )
    assert (cudnn.forward, cudnn.backward) == (einsums.forward, einsums.backward)
    assert cudnn.by_mask == {"causal": einsums.total}
    assert cudnn.total_in("exact") * 2 * 256 == einsums.total * 257


@pytest.mark.parametrize("inside", [True, False])
def test_a_declared_mask_does_not_apply_to_gradients_of_weights(inside):
    """dW = xᵀ·dy multiplies activations, too, from the second layer on and in the head."""
    layers, vocabulary = 3, 16

    def layer(x, w):
        with attention_mask("causal") if inside else contextlib.nullcontext():
            q, k, v = x @ w["q"], x @ w["k"], x @ w["v"]
            scores = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", q, k))
            return jnp.tanh(scores @ v @ w["o"])

    def loss(weights, head, x):
        for w in weights:
            x = layer(x, w)
        return jnp.mean(jax.nn.log_softmax(x @ head)[..., 0])

    def shape(*sizes):
        return jax.ShapeDtypeStruct(sizes, jnp.float32)

    weights = [{name: shape(8, 8) for name in "qkvo"}] * layers
    with contextlib.nullcontext() if inside else attention_mask("causal"):
        count = count_model_flops(
            jax.value_and_grad(loss, (0, 1)), weights, shape(8, vocabulary), shape(B, S, 8)
        )
    pairs = 3 * layers * 2 * (2 * B * S * S * 8)
    assert count.by_mask == {"causal": pairs}
    assert count.total - count.total_in("maxtext") == pairs // 2
    assert count.activations == pairs


def test_a_factors_triangle_is_no_mask_over_the_factorisation():
    def roots(q, k):
        covariance = jnp.einsum("bsi,bti->bst", q, k) + jnp.eye(S)
        return jnp.tril(jnp.linalg.cholesky(covariance))

    x = jax.ShapeDtypeStruct((B, S, 8), jnp.float32)
    count = count_model_flops(roots, x, x)
    assert count.by_mask == {}
    assert count.total_in("maxtext") == B * (2 * S * S * 8 + S**3 // 3)


def test_a_solve_with_masked_scores_counts_its_triangle_once():
    def chunk(k, v):
        scores = jnp.tril(jnp.einsum("bsi,bti->bst", k, k), -1) + jnp.eye(S)
        return jax.scipy.linalg.solve_triangular(scores, v, lower=True)

    x = jax.ShapeDtypeStruct((B, S, 8), jnp.float32)
    count = count_model_flops(chunk, x, x)
    assert count.total == B * (2 * S * S * 8 + S * S * 8)
    kept = B * 2 * (S * (S - 1) // 2) * 8
    assert count.total_in("exact") == kept + B * S * S * 8


def test_packed_documents():
    """ΣL² from segment ids, against the lengths themselves."""
    lengths = [[5, 3, 4], [7, 2], [12]]
    ids = np.zeros((3, S), int)
    for row, row_lengths in zip(ids, lengths, strict=True):
        row[: sum(row_lengths)] = np.repeat(np.arange(1, len(row_lengths) + 1), row_lengths)
    pairs = read_pairs(jax.jit(document_pairs)(ids))
    assert pairs == sum(n * n for row in lengths for n in row)

    def attend(q, k, v):
        with attention_mask("documents"):
            return naive(q, k, v, jnp.ones((S, S), bool))

    count = count_attention(attend)
    weights = count.total - 3 * B * S * S * PAIR
    assert count.total_for_documents(90, of=B * S * S) == weights + 3 * 90 * PAIR


@pytest.mark.full
def test_long_rows_do_not_overflow():
    ids = jnp.ones((2, 131072), jnp.int32)
    assert read_pairs(document_pairs(ids)) == 2 * 131072**2


def test_bad_words_are_user_errors():
    with pytest.raises(UserError, match="expected 'causal', 'full', 'documents' or"):  # noqa: SIM117
        with attention_mask("casual"):
            pass
    with pytest.raises(UserError, match="positive int"):  # noqa: SIM117
        with attention_mask("causal", window=0):
            pass
