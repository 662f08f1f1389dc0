"""The decoder: causal, packed, the same scanned and unrolled, unchanged by remat."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from mfu_jax.layers.attention.rope import Rope, apply_rope
from mfu_jax.layers.building import Inputs
from mfu_jax.layers.decoder import Decoder, with_moved_biases
from mfu_jax.layers.feed_forward.mlp import MlpSpec
from mfu_jax.layers.normalizations import LayerNorm, RMSNorm
from mfu_jax.layers.stack.stack import segments_of

from mfu_jax.flops.analytic.parameters import count_parameters
from mfu_jax.trainer.config import pyconfig
from mfu_jax.trainer.step import state
from tests.support.floats import assert_close_as_float32
from tests.support.tiny_layers import tiny_builder

S = 16
TERMS = 256  # the vocabulary, the longest sum
TOKENS = np.random.default_rng(0).integers(1, 256, (2, S))


def decoder(**keys: Any) -> Decoder:
    sizes = {"num_decoder_layers": 2, "emb_dim": 32, "mlp_dim": 48, "head_dim": 8}
    config = pyconfig.from_mapping({}, overrides={**sizes, "max_target_length": S, **keys})
    return Decoder(config, attention="dot_product", rngs=nnx.Rngs(params=1))


def logits(model: Decoder, tokens: np.ndarray, segments: np.ndarray | None = None) -> np.ndarray:
    positions = np.tile(np.arange(tokens.shape[1]), (len(tokens), 1))
    segments = np.ones_like(tokens) if segments is None else segments
    for row in range(len(tokens)):
        for s in range(1, tokens.shape[1]):
            same = segments[row, s] == segments[row, s - 1]
            positions[row, s] = positions[row, s - 1] + 1 if same else 0
    inputs = (jnp.asarray(array) for array in (tokens, positions, segments))
    return np.asarray(nnx.jit(Decoder.__call__)(model, *inputs))


@pytest.mark.full
@pytest.mark.parametrize("block", ["llama2", "gpt2", "default"])
def test_no_token_sees_the_future(block: str) -> None:
    model = decoder(decoder_block=block)
    changed = TOKENS.copy()
    changed[:, 9:] = 7
    before, after = logits(model, TOKENS), logits(model, changed)
    assert_close_as_float32(after[:, :9], before[:, :9], terms=TERMS)
    assert np.abs(before[:, 9:] - after[:, 9:]).max() > 1e-3


@pytest.mark.full
def test_a_packed_document_is_read_as_if_it_stood_alone() -> None:
    model = decoder()
    segments = np.where(np.arange(S) < 6, 1, 2) * np.ones((2, 1), int)
    packed = logits(model, TOKENS, segments)
    assert_close_as_float32(packed[:, :6], logits(model, TOKENS[:, :6]), terms=TERMS)
    assert_close_as_float32(packed[:, 6:], logits(model, TOKENS[:, 6:]), terms=TERMS)


@pytest.mark.full
def test_scanned_and_unrolled_layers_agree() -> None:
    scanned, unrolled = decoder(scan_layers=True), decoder(scan_layers=False)
    assert_close_as_float32(logits(scanned, TOKENS), logits(unrolled, TOKENS), terms=TERMS)


@functools.cache
def gradients(**keys: Any) -> Any:
    """Of the summed squares of all logits."""
    graph, weights = nnx.split(decoder(**keys))
    inputs, ones = jnp.asarray(TOKENS), jnp.ones_like(TOKENS)

    def loss(weights: Any) -> jax.Array:
        return jnp.square(nnx.merge(graph, weights)(inputs, ones, ones)).sum()

    return jax.tree.leaves(jax.jit(jax.grad(loss))(weights))


@pytest.mark.full
@pytest.mark.parametrize("policy", ["minimal", "full", "names"])
@pytest.mark.parametrize("scan", [True, False])
def test_remat_changes_no_gradient(policy: str, scan: bool) -> None:
    names = ("context", "mlpwi_0") if policy == "names" else ()
    with_remat = gradients(scan_layers=scan, remat_policy=policy, remat_save_names=names)
    assert_close_as_float32(with_remat, gradients(scan_layers=scan), terms=TERMS)


def test_weights_keep_their_dtype_and_matmuls_take_the_other() -> None:
    model = decoder(dtype="bfloat16", weight_dtype="float32")
    weights = jax.tree.leaves(nnx.state(model))
    assert {w.dtype for w in weights} == {jnp.dtype("float32")}
    tokens = jnp.ones((1, S), int)
    text = str(jax.make_jaxpr(lambda t: model(t, t, t))(tokens))
    dots = [line for line in text.splitlines() if "= dot_general" in line]
    assert dots
    assert all("bf16" in line.split("=")[0] for line in dots)


@pytest.mark.full
def test_rope_depends_on_distance_alone() -> None:
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.normal(size=(1, 1, 1, 8)), jnp.float32) for _ in range(2))

    def score(i: int, j: int) -> float:
        at = [apply_rope(x, jnp.array([[p]]), Rope(timescale=100.0)) for x, p in ((q, i), (k, j))]
        return float((at[0] * at[1]).sum())

    assert_close_as_float32(score(7, 3), score(14, 10), terms=8)
    assert abs(score(7, 3) - score(7, 5)) > 1e-3
    # By hand (arXiv 2104.09864, equation 34): pair 0 turns by the position in radians.
    x = jnp.zeros((1, 1, 1, 4)).at[..., 0].set(1.0)
    turned = apply_rope(x, jnp.array([[2]]), Rope(timescale=10000.0))[0, 0, 0]
    assert_close_as_float32(turned, np.array([np.cos(2), 0, np.sin(2), 0]), terms=1)


def test_norms_are_their_formulas() -> None:
    x = np.array([[1.0, 2.0, 3.0, 6.0]], np.float32)
    options = {"epsilon": 0.0, "weight_dtype": jnp.dtype("float32")}
    # mean of squares 12.5; mean 3, variance 3.5
    assert_close_as_float32(RMSNorm(4, **options)(x), x / np.sqrt(12.5), terms=4)
    assert_close_as_float32(LayerNorm(4, **options)(x), (x - 3) / np.sqrt(3.5), terms=4)


@pytest.mark.full
def test_projections_and_mlp_are_their_formulas() -> None:
    build = tiny_builder(6, epsilon=0.0)
    dense = build.dense((2, 3), (4,), ("q_heads", "head_dim", "embed"), bias=True)
    x = np.random.default_rng(0).normal(size=(1, 5, 2, 3)).astype(np.float32)
    want = np.einsum("bsnh,nhd->bsd", x, dense.kernel[...])
    assert_close_as_float32(dense(x), want, terms=6)
    mlp = MlpSpec(hidden=8, activations=("relu", "linear")).make(build)
    x = x.reshape(1, 5, 6)
    hidden = np.maximum(x @ mlp.wi_0.kernel[...], 0) * (x @ mlp.wi_1.kernel[...])
    assert_close_as_float32(mlp(x), hidden @ mlp.wo.kernel[...], terms=8)


@pytest.mark.full
def test_parallel_layers_are_their_formula() -> None:
    # arXiv 2204.02311, section 2, with one norm: x + MLP(norm(x)) + attention(norm(x))
    model = decoder(decoder_block="default", scan_layers=False, num_decoder_layers=1)
    block = model.layers.groups[0][0]
    ones = jnp.ones((1, S), int)
    inputs = Inputs(tokens=ones, positions=jnp.arange(S)[None], segment_ids=ones)
    x = np.random.default_rng(0).normal(size=(1, S, 32)).astype(np.float32)
    y = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + 1e-5)
    want = x + np.asarray(block.feed_forward(y, inputs)) + np.asarray(block.mixer(y, inputs))
    assert_close_as_float32(block(jnp.asarray(x), inputs), want, terms=48)


@pytest.mark.parametrize(("block", "norms"), [("default", 3), ("llama2", 5)])
def test_weights_of_norms(block: str, norms: int) -> None:
    # MaxText, decoders.py and llama2.py: one or two in each of two layers, and the decoder's.
    sizes = {"num_decoder_layers": 2, "emb_dim": 32, "mlp_dim": 48, "head_dim": 8}
    config = pyconfig.from_mapping({}, overrides={**sizes, "decoder_block": block})
    model = nnx.eval_shape(lambda: state.make_model(config, 0))
    leaves = jax.tree_util.tree_leaves_with_path(nnx.state(model, nnx.Param))
    assert sum(leaf.size for path, leaf in leaves if "norm" in str(path)) == 32 * norms
    assert sum(leaf.size for _, leaf in leaves) == count_parameters(config).total


@pytest.mark.parametrize(
    ("layers", "segments"),
    [
        ("aaaa", [("a", 4)]),
        ("dddmmmmm", [("d", 3), ("m", 5)]),
        ("llg" * 4 + "ll", [("llg", 4), ("l", 2)]),
    ],
)
def test_repeated_patterns_are_found(layers: Any, segments: list[tuple[str, int]]) -> None:
    found = [("".join(map(str, s.pattern)), s.repeats) for s in segments_of(layers)]
    assert found == segments


@pytest.mark.full
def test_a_routers_bias_follows_its_load_and_nothing_else_moves() -> None:
    experts = {"num_experts": 4, "moe_mlp_dim": 8, "routed_bias": True}
    latent = {"attention_type": "mla", "kv_lora_rank": 8, "v_head_dim": 4}
    sizes = {"num_decoder_layers": 3, "first_num_dense_layers": 1}
    model = decoder(decoder_block="deepseek", **experts, **latent, **sizes)
    before = nnx.state(model, nnx.Param)
    # A dense layer, then two with experts, which are scanned.
    load = jnp.array([[0.0, 4.0, 2.0, 2.0], [2.0, 2.0, 2.0, 2.0]])
    loads = model.loads([[{}], [{"expert_load": load}]])
    after = with_moved_biases(before, before, loads, 0.5)
    changed = {
        "/".join(map(str, path)): (new.get_value() - old.get_value()).tolist()
        for (path, new), (_, old) in zip(
            nnx.to_flat_state(after), nnx.to_flat_state(before), strict=True
        )
        if (new.get_value() != old.get_value()).any()
    }
    bias = "layers/groups/1/0/feed_forward/router/choice_bias"
    assert changed == {bias: [[0.5, -0.5, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]}


@pytest.mark.full
def test_a_lookup_by_a_matmul_with_one_hot_rows_finds_the_same_rows() -> None:
    by_gather, by_matmul = (logits(decoder(use_iota_embed=how), TOKENS) for how in (False, True))
    np.testing.assert_array_equal(by_gather, by_matmul)
