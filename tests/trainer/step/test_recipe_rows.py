"""Rows as published MaxText recipes have them: each becomes a step that fits its mesh.

Models, meshes, topologies and keys are those of AI-Hypercomputer/tpu-recipes and gpu-recipes; the
meshes (data, fsdp, expert, tensor) and devices are worked out by hand.
"""

import pytest

from mfu_jax.flops.analytic.parameters import count_parameters
from mfu_jax.planning.measured_runs import read_run
from mfu_jax.planning.step_sources import work_of
from mfu_jax.trainer.config.pyconfig import load
from mfu_jax.trainer.planned.planned_run import reference_keys
from mfu_jax.trainer.planned.planned_step import TrainerStep

OFFLOADED = {
    **dict.fromkeys(("decoder_layer_input", "out_proj", "query_proj", "key_proj"), "offload"),
    "value_proj": "remat",
}
PIPELINED = {
    **dict.fromkeys(("dcn_pipeline_parallelism", "ici_pipeline_parallelism"), 1),
    **{"dcn_data_parallelism": -1, "ici_fsdp_transpose_parallelism": 1},
}
BLOCKS = {
    **dict.fromkeys(("sa_block_q", "sa_block_kv", "sa_block_q_dkv"), 2048),
    **{"sa_use_fused_bwd_kernel": True, "use_tokamax_splash": True, "sa_q_layout": "SEQ_MINOR"},
}
EXPERTS = {"megablox": True, "sparse_matmul": True, "use_tokamax_gmm": True}


def ici(*, dcn=None, **sizes):
    within = {f"ici_{axis}_parallelism": size for axis, size in sizes.items()}
    return within | {f"dcn_{axis}_parallelism": size for axis, size in (dcn or {}).items()}


ROWS = [
    # hardware, chips, model, batch, length, other keys, (data, fsdp, expert, tensor)
    ("v6e", "v6e-256", "gemma3-12b", 1, 32768, ici(fsdp=-1, fsdp_transpose=1), (1, 256, 1, 1)),
    ("v6e", "2xv6e-256", "gemma3-12b", 1, 32768, ici(fsdp=16, fsdp_transpose=16), (2, 256, 1, 1)),
    ("v6e", "4xv6e-256", "gemma3-12b", 1, 32768, ici(dcn={"data": -1}, fsdp=-1), (4, 256, 1, 1)),
    ("v6e", "v6e-256", "gpt3-175b", 3, 2048, ici(fsdp=64, tensor=4), (1, 64, 1, 4)),
    ("v6e", "v6e-256", "llama2-70b", 4, 4096, ici(fsdp=-1), (1, 256, 1, 1)),
    ("v6e", "v6e-8", "mistral-7b", 6, 8192, {}, (1, 8, 1, 1)),
    ("v6e", "10xv6e-256", "mixtral-8x22b", 8, 4096, {"capacity_factor": 1.25}, (10, 256, 1, 1)),
    ("v6e", "40xv6e-256", "mixtral-8x22b", 8, 4096, EXPERTS, (40, 256, 1, 1)),
    ("v6e", "v6e-16", "llama3.1-8b", 3, 8192, {}, (1, 16, 1, 1)),
    ("v6e", "v6e-32", "llama3.1-70b", 1, 8192, {}, (1, 32, 1, 1)),
    ("v6e", "2xv6e-256", "llama3.1-405b", 1, 8192, ici(dcn={"fsdp": 2}, fsdp=256), (1, 512, 1, 1)),
    ("v5p", "v5p-1024", "deepseek3-671b", 4, 8192, ici(fsdp=128, expert=4), (1, 128, 4, 1)),
    ("v5p", "v5p-1024", "llama3.1-405b", 2, 8192, ici(fsdp=64, tensor=8), (1, 64, 1, 8)),
    ("v5p", "v5p-256", "llama4-17b-128e", 4, 8192, ici(fsdp=32, tensor=4), (1, 32, 1, 4)),
    ("v5p", "v5p-256", "llama4-17b-16e", 8, 8192, ici(fsdp=64, tensor=2), (1, 64, 1, 2)),
    ("v5p", "v5p-128", "mixtral-8x7b", 8, 4096, EXPERTS, (1, 64, 1, 1)),
    ("v5e", "2xv5e-256", "llama2-13b", 8, 2048, {}, (2, 256, 1, 1)),
    ("tpu7x", "4x4x8", "deepseek3-671b", 8, 4096, PIPELINED | ici(fsdp=-1), (1, 256, 1, 1)),
    ("tpu7x", "4x8x8", "deepseek3-671b", 8, 4096, ici(fsdp=-1, fsdp_transpose=8), (1, 512, 1, 1)),
    ("tpu7x", "tpu7x-4x4x4", "gemma4-26b", 16, 4096, EXPERTS, (1, 128, 1, 1)),
    ("ironwood", "4x4x4", "gemma4-31b", 2, 8192, {"num_vocab_tiling": 16}, (1, 128, 1, 1)),
    ("tpu7x", "4x4x4", "gpt-oss-120b", 10, 8192, ici(fsdp=64, data=2), (2, 64, 1, 1)),
    ("tpu7x", "4x8x8", "gpt-oss-120b", 10, 8192, ici(fsdp=64, data=8), (8, 64, 1, 1)),
    ("tpu7x", "4x8x8", "llama3.1-405b", 3, 8192, {"mu_dtype": "bfloat16"}, (1, 512, 1, 1)),
    ("tpu7x", "4x8x8", "qwen3-235b-a22b", 16, 4096, {"shard_exp_on_fsdp": False}, (1, 512, 1, 1)),
    ("h100", 128, "llama2-7b", 4, 4096, ici(dcn={"data": 16}, fsdp=8), (16, 8, 1, 1)),
    ("h100", 64, "gemma2-27b", 2, 8192, {}, (8, 8, 1, 1)),
    ("h100", 64, "llama3.1-8b", 2, 8192, ici(fsdp=64), (1, 64, 1, 1)),
    ("h100", 64, "mixtral-8x7b", 2, 4096, ici(dcn={"fsdp": 8}, expert=8), (1, 8, 8, 1)),
    (
        "h200",
        256,
        "llama3.1-70b",
        2,
        8192,
        ici(dcn={"fsdp": -1, "data": 1}, fsdp=8),
        (1, 256, 1, 1),
    ),
    ("b200", 256, "llama3.1-405b", 2, 8192, ici(dcn={"fsdp": 32}, fsdp=8), (1, 256, 1, 1)),
]


