"""A measured run becomes MaxText's arguments, chips and flags."""

from dataclasses import replace

import pytest

from mfu_jax.errors import UserError
from mfu_jax.flops.analytic.parameters import count_parameters
from mfu_jax.planning.measured_runs import (
    ATTENTION_BLOCKS,
    EXPERT_TILES,
    REMAT_POLICY,
    judged,
    may_save,
    read_run,
    with_doubts,
    with_left_out,
)
from mfu_jax.planning.result.plan import Plan, warning_of

FAST = "--xla_tpu_dvfs_p_state=7"
FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
RUN = {
    "hardware": "v6e",
    "device_type": "v6e-256",
    "num_slices": 2,
    "model_name": "llama3.1-405b",
    "per_device_batch_size": 1,
    "max_target_length": 8192,
    "mesh": {"ici_fsdp_parallelism": 256, "dcn_fsdp_parallelism": 2},
    "remat_policy": "custom",
    "remat_tensors": {"decoder_layer_input": "offload"},
    "splash": {"sa_use_fused_bwd_kernel": True},
    "attention": "flash",
    "xla_flags": ["--xla_tpu_scoped_vmem_limit_kib=98304"],
    "env": {"A": "1"},
}


def test_keys_mesh_remat_and_flags_are_passed_on():
    run = read_run(RUN)
    assert run.keys == {
        "model_name": "llama3.1-405b",
        "per_device_batch_size": "1",
        "max_target_length": "8192",
        "ici_fsdp_parallelism": "256",
        "dcn_fsdp_parallelism": "2",
        "remat_policy": "custom",
        "decoder_layer_input": "offload",
        "sa_use_fused_bwd_kernel": "true",
        "attention": "flash",
    }
    assert run.flags == ("--xla_tpu_scoped_vmem_limit_kib=98304",)
    assert (run.target.topology, run.target.devices) == ("v6e:16x16", 512)
    assert run.notes == ("environment variables are not set: A",)


@pytest.mark.parametrize(
    ("chips", "topology", "devices"),
    [
        ({"hardware": "tpu7x", "topology": "4x4x8"}, "tpu7x:4x4x8", 256),
        ({"hardware": "v5p", "device_type": "v5p-256"}, "v5p:4x4x8", 128),
        ({"hardware": "v5p", "chips": 4}, "v5p:2x2x1", 4),
        ({"hardware": "TPU v6e", "topology": "16x16"}, "v6e:16x16", 256),
        ({"hardware": "trillium", "device_type": "2xv6e-256"}, "v6e:16x16", 512),
        ({"hardware": "v5e-8"}, "v5e:2x4", 8),
        ({"hardware": "h100", "chips": 16}, "1x2x8", 16),
        ({"hardware": "TPU7x", "device_type": "TPU7X-4X4X4"}, "tpu7x:4x4x4", 128),
    ],
)
def test_chips_by_topology_name_or_number(chips, topology, devices):
    run = {key: RUN[key] for key in ("model_name", "per_device_batch_size", "max_target_length")}
    target = read_run({**run, **chips}).target
    assert (target.topology, target.devices) == (topology, devices)


@pytest.mark.parametrize(
    ("run", "word"),
    [
        ([], "expected a JSON object"),
        ({"hardware": "v6e"}, "lacks model_name"),
        ({**RUN, "model_name": ""}, "lacks model_name"),
        ({**RUN, "per_device_batch_size": None}, "lacks per_device_batch_size"),
        ({**RUN, "max_target_length": "long"}, "long"),
        ({**RUN, "mesh": [1]}, "mesh of the run"),
        ({**RUN, "mesh": {"ici_fdsp_parallelism": 8}}, "did you mean 'ici_fsdp_parallelism'"),
        ({**RUN, "mesh": {"fsdp": 8}}, "'fsdp' in mesh of the run"),
        ({**RUN, "other_flags": {"dcn_fdsp_parallelism": 2}}, "'dcn_fdsp_parallelism' in other_fl"),
        ({**RUN, "ici_dta_parallelism": 2}, "did you mean 'ici_data_parallelism'"),
        ({**RUN, "device_type": None}, "neither topology, device_type nor chips"),
        ({**RUN, "device_type": "v6e-7"}, "power of 2"),
        ({**RUN, "num_slices": "two"}, "num_slices='two': expected a whole number"),
        ({**RUN, "env": ["A=1"]}, "env of the run"),
        ({**RUN, "hardware": "h100", "env": {FRACTION: 90}}, "expected a share"),
        ({**RUN, "hardware": "h100", "env": {FRACTION: "most"}}, "most"),
    ],
)
def test_wrong_runs_are_one_line(run, word):
    with pytest.raises(UserError, match=word):
        read_run(run)


