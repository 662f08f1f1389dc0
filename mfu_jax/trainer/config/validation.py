"""Rules between the keys of a `Config`; each error names the key and the way out."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from mfu_jax.errors import UserError
from mfu_jax.storage.addresses import check_path
from mfu_jax.trainer.config.image_rules import check_images
from mfu_jax.trainer.config.keys import REMAT_NAMES, key_rules
from mfu_jax.trainer.config.mesh_axes import axis_keys
from mfu_jax.trainer.config.messages import check_names, wrong
from mfu_jax.util.values import shown

if TYPE_CHECKING:
    from mfu_jax.trainer.config.pyconfig import Config

# Blocks whose attention can compute queries, keys and values in one product.
FUSED_BLOCKS = ("default", "gpt2", "gpt3", "llama2", "mistral", "mixtral")
_ACTIVATIONS = ("silu", "gelu", "exact_gelu", "relu", "sigmoid", "linear")


def validate(config: Config) -> None:
    """Raises a `UserError` that names the first key whose value does not fit."""
    _check_ranges(config)
    config.check()
    _check_model(config)
    _check_rope(config)
    check_images(config)
    _check_indexer(config)
    _check_experts(config)
    _check_remat(config)
    _check_quantization(config)
    _check_trained(config)
    _check_run(config)


def _check_ranges(config: Config) -> None:
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, float) and not abs(value) < float("inf"):
            raise UserError(f"{field.name}={value}: expected a finite number")
        bits = 63 if field.name == "seed" else 31  # JAX's integers
        if isinstance(value, int) and abs(value) >= 2**bits:
            raise UserError(f"{field.name}={shown(value)}: expected a number below 2^{bits}")
    rules = key_rules()
    for key in rules["above_0"]:
        if getattr(config, key) <= 0:
            raise wrong(config, key, "expected more than 0")
    for key in rules["0_or_more"]:
        if getattr(config, key) < 0:
            raise wrong(config, key, "expected 0 or more")
    for key in rules["fractions"]:
        if not 0 <= getattr(config, key) <= 1:
            raise wrong(config, key, "expected a fraction from 0 to 1")


# Blocks → the sizes that they require.
_NEEDED = {
    "deepseek4": ("q_lora_rank", "o_groups", "o_lora_rank", "sliding_window_size"),
    "qwen3_custom_moe": ("attention_output_dim", "moe_expert_input_dim"),
}


def _check_model(config: Config) -> None:
    for key in _NEEDED.get(config.decoder_block, ()):
        if not getattr(config, key):
            raise wrong(config, "decoder_block", f"it needs {key}, which is 0")
    if config.decoder_block == "deepseek4" and (
        len(config.compress_ratios) < config.num_decoder_layers
    ):
        raise wrong(config, "compress_ratios num_decoder_layers", "expected a ratio for each layer")
    if config.engram_layers and len(config.engram_vocab_bases) != config.engram_max_ngram_size - 1:
        expected = "expected an entry for each n-gram from 2 to that size"
        raise wrong(config, "engram_vocab_bases engram_max_ngram_size", expected)
    heads = "num_query_heads num_kv_heads"
    if config.num_query_heads % config.num_kv_heads:
        raise wrong(config, heads, "every key/value head serves as many query heads")
    equal = config.num_query_heads == config.num_kv_heads
    if config.fused_qkv and not (equal and config.decoder_block in FUSED_BLOCKS):
        expected = f"expected as many of each, and one of {', '.join(FUSED_BLOCKS)}"
        raise wrong(config, f"fused_qkv decoder_block {heads}", expected)
    if config.attention_type == "mla" and config.decoder_block != "deepseek":
        expected = "expected decoder_block=deepseek: no other layers have latent attention"
        raise wrong(config, "attention_type decoder_block", expected)
    if not 1 <= len(config.mlp_activations) <= 2:
        expected = "expected one entry (plain MLP) or two (gated MLP), as in [silu,linear]"
        raise wrong(config, "mlp_activations", expected)
    check_names(config, "mlp_activations", _ACTIVATIONS)
    if 0 < config.trainable_position_size < config.max_target_length:
        keys = "max_target_length trainable_position_size"
        raise wrong(config, keys, "expected as many learned positions", "shorten the sequences")
    if config.head_dim % 2:
        raise wrong(config, "head_dim", "RoPE rotates pairs, so it must be even")


def _check_rope(config: Config) -> None:
    if config.rope_type != "longrope":
        return
    if config.original_max_position_embeddings < 2:
        raise wrong(config, "rope_type", "it needs original_max_position_embeddings")
    is_latent = config.attention_type == "mla"
    width = config.head_dim * config.partial_rotary_factor
    pairs = (config.qk_rope_head_dim if is_latent else round(width)) // 2
    for key in ("rope_short_factor", "rope_long_factor"):
        factors = getattr(config, key)
        if len(factors) != pairs or min(factors) <= 0:
            expected = f"expected {pairs} positive numbers, one for each rotated pair of a head"
            raise wrong(config, f"rope_type {key}", expected)


# DeepSeek V4: tokens per compressed key where an indexer picks the keys.
INDEXED_RATIO = 4


def _check_indexer(config: Config) -> None:
    if not config.indexer_loss_scaling_factor:
        return
    key, of_compressed = "indexer_loss_scaling_factor", config.decoder_block == "deepseek4"
    if not of_compressed and not (config.use_indexer and config.decoder_block == "deepseek"):
        expected = "expected decoder_block=deepseek with use_indexer=true, or deepseek4"
        raise wrong(config, key, expected)
    ratio = INDEXED_RATIO if of_compressed else 1
    if of_compressed and ratio not in config.compress_ratios[: config.num_decoder_layers]:
        raise wrong(config, key, f"expected a layer of ratio {ratio} in compress_ratios")
    if (keys := config.max_target_length // ratio) <= config.indexer_topk:
        problem = f"sequences have {keys} keys, expected more than indexer_topk"
        raise wrong(config, f"{key} max_target_length indexer_topk", problem)


def _check_experts(config: Config) -> None:
    if config.num_experts_per_tok > config.num_experts:
        raise wrong(config, "num_experts_per_tok num_experts", "a token goes to an expert once")
    if config.num_experts > 1 and not config.moe_mlp_dim:
        raise wrong(config, "num_experts", "it needs moe_mlp_dim, the experts' hidden width")
    groups, best = config.n_routing_groups, config.topk_routing_group
    if groups > 1 and (config.num_experts % groups or not 0 < best <= groups):
        expected = f"expected groups of equal size, and 1 to {groups} open ones"
        raise wrong(config, "n_routing_groups topk_routing_group num_experts", expected)


def _check_remat(config: Config) -> None:
    check_names(config, "remat_save_names", REMAT_NAMES)
    if config.remat_policy != "custom":
        for name in REMAT_NAMES:
            default = "device" if name == "decoder_layer_input" else "remat"
            if getattr(config, name) != default:
                problem = f"{name} has no effect without remat_policy=custom"
                raise wrong(config, f"{name} remat_policy", problem)
    if bool(config.remat_save_names) != (config.remat_policy == "names"):
        expected = "expected names with the policy 'names', as in [context], and only with it"
        raise wrong(config, "remat_policy remat_save_names", expected)


_RANGES = tuple(f"{of}_quantization_calibration_method" for of in ("weight", "act", "bwd"))


def _check_quantization(config: Config) -> None:
    for key in _RANGES:
        given = getattr(config, key)
        if given != "absmax" and not config.quantization:
            raise wrong(config, key, "no effect without quantization, as in quantization=fp8_full")
        if given != "absmax" and not _is_fixed_range(given):
            raise wrong(config, key, "expected absmax, or fixed,LOW,HIGH with 0 in between")


def _is_fixed_range(text: str) -> bool:
    """Whether the text is ``fixed,LOW,HIGH`` with 0 in between."""
    method, *bounds = text.split(",")
    try:
        low, high = map(float, bounds)
    except ValueError:
        return False
    return method == "fixed" and -float("inf") < low < 0 < high < float("inf")


_ADAPTABLE = tuple("q_proj k_proj v_proj o_proj q_a q_b kv_a kv_b wi wi_0 wi_1 wo".split())
_BOTTOM, _TOP = {"tokens", "embedding"}, {"logits", "head"}


def _check_trained(config: Config) -> None:
    tiles = config.num_vocab_tiling
    if config.max_target_length % (tiles * max(1, config.context_parallelism)) and tiles > 1:
        expected = "expected a number that divides the tokens of a sequence on each device"
        raise wrong(config, "max_target_length context_parallelism num_vocab_tiling", expected)
    if config.use_dpo and tiles > 1:
        raise wrong(config, "use_dpo num_vocab_tiling", "DPO needs all logits", "set it to 1")
    if config.use_dpo and config.mtp_num_layers:
        problem = "DPO compares whole answers and trains no further predictions"
        raise wrong(config, "use_dpo mtp_num_layers", problem, "set mtp_num_layers=0")
    if config.lora_rank and config.frozen:
        raise wrong(config, "lora_rank frozen", "adapters freeze the rest", "leave frozen out")
    if config.lora_rank:
        check_names(config, "lora_targets", _ADAPTABLE)
    frozen = set(config.frozen)
    if config.logits_via_embedding and bool(frozen & _BOTTOM) != bool(frozen & _TOP):
        problem = "one end of a tied embedding; name tokens and logits, or neither"
        raise wrong(config, "frozen", problem)


def _check_run_name(name: str) -> None:
    is_name = name not in ("", ".", "..") and "/" not in name and name.isprintable()
    if not is_name or len(name.encode(errors="surrogatepass")) > 255:
        raise UserError(
            f"run_name={name[:40]!r}: expected the name of a folder: printable, without '/', not "
            f"'.' or '..', and at most 255 bytes"
        )


def _check_run(config: Config) -> None:
    for key in axis_keys():
        if (size := getattr(config, key)) < 1 and size != -1:
            raise wrong(config, key, "expected 1 or more, or -1 for all remaining devices")
    if (count := config.num_pipeline_microbatches) < 1 and count != -1:
        expected = "expected 1 or more, or -1 for as many as stages"
        raise wrong(config, "num_pipeline_microbatches", expected)
    _check_run_name(config.run_name)
    for key in ("base_output_directory", "metrics_file", "tensorboard_dir", "profile_dir"):
        check_path(getattr(config, key), key)
    if config.process_id >= config.num_processes:
        raise wrong(config, "process_id num_processes", "processes are numbered from 0")