@pytest.mark.parametrize(("hardware", "chips", "model", "batch", "length", "keys", "mesh"), ROWS)
def test_a_recipe_becomes_a_step_on_its_mesh(hardware, chips, model, batch, length, keys, mesh):
    where = {"chips": chips} if isinstance(chips, int) else {"device_type": chips}
    sizes = {"model_name": model, "per_device_batch_size": batch, "max_target_length": length}
    run = read_run(
        {
            **{"hardware": hardware, **where, **sizes, "splash": BLOCKS},
            **{"remat_policy": "custom", "remat_tensors": OFFLOADED, "quantization": ""},
            "other_flags": {
                **{"tokenizer_path": "a", "profiler_steps": 3, "reuse_example_batch": 1},
                **keys,
            },
        }
    )
    words, lost = reference_keys(run)
    assert TrainerStep(run.target).invalid(words) is None
    sizes = {axis: int(words[axis]) for axis in ("data", "fsdp", "expert", "tensor")}
    transposed = keys.get("ici_fsdp_transpose_parallelism", 1)
    assert words["fsdp_transpose"] == str(transposed)
    assert (sizes["data"], sizes["fsdp"] * transposed, sizes["expert"], sizes["tensor"]) == mesh
    assert "tokenizer" not in "".join(detail.setting for detail in lost)
    assert work_of(run.model).tokens == batch * length


def test_the_default_model_and_its_scale_are_maxtexts():
    """Seven doublings: heads and MLP three times, width and layers twice; by hand: 6·4·2048²…"""
    run = read_run(
        {
            **{"hardware": "v6e", "device_type": "v6e-256", "model_name": "default"},
            **{"per_device_batch_size": 1, "max_target_length": 2048},
            "other_flags": {"global_parameter_scale": 128, "base_mlp_dim": 8192},
        }
    )
    words, lost = reference_keys(run)
    expected = {
        **{"emb_dim": "8192", "num_query_heads": "128", "num_kv_heads": "128", "head_dim": "128"},
        **{"mlp_dim": "65536", "num_decoder_layers": "64", "vocab_size": "32000"},
    }
    assert {key: words[key] for key in expected} == expected
    assert lost == ()
    layer = 4 * 8192 * 128 * 128 + 3 * 8192 * 65536 + 2 * 8192
    config = load(TrainerStep(run.target).words(words))
    assert count_parameters(config).total == 64 * layer + 2 * 32000 * 8192 + 8192


def test_tensors_without_the_custom_policy_are_left_out_as_maxtext_does():
    run = {
        **{"hardware": "tpu7x", "topology": "4x4x4", "model_name": "gemma4-26b"},
        **{"per_device_batch_size": 16, "max_target_length": 4096, "remat_policy": "full"},
        "remat_tensors": {"decoder_layer_input": "offload"},
    }
    read = read_run(run)
    words, _ = reference_keys(read)
    assert words["decoder_layer_input"] == "device"
    assert TrainerStep(read.target).invalid(words) is None


def test_the_default_model_with_mixtrals_experts_has_them_as_wide_as_its_mlp():
    """MaxText's custom_moe_700b, with four experts of one layer; by hand: 4·3·8192·32768…"""
    sizes = {"base_emb_dim": 8192, "base_mlp_dim": 32768, "base_num_decoder_layers": 1}
    heads = {"base_num_query_heads": 128, "base_num_kv_heads": 8, "head_dim": "256"}
    experts = {"decoder_block": "mixtral", "num_experts": 4, "num_experts_per_tok": 2}
    run = read_run(
        {
            **{"hardware": "v6e", "device_type": "v6e-256", "model_name": "default"},
            **{"per_device_batch_size": 1, "max_target_length": 2048},
            "mesh": {"ici_fsdp_parallelism": 64, "ici_expert_parallelism": 4},
            "other_flags": sizes | heads | experts,
        }
    )
    words, _ = reference_keys(run)
    assert TrainerStep(run.target).invalid(words) is None
    layer = 4 * 3 * 8192 * 32768 + 4 * 8192 + 8192 * 256 * (2 * 128 + 2 * 8) + 2 * 8192
    config = load(TrainerStep(run.target).words(words))
    assert count_parameters(config).total == layer + 2 * 32000 * 8192 + 8192
    assert count_parameters(run.model).total == count_parameters(config).total