def test_overridden_sizes_count_and_flags_may_be_one_text():
    flags = "--xla_a='' TPU_MEGACORE=MEGACORE_DENSE --xla_b=2"
    run = read_run({**RUN, "other_flags": {"base_num_decoder_layers": 2}, "xla_flags": flags})
    assert run.model["base_num_decoder_layers"] == 2
    assert run.flags == ("--xla_a=", "--xla_b=2")
    assert run.notes[0] == "no flags of the compiler, left out: TPU_MEGACORE=MEGACORE_DENSE"


def test_a_size_that_contradicts_the_named_model_is_the_runs():
    """MaxText's gpu/models/mixtral_8x1b.yml: a Mixtral of 5 layers, 4,096 wide."""
    flags = {"base_num_decoder_layers": 5, "base_emb_dim": "4096", "num_experts": None}
    run = read_run({**RUN, "model_name": "mixtral-8x7b", "other_flags": flags})
    row = {**run.model, "base_num_decoder_layers": 32}
    assert "num_experts" not in run.keys
    share = count_parameters(run.model).total / count_parameters(row).total
    assert 5 / 32 < share < 6 / 32  # the embedding does not shrink


def test_a_mistral_with_experts_is_what_maxtext_called_mixtral_later():
    """gpu-recipes' mixtral-8x7b-256gpus-a3u-bf16.yaml: the model's sizes, under its old name."""
    experts = {"num_experts": 8, "num_experts_per_tok": 2}
    layers = {"base_num_decoder_layers": 32, "base_emb_dim": 4096, "base_mlp_dim": 14336}
    heads = {"base_num_query_heads": 32, "base_num_kv_heads": 8, "head_dim": 128}
    flags = {**layers, **heads, "vocab_size": 32000, "decoder_block": "mistral"}
    run = read_run({**RUN, "model_name": "default", "other_flags": {**flags, **experts}})
    named = read_run({**RUN, "model_name": "mixtral-8x7b"})
    assert run.keys["decoder_block"] == "mixtral"
    assert count_parameters(run.model) == count_parameters(named.model)
    dense = read_run({**RUN, "model_name": "default", "other_flags": flags})
    assert dense.keys["decoder_block"] == "mistral"


def test_what_a_run_leaves_out_is_maxtexts_default_and_is_said():
    """MaxText's configs/tpu/v4/22b.sh, whose sizes stand outside the groups here."""
    sizes = {"base_emb_dim": 6144, "base_num_decoder_layers": 48, "num_vocab_tiling": 8}
    left_out = {**RUN, "model_name": None, "max_target_length": None, "env": None}
    run = read_run({**left_out, **sizes, "ici_tensor_parallelism": 1, "mfu_printed": 0.4})
    assert (
        run.keys.items()
        >= {
            "model_name": "default",
            "max_target_length": "2048",
            "base_emb_dim": "6144",
            "num_vocab_tiling": "8",
            "ici_tensor_parallelism": "1",
        }.items()
    )
    assert (run.model["base_emb_dim"], run.model["vocab_size"]) == (6144, 32000)
    assert run.notes == (
        "no model_name: MaxText's default model with the run's sizes is planned",
        "no max_target_length: MaxText's default, 2048, is planned",
    )


def test_what_a_run_leaves_out_is_in_the_first_line_if_it_may_take_much_of_the_step():
    ops = (
        {"scope": "layers/splash", "kind": "splash_mha_fwd", "phase": "forward", "seconds": 3.0},
        {"scope": "layers/moe/experts", "kind": "matmul", "phase": "forward", "seconds": 4.0}
        | {"flops": 1.4e12},
        {"scope": "layers/mlp", "kind": "matmul", "phase": "rematerialized", "seconds": 1.0},
    )
    plan = Plan(
        **{"target": "v6e:2x4", "chips": 8, "fits": True, "ops": ops, "model_flops": 10**12},
        **{"mfu": 0.1, "step_time_seconds": 10.0, "step_time_range": (9.0, 11.0)},
    )
    run = replace(read_run(RUN), left_out=(ATTENTION_BLOCKS, EXPERT_TILES))
    told = with_left_out(plan, run)
    assert told.left_out == run.left_out
    assert told.left_out_share == pytest.approx((1.5 + 4.0 - 2.0) / 10)  # 0.7 of 1 TFLOP/s
    assert told.step_time_range == pytest.approx((9.0 * 0.65, 11.0))
    assert warning_of(told).startswith(
        "planned with defaults for what the run leaves out (sa_block"
    )
    assert with_left_out(plan, replace(run, left_out=(REMAT_POLICY,))) == plan  # 10%


