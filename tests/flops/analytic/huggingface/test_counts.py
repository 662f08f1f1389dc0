"""config.json → FLOPs and parameters, against counts of the real PyTorch models.

The data files name their source. Where PyTorch's programs differ from the mathematics, the part is
excluded by name and recomputed here by hand:

* causal depthwise convolutions run over S + k − 1 positions, of which k − 1 are cut off;
* Mamba-2 and delta nets scan in chunks; the model's count is the recurrence;
* Llama 4 runs every expert on every token (the others, as counted, only those it uses);
* MiniMax's lightning attention works in blocks; the model's count is the recurrence;
* DiffLlama computes the scores of its two halves of values twice;
* DeepSeek V4 writes two contractions as multiply and sum, which the counter does not see;
* Qwen 4's indexer scores no block after the query;
* ZAYA's first convolution also runs before the sequence, and its delayed values for a row of zeros;
* LongCat's class also has input matrices for the experts that compute nothing (no file has them).
"""

from __future__ import annotations

import json
from fractions import Fraction
from typing import Any

import pytest

from mfu_jax.flops.analytic.huggingface import from_hf_config
from mfu_jax.flops.analytic.huggingface.common import TRANSLATIONS
from mfu_jax.flops.analytic.model_configs.model import ModelConfig
from mfu_jax.flops.analytic.parameters import count_parameters
from mfu_jax.flops.analytic.totals import flops_bounds, flops_breakdown, model_flops_per_device
from mfu_jax.flops.exact import Number
from tests.support.paths import DATA

_ISSUED = (
    "llama mistral mixtral qwen2 qwen3 qwen2_moe qwen3_moe qwen3_next qwen3_5_text gemma gemma2 "
    "gemma3_text gemma3 gemma3n gemma4_text gpt2 gpt_neox gptj opt phi phi3 phimoe falcon olmo "
    "olmo2 olmo3 olmoe starcoder2 stablelm cohere cohere2 granite granitemoe glm glm4 glm4_moe "
    "smollm3 arcee exaone4 seed_oss persimmon mpt bloom xglm helium apertus ernie4_5 deepseek_v2 "
    "deepseek_v3 deepseek_v4 gpt_oss llama4_text llama4 mamba2 bamba falcon_h1 jamba lfm2 bert t5 "
    "vit clip whisper"
).split()


def rows(name: str) -> list[Any]:
    read = json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))["rows"]
    return [pytest.param(r, id=f"{r['model_type']}-{i}") for i, r in enumerate(read)]


def config_of(row: dict[str, Any]) -> Any:
    step = {"per_device_batch_size": row["batch"], "max_target_length": row["seq"]}
    return from_hf_config({"model_type": row["model_type"], **row.get("config", {}), **step})


def excluded(row: dict[str, Any]) -> tuple[tuple[str, ...], int]:
    """Our components that PyTorch's program replaces, and the FLOPs of what replaces them."""
    ours: list[str] = []
    theirs = 0
    if "convolution_flops" in row:
        ours.append("/conv")
        theirs += row["convolution_flops"]
    if row["model_type"] == "zaya":
        theirs += before_the_sequence(row)
    if "scan_flops" in row:
        ours.append("/core")
        theirs += row["scan_flops"]
    if row["model_type"] == "deepseek_v4":
        ours += ["/input_mix", "indexer/reduce"]
    if row["model_type"] == "llama4_text":
        theirs += unused_experts(row)
    if row["model_type"] == "diffllama":
        theirs += repeated_scores(row)
    if row["model_type"] == "qwen4_exp_text":
        ours.append("indexer/scores")
        theirs += block_scores(row)
    return tuple(ours), theirs


def before_the_sequence(row: dict[str, Any]) -> int:
    """The second kernel reads k - 1 earlier positions; half of the first value is of no token."""
    config, sizes = config_of(row), config_of(row).attention
    first, second = sizes.qk_kernels
    channels = (sizes.num_query_heads + sizes.num_kv_heads) * sizes.head_dim
    values = config.emb_dim * sizes.num_kv_heads * sizes.head_dim // 2
    per_layer = (second - 1) * first * channels + values
    return 2 * row["batch"] * config.num_decoder_layers * per_layer


