"""Every bundled model, made tiny: analytic (`dense`) = traced = executed on CPU, as ints.

What the reference trainer builds is counted on its own train step, everything else on the JAX
models of `architecture_models`.
"""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import jax
import mfu_jax.configs
import pytest

from mfu_jax.flops.analytic.inputs import load_model_config
from mfu_jax.flops.analytic.model_configs.model import ModelConfig
from mfu_jax.flops.analytic.totals import model_flops_per_device
from mfu_jax.flops.executed.counting import ExecutedCount, executed_flops
from mfu_jax.flops.traced.counting import TracedCount, count_model_flops
from mfu_jax.trainer import mesh, pyconfig, state, step
from tests.support import architecture_models as models
from tests.support.compilation import only_counted
from tests.support.jax_versions import FASTER_TO_COMPILE, has_nnx_list
from tests.support.work import count_calls

B, S = 2, 12
# Every size is another one where it can be, so that no two are mistaken for each other.
TINY = {
    "vocab_size": 24,
    "num_decoder_layers": 2,
    "emb_dim": 8,
    "head_dim": 6,
    "mlp_dim": 10,
    "per_device_batch_size": B,
    "max_target_length": S,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_mlp_dim": 7,
    "sliding_window_size": 5,
    "chunk_attn_window_size": 4,
    "nope_layer_interval": 2,
    "interleave_moe_layer_step": 2,
    "inhomogeneous_layer_cycle_interval": 2,
    "q_lora_rank": 5,
    "kv_lora_rank": 9,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 3,
    "v_head_dim": 5,
    "first_num_dense_layers": 1,
    "indexer_n_heads": 2,
    "indexer_head_dim": 4,
    "indexer_topk": 3,
    "mhc_expansion_rate": 2,
    "engram_layers": (0,),
    "engram_num_heads": 2,
    "engram_head_dim": 3,
    "engram_kernel_size": 3,
    "engram_vocab_bases": (50, 50),
    "o_groups": 1,
    "o_lora_rank": 5,
    "compress_ratios": (0, 4, 6),
    "attention_output_dim": 6,
    "moe_expert_input_dim": 6,
    "gdn_num_key_heads": 2,
    "gdn_num_value_heads": 4,
    "gdn_key_head_dim": 4,
    "gdn_value_head_dim": 5,
    "gdn_conv_kernel_dim": 3,
    "global_head_dim": 9,
    "num_kv_shared_layers": 3,
    "hidden_size_per_layer_input": 5,
    "vocab_size_per_layer_input": 24,
    "trainable_position_size": 24,
}
# Long enough for a whole cycle of layers, and for keys that are made of several tokens.
LONGER = {
    "deepseek4": {"num_decoder_layers": 3, "max_target_length": 13},
    "gemma3": {"num_decoder_layers": 7},
    "gemma4": {"num_decoder_layers": 7},
    "gemma4_small": {"num_decoder_layers": 13},
}
MODELS = {
    "deepseek": models.deepseek,
    "deepseek4": models.deepseek4,
    "envy": models.interleaved_experts,
    "gemma2": models.gemma2,
    "gemma4": models.gemma4,
    "gemma4_small": models.gemma4_small,
    "llama4": models.interleaved_experts,
    "qwen3_custom_moe": models.qwen3_custom_moe,
    "qwen3_next": models.qwen3_next,
    "qwen3_5": models.qwen3_next,
}
TRAINED = ("llama2", "mistral", "gpt2", "gpt3")