LEVANTER = {"framework": "Levanter/grug (JAX)"}
GPUS = {"hardware": "h100", "chips": 8, "splash": None}


@pytest.mark.parametrize(
    ("framework", "step", "fits", "first_line", "ends"),
    [
        ("MaxText, JAX 0.9.1", 0.1, True, "", 0.11),
        ("", 0.5, True, "", 0.55),
        ("", 0.2, True, "without the loop's own work, which takes 68.000 ms", 0.22 * 1.34),
        ("Levanter/grug (JAX)", 0.2, True, "", 0.22),  # planned
        ("axlearn", 2.0, True, "axlearn's step, by MaxText's keys alone; other runs", 2.2 * 1.33),
        ("own trainer", 2.0, True, "own's step, by MaxText's keys alone: ", 2.2),
        ("maxtext", 2.0, False, "times of a program that does not fit", 2.2),
    ],
)
def test_why_a_run_may_be_far_from_its_plan_is_in_the_first_line(
    framework, step, fits, first_line, ends
):
    plan = Plan(
        **{"target": "v5p:2x2x4", "chips": 16, "fits": fits, "step_time_seconds": step},
        step_time_range=(0.9 * step, 1.1 * step),
    )
    told = with_doubts(plan, read_run({**RUN, "framework": framework}))
    assert warning_of(told).startswith(first_line)
    assert bool(warning_of(told)) == bool(first_line)
    assert told.step_time_range == pytest.approx((0.9 * step, ends))


@pytest.mark.parametrize(
    ("training_seconds", "steps", "planned"),
    [(1896.67, 8012, 0.1695), (4939.91, 6834, 0.6536), (25661.86, 15964, 1.5399)],
)
def test_levanters_loop_takes_what_its_runs_took_beside_their_plans(
    training_seconds, steps, planned
):
    """Marin's speedruns of 200M, 400M and 800M on 16 v5p: their files, and plans without a loop."""
    run = read_run({**RUN, **LEVANTER})
    assert planned + run.loop_seconds == pytest.approx(training_seconds / steps, abs=2e-3)
    assert not read_run({**RUN, **GPUS, **LEVANTER}).loop_seconds  # not known


@pytest.mark.parametrize(
    ("chips", "flags", "share"),
    [
        ({"hardware": "v6e", "device_type": "v6e-8"}, [], 0.7),
        ({"hardware": "v5p", "device_type": "v5p-8"}, [], 0.7),
        ({"hardware": "tpu7x", "device_type": "tpu7x-8"}, [], 0.7),
        ({"hardware": "tpu7x", "device_type": "tpu7x-8"}, [FAST], 0.7 / 0.892),
    ],
)
def test_experts_kernels_with_the_best_tiles_are_those_of_the_plan(chips, flags, share):
    """The share that `Durations` has where tiles are not known and none is wasted."""
    op = {"scope": "layers/moe/experts", "kind": "matmul", "phase": "forward", "seconds": 4.0}
    plan = Plan(
        **{"target": "a", "chips": 8, "fits": True, "model_flops": 10**12},
        **{"mfu": 0.1, "step_time_seconds": 10.0, "ops": (op | {"flops": 10**12},)},
    )
    run = read_run({**RUN, **chips, "xla_flags": flags})
    assert may_save(plan, EXPERT_TILES, run) == pytest.approx(4 - 1 / share)


def test_keys_that_mean_nothing_are_named():
    run = {**RUN, "env": None, "remat": {"policy": "full"}, "loss_printed": 2.1, "eval": None}
    (note,) = read_run(run).notes
    assert note == "not understood, ignored: remat; expected MaxText's keys in other_flags"
    (note,) = read_run({**RUN, "env": None, "remat_policy": None}).notes
    assert note.startswith("no remat_policy: MaxText's default, full, is planned")
    (note,) = read_run({**RUN, "env": None, "splash": None}).notes
    assert note.startswith("no sa_block sizes: MaxText's default, 512, is planned")
    assert note in read_run({**RUN, "env": None, "splash": None, "hardware": "v6e-8"}).notes
    assert not read_run({**RUN, "env": None, "splash": None, "hardware": "h100", "chips": 8}).notes
    assert not read_run({**RUN, "env": None, "splash": None, "attention": "dot_product"}).notes