def block_scores(row: dict[str, Any]) -> int:
    """Qwen 4's indexer runs token by token: only the whole blocks up to a token are scored."""
    sizes = row["config"]
    blocks = sum(i // sizes["indexer_compress_ratio"] for i in range(1, row["seq"] + 1))
    layers = sizes["num_hidden_layers"] // 4
    width = sizes["indexer_n_heads"] * sizes["indexer_head_dim"]
    return 2 * row["batch"] * blocks * width * layers


def repeated_scores(row: dict[str, Any]) -> int:
    """Q·Kᵀ of every head and layer, which PyTorch's two calls of attention compute twice."""
    heads = config_of(row).attention
    width = heads.num_query_heads * heads.head_dim
    return 2 * row["batch"] * row["seq"] ** 2 * width * config_of(row).num_decoder_layers


def unused_experts(row: dict[str, Any]) -> int:
    """Two input matrices and one output matrix of every expert that a token does not use."""
    config = config_of(row)
    layers = sum(kind == "moe" for kind in config.stack.feed_forward_types)
    unused = config.experts.num_experts - config.experts.num_experts_per_tok
    tokens = row["batch"] * row["seq"]
    return 2 * tokens * 3 * config.emb_dim * config.experts.moe_mlp_dim * unused * layers


def check(row: dict[str, Any]) -> None:
    config = config_of(row)
    replaced, theirs = excluded(row)
    forward = sum(
        part.forward_flops
        for part in flops_breakdown(config, "dense")
        if not (replaced and part.component.endswith(replaced))
    )
    assert forward == row["forward_flops"] - theirs
    assert count_parameters(config).total == row["num_params"]


@pytest.mark.parametrize("row", rows("hf_sample"))
def test_full_configs_equal_the_counted_models(row: dict[str, Any]) -> None:
    config = config_of(row)
    forward = sum(part.forward_flops for part in flops_breakdown(config, "dense"))
    assert forward == row["forward_flops_dense_attention"]
    assert count_parameters(config).total == row["num_params"]


@pytest.mark.parametrize("row", rows("hf_defaults"))
def test_what_a_config_leaves_out_has_its_default(row: dict[str, Any]) -> None:
    check(row)


@pytest.mark.parametrize("row", rows("hf_variants"))
def test_variants_equal_the_counted_models(row: dict[str, Any]) -> None:
    check(row)


@pytest.mark.parametrize("row", [r for r in rows("hf_variants") if "training_flops" in r.values[0]])
def test_training_equals_forward_and_backward_of_the_counted_models(row: dict[str, Any]) -> None:
    # Every expert that Llama 4 runs in vain has a backward pass too.
    in_vain = 3 * unused_experts(row) if row["model_type"] == "llama4_text" else 0
    assert training_without_convolutions(config_of(row)) == row["training_flops"] - in_vain


def training_without_convolutions(config: ModelConfig) -> Number:
    """As counted in the data files: PyTorch's formula for their backward ignores groups."""
    counted = flops_breakdown(config, "dense")
    return sum(row.training_flops for row in counted if not row.component.endswith("/conv"))


@pytest.mark.parametrize("row", rows("hf_looped"))
def test_layers_that_run_several_times_have_weights_once_and_the_gradients_of_pytorch(
    row: dict[str, Any],
) -> None:
    check(row)
    training = training_without_convolutions(config_of(row))
    assert training == row["training_flops"]
    forward = row["forward_flops"] - row.get("convolution_flops", 0)
    assert (training < 3 * forward) == (row["model_type"] == "hrm_text")


@pytest.mark.parametrize("row", rows("hf_zero_experts"))
def test_where_experts_compute_nothing_the_range_is_pytorch_with_none_and_all_of_the_others(
    row: dict[str, Any],
) -> None:
    config, given = config_of(row), row["config"]
    low, high = flops_bounds(config, "dense")
    assert low.forward == row["forward_flops_of_none"]
    assert high == (row["forward_flops_of_all"], row["training_flops_of_all"])
    # What one expert computes for one token, and how many of them PyTorch ran.
    expert = 6 * given["hidden_size"] * given["expert_ffn_hidden_size"]
    assert low.forward + row["experts_run"] * expert == row["forward_flops"]
    # Uniform routing: each expert, of either kind, has the same share of the tokens.
    experts, zeros = given["n_routed_experts"], given["zero_expert_num"]
    slots = row["batch"] * row["seq"] * given["num_layers"] * given["moe_topk"]
    mean = low.forward + Fraction(slots * experts, experts + zeros) * expert
    assert model_flops_per_device(config, "dense").forward == mean
    unread = 2 * zeros * given["hidden_size"] * given["expert_ffn_hidden_size"]
    total = row["num_params"] - given["num_layers"] * unread
    assert count_parameters(config).total == total


def test_a_skipped_expert_of_zaya_counts_like_in_pytorch_and_makes_a_range() -> None:
    config = config_of(default_row("zaya"))
    low, high = flops_bounds(config)
    assert high == model_flops_per_device(config)
    assert high.forward - low.forward == 2 * 2048 * 40 * 3 * 2048 * 2048
    assert len(set(flops_bounds(config_of(default_row("mixtral"))))) == 1


def test_every_model_type_has_a_translation_and_a_counted_model() -> None:
    assert set(_ISSUED) <= set(TRANSLATIONS)
    counted = {
        row.values[0]["model_type"]
        for name in ("hf_defaults", "hf_variants", "hf_looped", "hf_zero_experts")
        for row in rows(name)
    }
    counted |= {row.values[0]["text_config"]["model_type"] for row in rows("hf_wrappers")}
    assert set(TRANSLATIONS) - counted == {"llama4", "qwen3_5", "qwen3_5_moe"}  # below


@pytest.mark.parametrize("row", rows("hf_wrappers"))
def test_a_wrapper_counts_as_the_text_model_that_pytorch_runs(row: dict[str, Any]) -> None:
    config = {"model_type": row["model_type"], "text_config": row["text_config"]}
    config |= row.get("outer", {})
    with pytest.warns(UserWarning, match="counted as its text model"):
        found = from_hf_config({**config, "max_target_length": row["seq"]})
    replaced, theirs = excluded(row)
    forward = sum(
        part.forward_flops
        for part in flops_breakdown(found, "dense")
        if not (replaced and part.component.endswith(replaced))
    )
    assert forward * row.get("batch", 1) == row["forward_flops"] - theirs
    assert count_parameters(found).total == row["text_params"]
    training = training_without_convolutions(found)
    assert row.get("training_flops", training) == training


def default_row(model_type: str) -> dict[str, Any]:
    return next(
        row.values[0] for row in rows("hf_defaults") if row.values[0]["model_type"] == model_type
    )


@pytest.mark.parametrize(
    ("model_type", "kernel", "channels", "layers"),
    [
        ("mamba2", 4, 8192 + 2 * 8 * 128, 64),
        ("bamba", 4, 8192 + 2 * 256, 32),
        ("falcon_h1", 4, 1024 + 2 * 256, 32),
        ("jamba", 4, 8192, 28),
        ("qwen3_next", 4, 2 * 16 * 128 + 32 * 128, 36),
        ("qwen3_5_text", 4, 2 * 16 * 128 + 32 * 128, 24),
    ],
)
def test_convolutions_excluded_run_past_the_end_of_the_sequence(
    model_type: str, kernel: int, channels: int, layers: int
) -> None:
    row = default_row(model_type)
    batch, length = row["batch"], row["seq"]
    theirs = 2 * batch * (length + kernel - 1) * kernel * channels * layers
    assert row["convolution_flops"] == theirs
    ours = sum(
        part.forward_flops
        for part in flops_breakdown(config_of(row))
        if part.component.endswith("/conv")
    )
    assert ours == 2 * batch * length * kernel * channels * layers


@pytest.mark.parametrize(
    ("model_type", "heads", "inner", "state", "layers"),
    [
        ("mamba2", 128, 8192, 128, 64),
        ("bamba", 128, 8192, 256, 32),
        ("falcon_h1", 128, 1024, 256, 32),
    ],
)
def test_mamba2_scan_excluded_is_the_chunked_program(
    model_type: str, heads: int, inner: int, state: int, layers: int
) -> None:
    row = default_row(model_type)
    chunk = 256
    chunks, rest = divmod(row["seq"], chunk)
    assert rest == 0
    # Inside a chunk: C·Bᵀ for each head, its product with x; a state for each chunk and what is
    # read from it; states passed on between the chunks (and the initial one).
    per_chunk = chunk * chunk * (heads * state + inner) + 2 * chunk * inner * state
    between = (chunks + 1) ** 2 * inner * state
    assert row["scan_flops"] == 2 * row["batch"] * layers * (chunks * per_chunk + between)
    # The recurrence updates the state and reads it.
    ours = sum(
        part.forward_flops
        for part in flops_breakdown(config_of(row))
        if part.component.endswith("/core")
    )
    assert ours == 2 * row["batch"] * row["seq"] * layers * 2 * inner * state


@pytest.mark.parametrize(("model_type", "layers"), [("qwen3_next", 36), ("qwen3_5_text", 24)])
def test_delta_rule_excluded_is_the_chunked_program(model_type: str, layers: int) -> None:
    row = default_row(model_type)
    chunk, key, value, heads = 64, 128, 128, 32
    # k·kᵀ, q·kᵀ and the output inside the chunk; the state is read twice and updated once. Two
    # triangular solves, applied to v and k, are not matmuls to the counter.
    per_chunk = chunk * chunk * (2 * key + value) + 3 * chunk * key * value
    chunks = row["seq"] // chunk
    assert row["scan_flops"] == 2 * row["batch"] * layers * heads * chunks * per_chunk


# Full multimodal models: forward FLOPs of the vision tower and projector over two images, and all
# weights, counted as in the data files. The pooling head of SigLIP, which nothing reads, is
# excluded.
_TEXT = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
}
_VISION = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 64,
    "patch_size": 8,
}
_LLAMA4_VISION = {
    **_VISION,
    "image_size": 56,
    "patch_size": 14,
    "intermediate_size": 192,
    "vision_output_dim": 40,
    "projector_input_dim": 40,
    "projector_output_dim": 40,
}
# Two images of 64 tokens: keys and values [48, 96] of each token; for each image one query, one
# output, 64 pairs of QKᵀ and PV, and the MLP.
_POOLING = 2 * 2 * (64 * 48 * 96 + 2 * 48 * 48 + 2 * 64 * 48 + 2 * 48 * 80)