def shrunk(name: str) -> ModelConfig:
    """The decoder of a bundled model in tiny sizes: what it has not, it does not get."""
    config = load_model_config(name)
    nothing = ModelConfig(vocab_size=1, num_decoder_layers=1, emb_dim=1)
    given, absent = config.flat(), nothing.flat()
    sizes = {k: v for k, v in TINY.items() if given[k] != absent[k]}
    sizes |= {"num_query_heads": 4, "model_name": ""}
    sizes |= {"per_device_batch_size": B, "max_target_length": S}
    if config.attention.num_kv_heads:
        all_heads = config.attention.num_kv_heads == config.attention.num_query_heads
        sizes["num_kv_heads"] = 4 if all_heads else min(2, config.attention.num_kv_heads)
    for name in given:  # towers, and everything else that is not a size of the decoder
        if "_vit" in name or "audio" in name or name == "use_multimodal":
            sizes[name] = absent[name]
    return config.replace(**sizes | LONGER.get(config.decoder_block, {}))


def distinct_models() -> list[str]:
    """The first name of every shrunk config."""
    folder = Path(mfu_jax.configs.__file__).parent / "models"
    names: dict[ModelConfig, str] = {}
    for path in sorted(folder.glob("*.yml")):
        names.setdefault(shrunk(path.stem), path.stem)
    return list(names.values())


def trainers_step(name: str, model: ModelConfig) -> tuple[Any, tuple[Any, ...]]:
    """The reference trainer's train step, and the shapes of its arguments."""
    sizes = {k: model.value(k) for k in TINY if k in pyconfig.base_defaults()}
    heads = {k: model.value(k) for k in ("num_query_heads", "num_kv_heads")}
    options = {"dataset_type": "synthetic", "attention": "dot_product"}
    model_keys = {"model_name": name, "override_model_config": True, **sizes, **heads}
    config = pyconfig.from_mapping({}, overrides={**model_keys, **options})
    grid = mesh.make_mesh(config, jax.devices()[:1])
    arguments = state.abstract_state(config, grid), step.abstract_batch(config, grid, 1)
    return step.make_train_step(config), arguments


def counts(step: Any, arguments: tuple[Any, ...]) -> tuple[TracedCount, ExecutedCount]:
    """What is traced, and what the program compiled for this CPU runs."""
    jitted = jax.jit(step)
    with only_counted():  # test_step has XLA's own choice
        compiled = jitted.lower(*arguments).compile(compiler_options=FASTER_TO_COMPILE)
    return count_model_flops(jitted, *arguments), executed_flops(compiled)


def model_cases() -> list[Any]:
    """The models, those of the trainer marked."""
    trained = {name for name in distinct_models() if shrunk(name).decoder_block in TRAINED}
    return [
        pytest.param(name, marks=[has_nnx_list] if name in trained else [])
        for name in distinct_models()
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", model_cases())
def test_analytic_equals_traced_equals_executed(name: str) -> None:
    config = shrunk(name)
    if config.decoder_block in TRAINED:
        traced, executed = counts(*trainers_step(name, config))
    else:
        model = MODELS.get(config.decoder_block, models.uniform)
        traced, executed = counts(*models.training_step(model, config))
    analytic = model_flops_per_device(config, "dense").training
    assert traced.total == analytic
    # Outer products are cheap: XLA writes some of them into each fusion that uses them.
    assert executed.total - executed.duplicated == analytic
    assert executed.duplicated <= executed.vector_matmuls
    assert traced.unaccounted == executed.unaccounted == ()


@has_nnx_list
def test_tracing_a_step_of_405e9_parameters_takes_little_work_and_memory() -> None:
    keys = {"model_name": "llama3.1-405b", "per_device_batch_size": 1, "max_target_length": 8192}
    options = {"remat_policy": "full", "attention": "dot_product"}
    config = pyconfig.from_mapping({}, overrides={**keys, **options})
    grid = mesh.make_mesh(config, jax.devices()[:1])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    weights = state.abstract_state(config, grid)
    batch = step.abstract_batch(config, grid, 1)
    train_step = step.make_train_step(config)
    count, calls = count_calls(lambda: count_model_flops(train_step, weights, batch))
    assert calls < 3_000_000  # 0.8 million, in half a second
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2 * 2**20  # KiB
    assert state.parameter_count(weights) == 405_853_388_800
    assert count.total == model_flops_per_device(config, "dense").training
    assert count.rematerialized > 0