def test_maxtexts_keys_may_stand_outside_of_the_groups():
    flat = {"decoder_layer_input": "offload", "sa_block_q": 1024, "opt_type": "adamw"}
    run = {**RUN, "env": None, "remat_tensors": None, "splash": None}
    grouped = {"remat_tensors": {"decoder_layer_input": "offload"}, "splash": {"sa_block_q": 1024}}
    assert read_run({**run, **flat, "date": "2026-10-05"}) == read_run(
        {**run, **grouped, "optimizer": {"opt_type": "adamw"}}
    )


@pytest.mark.parametrize(
    "given",
    [
        {"xla_flags": {"xla_a": True, "--xla_b": 2}},
        {"xla_flags": None, "env": {"XLA_FLAGS": "--xla_a=true", "LIBTPU_INIT_ARGS": "--xla_b=2"}},
        {"xla_flags": ["--xla_b=2"], "env": {"XLA_FLAGS": "--xla_a=true"}},
    ],
)
def test_flags_of_the_compiler_stand_where_recipes_have_them(given):
    run = read_run({**RUN, "env": None, **given})
    assert run.flags == ("--xla_a=true", "--xla_b=2")
    assert run.notes == ()


@pytest.mark.parametrize(
    ("kind", "topology"),
    [("TPU v5 lite", "v5e:8x8"), ("TPU v6 lite", "v6e:8x8"), ("TPU v5", "v5p:4x4x4")],
)
def test_a_tpu_by_the_name_that_jax_prints(kind, topology):
    run = {**RUN, "hardware": kind, "device_type": None, "num_slices": None, "chips": 64}
    assert read_run(run).target.topology == topology


@pytest.mark.parametrize("name", ["meta-llama/Llama-3.1-8B", "llama-3.1-8b"])
def test_a_model_without_known_sizes_names_the_bundled_one(name):
    with pytest.raises(UserError, match=r"not a bundled model.*\n.*did you mean 'llama3\.1-8b'"):
        read_run({**RUN, "model_name": name})


def test_a_gpu_runs_share_of_the_memory_is_the_plans():
    run = read_run({**RUN, **GPUS, "env": {FRACTION: "0.94", "A": "1"}})
    assert run.target.memory_fraction == 0.94
    assert run.notes == ("environment variables are not set: A",)
    assert read_run({**RUN, **GPUS}).target.memory_fraction is None
    assert FRACTION in read_run({**RUN, "env": {FRACTION: "0.94"}}).notes[0]  # a TPU's


def test_a_runs_network_is_the_plans():
    run = read_run({**RUN, **GPUS, "env": {}, "network_gbits": 200})
    assert run.target.network_gbits == 200
    assert run.notes == ()
    with pytest.raises(UserError, match="network_gbits"):
        read_run({**RUN, **GPUS, "network_gbits": "fast"})


def test_lists_are_one_value():
    run = read_run({**RUN, "other_flags": {"mlp_activations": ["silu", "linear"]}})
    assert run.keys["mlp_activations"] == "[silu,linear]"


GIB = 2**30


@pytest.mark.parametrize(
    ("flags", "peak", "again", "fits", "words"),
    [
        # MaxText's 22b.sh runs out of memory (its commit 0ad8d3f73); the reference step fits, as
        # the compiler recomputes matmuls.
        ({}, 29.1, 2, False, "up to 11.1 GiB more and is taken not to fit"),
        ({}, 29.1, 0, True, "up to 11.1 GiB more and may then not fit"),
        ({}, 15.0, 2, True, "up to 11.1 GiB more;"),
        ({"num_vocab_tiling": 8}, 29.3, 2, True, ""),  # compiles
        ({"num_vocab_tiling": 6}, 29.3, 0, True, "up to 1.85 GiB more and may then not fit"),
    ],
)
def test_what_maxtexts_loss_may_need_more(flags, peak, again, fits, words):
    """13 sequences of 2,048 tokens, 32,000 words, 14 bytes: 11.1 GiB."""
    run = {**RUN, "model_name": "default", "per_device_batch_size": 13, "max_target_length": 2048}
    plan = Plan(
        target="v4-128",
        chips=64,
        fits=True,
        memory_peak_bytes=round(peak * GIB),
        memory_limit_bytes=round(30.75 * GIB),
        executed_flops=100,
        xla_rematerialized_flops=again,
    )
    found = judged(plan, read_run({**run, "other_flags": flags}))
    assert found.fits == fits
    assert words in "".join(found.notes)
    assert bool(found.notes) == bool(words)