@pytest.mark.parametrize(
    ("config", "vision_flops", "num_params"),
    [
        (
            {
                "model_type": "gemma3",
                "text_config": _TEXT,
                "vision_config": {**_VISION, "vision_use_head": False},
                "mm_tokens_per_image": 4,
            },
            20_103_168,
            138_048,
        ),
        (
            {
                "model_type": "gemma3",
                "text_config": _TEXT,
                "vision_config": _VISION,
                "mm_tokens_per_image": 16,
            },
            21_504_000 - _POOLING,
            155_408,
        ),
        (
            {
                "model_type": "llama4",
                "text_config": {**_TEXT, "num_local_experts": 4, "intermediate_size_mlp": 72},
                "vision_config": _LLAMA4_VISION,
            },
            7_968_896,
            352_048,
        ),
        # One image of 64 patches, in the batch of two: half of it is what PyTorch counted.
        (
            {
                "model_type": "qwen3_5",
                "architectures": ["Qwen3_5ForConditionalGeneration"],
                "text_config": {
                    **_TEXT,
                    "hidden_size": 48,
                    "num_attention_heads": 6,
                    "vocab_size": 131,
                    "intermediate_size": 80,
                },
                "vision_config": {
                    "hidden_size": 48,
                    "intermediate_size": 80,
                    "depth": 3,
                    "num_heads": 4,
                    "patch_size": 8,
                    "out_hidden_size": 48,
                    "num_position_embeddings": 16,
                },
                "image_size_for_vit": 64,
            },
            2 * 12_681_216,
            1_798_672,
        ),
        # The defaults: no image, all of the weights.
        (
            {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"]},
            0,
            9_407_453_936,
        ),
        (
            {"model_type": "qwen3_5_moe", "architectures": ["Qwen3_5MoeForConditionalGeneration"]},
            0,
            35_114_261_360,
        ),
        ({"model_type": "llama4"}, 0, 108_225_039_360),
    ],
)
def test_vision_towers_equal_the_counted_models(
    config: dict[str, Any], vision_flops: int, num_params: int
) -> None:
    images = 1 if vision_flops else 0
    step = {"per_device_batch_size": 2, "max_target_length": 16, "images_per_sequence": images}
    config = from_hf_config({**config, **step})
    vision = [r for r in flops_breakdown(config) if r.layer.startswith("vision")]
    assert sum(r.forward_flops for r in vision) == vision_flops
    # Frozen, the tower has no backward pass; the projector needs its weights' gradient.
    trained = [r for r in vision if r.training_flops > r.forward_flops]
    assert {r.layer for r in trained} == ({"vision/projector"} if images else set())
    assert count_parameters(config).total == num_params
