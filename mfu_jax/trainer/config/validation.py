"""Rules between the keys of a `Config`; each error names the key and the way out."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from mfu_jax.errors import UserError, nearest
from mfu_jax.storage.addresses import check_path
from mfu_jax.trainer.config.image_rules import check_images
from mfu_jax.trainer.config.mesh_axes import axis_keys
from mfu_jax.trainer.config.model_keys import RematKeys
from mfu_jax.util.values import shown

if TYPE_CHECKING:
    from mfu_jax.trainer.config.pyconfig import Config

# A layer's tensors that have a key of their own.
REMAT_NAMES = tuple(
    field.name for field in dataclasses.fields(RematKeys) if not field.name.startswith("remat_")
)

_POSITIVE = (
    "vocab_size num_decoder_layers emb_dim num_query_heads num_kv_heads head_dim mlp_dim "
    "rope_max_timescale rope_linear_scaling_factor beta_fast beta_slow "
    "max_target_length per_device_batch_size gradient_accumulation_steps num_vocab_tiling "
    "num_layers_per_pipeline_stage "
    "eval_steps num_processes checkpoint_period checkpoints_to_keep learning_rate "
    "normalization_layer_epsilon sa_block_q sa_block_kv sa_block_kv_compute "
    "sa_block_q_dkv sa_block_kv_dkv sa_block_kv_dkv_compute sa_block_q_dq sa_block_kv_dq"
).split()
_NOT_NEGATIVE = (
    "steps seed dpo_beta eval_interval gradient_clipping_threshold adam_weight_decay "
    "process_id trainable_position_size heartbeat_timeout_seconds "
    "rope_factor original_max_position_embeddings mscale lora_rank lora_alpha "
    "images_per_sequence tiles_per_image indexer_loss_scaling_factor"
).split()
_FRACTIONS = (
    "eval_fraction warmup_steps_fraction cosine_learning_rate_final_fraction adam_b1 adam_b2 "
    "dpo_label_smoothing"
).split()


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
    for key in _POSITIVE:
        if getattr(config, key) <= 0:
            raise UserError(f"{key}={getattr(config, key)}: expected more than 0")
    for key in _NOT_NEGATIVE:
        if getattr(config, key) < 0:
            raise UserError(f"{key}={getattr(config, key)}: expected 0 or more")
    for key in _FRACTIONS:
        if not 0 <= getattr(config, key) <= 1:
            raise UserError(f"{key}={getattr(config, key)}: expected a fraction from 0 to 1")


# Blocks → the sizes that they require.
_NEEDED = {
    "deepseek4": ("q_lora_rank", "o_groups", "o_lora_rank", "sliding_window_size"),
    "qwen3_custom_moe": ("attention_output_dim", "moe_expert_input_dim"),
}


def _check_model(config: Config) -> None:
    for key in _NEEDED.get(config.decoder_block, ()):
        if not getattr(config, key):
            raise UserError(f"decoder_block={config.decoder_block} needs {key}, which is 0")
    if config.decoder_block == "deepseek4" and (
        len(config.compress_ratios) < config.num_decoder_layers
    ):
        raise UserError(
            f"compress_ratios has {len(config.compress_ratios)} entries; expected one for each of "
            f"num_decoder_layers={config.num_decoder_layers}"
        )
    if config.engram_layers and len(config.engram_vocab_bases) != config.engram_max_ngram_size - 1:
        raise UserError(
            f"engram_vocab_bases has {len(config.engram_vocab_bases)} entries; expected one for "
            f"each n-gram from 2 to engram_max_ngram_size={config.engram_max_ngram_size}"
        )
    if config.num_query_heads % config.num_kv_heads:
        raise UserError(
            f"num_query_heads={config.num_query_heads} is not divisible by "
            f"num_kv_heads={config.num_kv_heads}: every key/value head serves as many query heads"
        )
    equal = config.num_query_heads == config.num_kv_heads
    if config.fused_qkv and not (equal and config.decoder_block in FUSED_BLOCKS):
        raise UserError(
            f"fused_qkv=true with decoder_block={config.decoder_block}, "
            f"num_query_heads={config.num_query_heads}, num_kv_heads={config.num_kv_heads}; "
            f"expected as many of each, and one of {', '.join(FUSED_BLOCKS)}"
        )
    if not 1 <= len(config.mlp_activations) <= 2:
        raise UserError(
            f"mlp_activations={list(config.mlp_activations)}: expected one entry (plain MLP) or "
            "two (gated MLP), for example [silu, linear]"
        )
    for activation in config.mlp_activations:
        if activation not in _ACTIVATIONS:
            raise UserError(
                f"mlp_activations: unknown activation {activation!r}"
                f"{nearest(activation, _ACTIVATIONS)}; expected {', '.join(_ACTIVATIONS)}"
            )
    rows = config.trainable_position_size
    if rows and rows < config.max_target_length:
        raise UserError(
            f"max_target_length={config.max_target_length} needs as many learned positions, but "
            f"trainable_position_size={rows}; shorten the sequences"
        )
    if config.head_dim % 2:
        raise UserError(
            f"head_dim={config.head_dim} is odd; RoPE rotates pairs, so it must be even"
        )


def _check_rope(config: Config) -> None:
    if config.rope_type != "longrope":
        return
    if config.original_max_position_embeddings < 2:
        raise UserError("rope_type=longrope needs original_max_position_embeddings, of pretraining")
    is_latent = config.attention_type == "mla"
    width = config.head_dim * config.partial_rotary_factor
    pairs = (config.qk_rope_head_dim if is_latent else round(width)) // 2
    for key in ("rope_short_factor", "rope_long_factor"):
        factors = getattr(config, key)
        if len(factors) != pairs or min(factors) <= 0:
            raise UserError(
                f"{key} has {len(factors)} entries; rope_type=longrope expects a positive one for "
                f"each of the {pairs} pairs of a head that are rotated"
            )


# DeepSeek V4: tokens per compressed key where an indexer picks the keys.
INDEXED_RATIO = 4


def _check_indexer(config: Config) -> None:
    if not config.indexer_loss_scaling_factor:
        return
    wanted = f"indexer_loss_scaling_factor={config.indexer_loss_scaling_factor:g}"
    of_compressed = config.decoder_block == "deepseek4"
    if not of_compressed and not (config.use_indexer and config.decoder_block == "deepseek"):
        raise UserError(
            f"{wanted}: expected decoder_block=deepseek with use_indexer=true, or deepseek4, whose "
            "indexers the reference model has"
        )
    ratio = INDEXED_RATIO if of_compressed else 1
    if of_compressed and ratio not in config.compress_ratios[: config.num_decoder_layers]:
        raise UserError(f"{wanted}: expected a layer of ratio {ratio} in compress_ratios")
    if (keys := config.max_target_length // ratio) <= config.indexer_topk:
        raise UserError(
            f"{wanted}: sequences of max_target_length={config.max_target_length} tokens have "
            f"{keys} keys, of which none is left out; expected more than "
            f"indexer_topk={config.indexer_topk}"
        )


def _check_experts(config: Config) -> None:
    if config.num_experts_per_tok > config.num_experts:
        raise UserError(
            f"num_experts_per_tok={config.num_experts_per_tok} is more than num_experts="
            f"{config.num_experts}: a token goes to an expert once"
        )
    if config.num_experts > 1 and not config.moe_mlp_dim:
        raise UserError(
            f"num_experts={config.num_experts} needs moe_mlp_dim, the experts' hidden width"
        )
    groups, best = config.n_routing_groups, config.topk_routing_group
    if groups > 1 and (config.num_experts % groups or not 0 < best <= groups):
        raise UserError(
            f"n_routing_groups={groups} topk_routing_group={best} with num_experts="
            f"{config.num_experts}: expected groups of equal size, and 1 to {groups} open ones"
        )


def _check_remat(config: Config) -> None:
    for name in config.remat_save_names:
        if name not in REMAT_NAMES:
            raise UserError(
                f"remat_save_names: unknown name {name!r}{nearest(name, REMAT_NAMES)}; "
                f"expected {', '.join(REMAT_NAMES)}"
            )
    if config.remat_policy != "custom":
        for name in REMAT_NAMES:
            default = "device" if name == "decoder_layer_input" else "remat"
            if getattr(config, name) != default:
                raise UserError(
                    f"{name}={getattr(config, name)} with remat_policy={config.remat_policy} has "
                    f"no effect; set remat_policy=custom"
                )
    if bool(config.remat_save_names) != (config.remat_policy == "names"):
        raise UserError(
            f"remat_policy={config.remat_policy} with remat_save_names="
            f"{list(config.remat_save_names)}: expected at least one name with the policy "
            f"'names' and none with the others; for example remat_policy=names "
            f"remat_save_names=[context]"
        )


_RANGES = tuple(f"{of}_quantization_calibration_method" for of in ("weight", "act", "bwd"))


def _check_quantization(config: Config) -> None:
    for key in _RANGES:
        given = getattr(config, key)
        if given != "absmax" and not config.quantization:
            raise UserError(
                f"{key}={given} has no effect without quantization; set, for example, "
                "quantization=fp8_full"
            )
        if given != "absmax" and not _is_fixed_range(given):
            raise UserError(
                f"{key}={given}: expected absmax, or fixed,LOW,HIGH with LOW below 0 below HIGH, "
                "for example fixed,-224,224"
            )


def _is_fixed_range(text: str) -> bool:
    """Whether the text is ``fixed,LOW,HIGH`` with 0 in between."""
    method, *bounds = text.split(",")
    try:
        low, high = map(float, bounds)
    except ValueError:
        return False
    return method == "fixed" and -float("inf") < low < 0 < high < float("inf")


_ADAPTABLE = "q_proj k_proj v_proj o_proj q_a q_b kv_a kv_b wi wi_0 wi_1 wo".split()
_BOTTOM, _TOP = {"tokens", "embedding"}, {"logits", "head"}


def _check_trained(config: Config) -> None:
    tiles = config.num_vocab_tiling
    if tiles > 1 and config.max_target_length % (tiles * max(1, config.context_parallelism)):
        raise UserError(
            f"num_vocab_tiling={tiles}: expected a number that divides the "
            f"max_target_length={config.max_target_length} tokens of a sequence, of each device of "
            "context_parallelism"
        )
    if config.use_dpo and tiles > 1:
        raise UserError("num_vocab_tiling with use_dpo=true: DPO needs all logits; set it to 1")
    if config.use_dpo and config.mtp_num_layers:
        raise UserError(
            f"use_dpo=true with mtp_num_layers={config.mtp_num_layers}: DPO compares whole answers "
            "and trains no further predictions; set it to 0"
        )
    if config.lora_rank and config.frozen:
        raise UserError("lora_rank freezes all but the adapters; leave frozen out")
    for name in config.lora_targets if config.lora_rank else ():
        if name not in _ADAPTABLE:
            raise UserError(
                f"lora_targets names {name!r}{nearest(name, _ADAPTABLE)}; expected some of "
                f"{', '.join(_ADAPTABLE)}"
            )
    frozen = set(config.frozen)
    if config.logits_via_embedding and bool(frozen & _BOTTOM) != bool(frozen & _TOP):
        raise UserError(
            f"frozen={list(config.frozen)} names one end of a tied embedding; name tokens and "
            "logits, or neither"
        )


def _check_run_name(name: str) -> None:
    if name in ("", ".", "..") or "/" in name or not name.isprintable():
        raise UserError(
            f"run_name={name!r}: expected the name of a folder: printable, without '/', not '.' "
            f"or '..'"
        )
    if len(name.encode(errors="surrogatepass")) > 255:
        raise UserError(f"run_name={name[:40]!r}… is too long: expected at most 255 bytes")


def _check_run(config: Config) -> None:
    for key in axis_keys():
        if (size := getattr(config, key)) < 1 and size != -1:
            raise UserError(f"{key}={size}: expected 1 or more, or -1 for all remaining devices")
    if (count := config.num_pipeline_microbatches) < 1 and count != -1:
        raise UserError(
            f"num_pipeline_microbatches={count}: expected 1 or more, or -1 for as many as stages"
        )
    _check_run_name(config.run_name)
    for key in ("base_output_directory", "metrics_file", "tensorboard_dir", "profile_dir"):
        check_path(getattr(config, key), key)
    if config.process_id >= config.num_processes:
        raise UserError(
            f"process_id={config.process_id} with num_processes={config.num_processes}: "
            "processes are numbered from 0"
        )
