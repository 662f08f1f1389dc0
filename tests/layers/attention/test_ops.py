"""Every attention implementation against attention written out in numpy."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mfu_jax.layers.attention import kernels as attention_kernels  # noqa: F401, they register themselves
from mfu_jax.layers.attention.ops import (
    ATTENTION_OPS,
    VALUE_DIM,
    AttentionInputs,
    AttentionPattern,
    SplashBlocks,
    choose_attention,
)

from tests.support.floats import assert_close_as_float32


def written_out(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    segments: np.ndarray,
    *,
    window: int = 10**9,
    chunk: int = 10**9,
    cap: float = 0.0,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """Softmax attention (arXiv 1706.03762, equation 1), token by token."""
    B, S, N, h = q.shape
    group = N // k.shape[2]
    out = np.zeros((B, S, N, v.shape[-1]), q.dtype)
    for b in range(B):
        for n in range(N):
            for s in range(S):
                first = max(0, s - window + 1, s // chunk * chunk)
                seen = [t for t in range(first, s + 1) if segments[b, t] == segments[b, s]]
                scores = np.array([q[b, s, n] @ k[b, t, n // group] for t in seen]) / math.sqrt(h)
                if cap:
                    scores = cap * np.tanh(scores / cap)
                weights = np.exp(scores)
                weights /= weights.sum() + (0 if sinks is None else np.exp(sinks[n]))
                values = [v[b, t, n // group] for t in seen]
                out[b, s, n] = sum(w * x for w, x in zip(weights, values, strict=True))
    return out


def inputs(S: int, N: int, K: int, h: int) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(2, S, n, h)).astype(np.float32) for n in (N, K, K))
    segments = np.cumsum(rng.random((2, S)) < 0.1, axis=1).astype(np.int32) + 1
    return q, k, v, segments


def attention_inputs(arrays: Sequence[np.ndarray], **options: Any) -> AttentionInputs:
    return AttentionInputs(*map(jnp.asarray, arrays), **options)


@pytest.mark.full
@pytest.mark.parametrize("op", ["dot_product", "jax"])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)], ids=["MHA", "GQA", "MQA"])
def test_xla_implementations_are_attention(op: str, heads: tuple[int, int]) -> None:
    arrays = inputs(24, *heads, 8)
    got = ATTENTION_OPS[op](attention_inputs(arrays))
    assert_close_as_float32(got, written_out(*arrays), terms=24)


# What a model may need → options of `written_out`, the pattern, and sinks.
PATTERNS = {
    "window": ({"window": 5}, AttentionPattern(window=5)),
    "chunks": ({"chunk": 7}, AttentionPattern(chunk=7)),
    "soft cap": ({"cap": 0.5}, AttentionPattern(soft_cap=0.5)),
    "sinks": ({"sinks": np.array([0.3, -1.0, 2.0, 0.0])}, AttentionPattern()),
}


@pytest.mark.parametrize("need", PATTERNS)
def test_windows_chunks_caps_and_sinks(need: str) -> None:
    options, pattern = PATTERNS[need]
    arrays = inputs(24, 4, 2, 8)
    sinks = jnp.asarray(options["sinks"]) if "sinks" in options else None
    got = ATTENTION_OPS["dot_product"](attention_inputs(arrays, pattern=pattern, sinks=sinks))
    assert_close_as_float32(got, written_out(*arrays, **options), terms=24)


@pytest.mark.full
def test_values_may_be_narrower_than_keys() -> None:
    q, k, v, segments = inputs(12, 4, 2, 8)
    v = v[..., :3]
    got = ATTENTION_OPS["dot_product"](attention_inputs((q, k, v, segments)))
    assert_close_as_float32(got, written_out(q, k, v, segments), terms=12)


@pytest.fixture
def interpreted_splash(monkeypatch: pytest.MonkeyPatch) -> None:
    from jax.experimental.pallas.ops.tpu import splash_attention as kernel

    interpreted = functools.partial(kernel.make_splash_mha, interpret=True)
    monkeypatch.setattr(kernel, "make_splash_mha", interpreted)


@pytest.mark.full
@pytest.mark.usefixtures("interpreted_splash")
def test_splash_takes_blocks_that_do_not_divide_a_row() -> None:
    blocks = SplashBlocks(q=256, kv=256, kv_compute=256)
    arrays = inputs(384, 2, 1, 128)
    got = ATTENTION_OPS["splash"](attention_inputs(arrays, pattern=AttentionPattern(blocks=blocks)))
    assert_close_as_float32(got, written_out(*arrays), terms=384)


@pytest.mark.full
@pytest.mark.usefixtures("interpreted_splash")
@pytest.mark.parametrize("need", [None, *PATTERNS])
def test_splash_is_attention_when_interpreted(need: str | None) -> None:
    options, pattern = PATTERNS.get(need or "", ({}, AttentionPattern()))
    arrays = inputs(128, 4, 2, 128)
    sinks = jnp.asarray(options["sinks"]) if "sinks" in options else None
    got = ATTENTION_OPS["splash"](attention_inputs(arrays, pattern=pattern, sinks=sinks))
    assert_close_as_float32(got, written_out(*arrays, **options), terms=128)


@pytest.mark.parametrize(
    ("name", "platform", "dtype", "chosen"),
    [
        ("auto", "tpu", "bfloat16", "splash"),
        ("auto", "gpu", "bfloat16", "cudnn_flash"),
        ("auto", "gpu", "float32", "dot_product"),
        ("auto", "cpu", "float32", "dot_product"),
        ("jax", "tpu", "float32", "jax"),
    ],
)
def test_auto_takes_what_the_platform_has(
    name: str, platform: str, dtype: str, chosen: str
) -> None:
    assert choose_attention(name, platform=platform, dtype=dtype) == chosen


@pytest.mark.parametrize(
    ("name", "platform"), [("splash", "cpu"), ("splash", "gpu"), ("cudnn_flash", "tpu")]
)
def test_a_kernel_of_another_platform_is_refused(name: str, platform: str) -> None:
    with pytest.raises(ValueError, match=f"(?s)attention={name} runs on .* only"):
        choose_attention(name, platform=platform, dtype="bfloat16")


def test_auto_takes_the_fastest_that_has_what_the_model_needs() -> None:
    needs = {"attention sinks"}
    assert choose_attention("auto", platform="tpu", dtype="bfloat16", needs=needs) == "splash"
    assert choose_attention("auto", platform="gpu", dtype="bfloat16", needs=needs) == "dot_product"
    with pytest.raises(ValueError, match="attention=cudnn_flash does not have attention sinks"):
        choose_attention("cudnn_flash", platform="gpu", dtype="bfloat16", needs=needs)


def test_cudnn_has_values_narrower_than_keys_where_the_device_has() -> None:
    options: dict[str, Any] = {"platform": "gpu", "dtype": "bfloat16", "needs": {VALUE_DIM}}
    assert choose_attention("auto", **options) == "cudnn_flash"
    assert choose_attention("auto", **options, cudnn_lacks=[VALUE_DIM]) == "dot_product"
    assert choose_attention("dot_product", **options, cudnn_lacks=[VALUE_DIM]) == "dot_product"
    with pytest.raises(ValueError, match="does not have values narrower than keys"):
        choose_attention("cudnn_flash", **options, cudnn_lacks=[VALUE_DIM])


def test_cudnn_is_refused_in_float32() -> None:
    with pytest.raises(ValueError, match="bfloat16 or float16"):
        choose_attention("cudnn_flash", platform="gpu", dtype="float32")


@pytest.mark.parametrize(
    ("packed", "chunk", "is_masked"), [(True, 0, True), (False, 0, False), (False, 2, True)]
)
def test_cudnn_gets_a_mask_only_if_rows_have_parts(
    packed: bool, chunk: int, is_masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}

    def attend(q: jax.Array, *args: Any, **options: Any) -> jax.Array:
        given.update(options)
        return q

    monkeypatch.setattr(jax.nn, "dot_product_attention", attend)
    q = k = v = jnp.zeros((1, 4, 2, 8), jnp.bfloat16)
    segments = jnp.ones((1, 4), jnp.int32)
    pattern = AttentionPattern(chunk=chunk)
    ATTENTION_OPS["cudnn_flash"](AttentionInputs(q, k, v, segments, pattern=pattern, packed=packed))
    assert (given["mask"] is not None) == is_masked
    assert given["is_causal"]