LONG = {
    **RUN,
    "model_name": "llama3.1-8b",
    "per_device_batch_size": 1 / 64,
    "max_target_length": 64 * 2**17,
    "mesh": {"ici_context_parallelism": 64},
    "splash": {"use_tokamax_splash": True, "dq_reduction_steps": 3, "sa_block_kv_dkv": 1024},
    "other_flags": {"context_parallel_strategy": "ring", "num_vocab_tiling": 16},
}


@pytest.mark.parametrize(
    ("splash", "strategy", "gib"),
    [
        ({}, "ring", 128 - 6),  # 2**17 queries and keys of a device, 4,096 numbers: 1 GiB a block
        ({"sa_block_kv_dkv": 2048}, "ring", 64 - 6),
        ({}, "all_gather", 64 * 128 - 6),  # all keys
        ({"sa_block_kv_dkv": 2**17}, "ring", 0),
        ({"dq_reduction_steps": 0}, "ring", 0),
        ({"use_tokamax_splash": False}, "ring", 0),
    ],
)
def test_gradients_of_queries_for_each_block_of_keys(splash, strategy, gib):
    run = {**LONG, "splash": {**LONG["splash"], **splash}}
    run["other_flags"] = {**LONG["other_flags"], "context_parallel_strategy": strategy}
    assert read_run(run).partial_gradient_bytes == gib * GIB


@pytest.mark.parametrize(("peak", "fits"), [(200, True), (230, False)])
def test_a_run_fits_that_does_without_the_compiled_kernels_gradients(peak, fits):
    plan = Plan(
        target="v5p:4x4x4",
        chips=64,
        fits=False,
        memory_peak_bytes=peak * GIB,
        memory_limit_bytes=95 * GIB,
        memory={"temporaries": 150 * GIB},
    )
    found = judged(plan, read_run(LONG))
    assert found.fits == fits
    assert ("122 GiB of queries' gradients" in "".join(found.notes)) == fits
    assert warning_of(found).startswith("with another kernel's attention, which does not") == fits
    assert found.memory["temporaries"] == (28 if fits else 150) * GIB


def test_memory_that_the_compiled_kernels_gradients_take_is_no_shortage_of_the_runs():
    plan = Plan(
        target="v5p:4x4x4",
        chips=64,
        fits=True,
        memory_peak_bytes=94 * GIB,
        memory_limit_bytes=95 * GIB,
        executed_flops=100,
        xla_rematerialized_flops=2,
    )
    for splash, fits in ((LONG["splash"], True), ({}, False)):
        found = judged(plan, read_run({**LONG, "splash": splash}))
        assert found.fits == fits


@pytest.mark.parametrize(
    ("splash", "is_constant"),
    [
        ({"use_tokamax_splash": True, "use_max_logit_estimate": 30}, True),
        ({"use_tokamax_splash": True, "use_max_logit_estimate": -1}, False),
        ({"use_max_logit_estimate": 30}, False),
    ],
)
def test_tokamaxs_kernel_may_subtract_a_constant(splash, is_constant):
    assert read_run({**RUN, "splash": splash}).attention.constant_maximum == is_constant


@pytest.mark.parametrize(
    ("splash", "skips"),
    [
        ({}, (False, False)),
        ({"dq_reduction_steps": 3}, (False, False)),
        ({"use_tokamax_splash": True}, (True, False)),
        ({"use_tokamax_splash": True, "dq_reduction_steps": 3}, (True, True)),
    ],
)
def test_tokamaxs_kernels_have_no_steps_for_masked_blocks(splash, skips):
    assert read_run({**RUN, "splash": splash}).attention[1:3] == skips


def test_a_backward_kernel_that_splits_heads_over_cores_has_steps_for_all_blocks():
    run = {**LONG, "splash": {**LONG["splash"], "sa_bwd_dkv_megacore": True}}
    assert read_run(run).attention == (False, True, False, True)
    assert read_run(run).partial_gradient_bytes == read_run(LONG).partial_gradient_bytes
