"""Measured runs as the reference trainer's keys: meshes by hand, and what is not followed."""

import sys
import types

import pytest

from mfu_jax.errors import UserError
from mfu_jax.planning.measured_runs import read_run
from mfu_jax.trainer.planned.planned_run import Lost, followed, reference_keys
from mfu_jax.trainer.planned.planned_step import TrainerStep

RUN = {"model_name": "llama3.1-8b", "per_device_batch_size": 1, "max_target_length": 8192}
V6E = {"hardware": "v6e", "device_type": "v6e-8"}


@pytest.mark.parametrize(
    ("chips", "given", "mesh"),
    [
        ({"device_type": "v6e-8"}, {"ici_fsdp_parallelism": -1}, (1, 8, 1, 1)),
        ({"device_type": "v6e-8"}, {}, (1, 8, 1, 1)),
        (
            {"device_type": "v6e-256", "num_slices": 2},
            {"ici_fsdp_parallelism": 256},
            (2, 256, 1, 1),
        ),
        (
            {"device_type": "v6e-256", "num_slices": 2},
            {"ici_fsdp_parallelism": 256, "dcn_fsdp_parallelism": 2},
            (1, 512, 1, 1),
        ),
        (
            {"device_type": "v6e-256"},
            {"ici_fsdp_parallelism": 16, "ici_tensor_parallelism": 4, "ici_expert_parallelism": 4},
            (1, 16, 4, 4),
        ),
    ],
)
def test_axes_of_both_networks_multiply(chips, given, mesh):
    keys, lost = reference_keys(read_run({**RUN, "hardware": "v6e", **chips, "mesh": given}))
    assert tuple(int(keys[axis]) for axis in ("data", "fsdp", "expert", "tensor")) == mesh
    assert lost == ()


def test_maxtext_leaves_it_to_xla_when_weights_are_gathered_and_computes_tiles_twice():
    run = {**RUN, "hardware": "v6e", "device_type": "v6e-8", "remat_policy": "full"}
    keys, _ = reference_keys(read_run({**run, "mesh": {"ici_fsdp_parallelism": -1}}))
    assert (keys["weight_gathers"], keys["norm_gradients"]) == ("xla", "fused")
    assert (keys["recompute_logits"], keys["remat_after_rope"]) == ("true", "true")


@pytest.mark.parametrize(
    ("model", "flags", "at_once"),
    [
        ("gemma3-12b", {}, "true"),
        ("gemma4-31b", {}, "false"),
        ("gemma4-31b", {"remat_patterns": True}, "true"),
    ],
)
def test_maxtext_recomputes_a_scanned_block_at_once_except_gemma_4s(model, flags, at_once):
    run = {**RUN, "model_name": model, "hardware": "v6e", "device_type": "v6e-8"}
    keys, lost = reference_keys(read_run({**run, "other_flags": flags}))
    assert keys["remat_patterns"] == at_once
    assert lost == ()


def test_axes_that_another_stands_for_are_named():
    mesh = {"ici_sequence_parallelism": 2, "ici_pipeline_parallelism": 4}
    keys, lost = reference_keys(
        read_run({**RUN, "hardware": "v6e", "device_type": "v6e-8", "mesh": mesh})
    )
    assert keys["context_parallelism"] == "2"
    assert lost == (Lost("sequence_parallelism=2 (as context)", touches="transfers"),)


@pytest.fixture
def qwix(monkeypatch):
    monkeypatch.setitem(sys.modules, "qwix", types.SimpleNamespace(__spec__=object()))


def test_what_the_trainer_has_is_followed_and_the_rest_is_named(qwix):
    run = {
        **RUN,
        "hardware": "tpu7x",
        "topology": "4x8x8",
        "per_device_batch_size": 0.125,
        "mesh": {"ici_fsdp_parallelism": -1, "ici_context_parallelism": 8},
        "remat_policy": "custom",
        "remat_tensors": {"context": "device", "mlpwo": "offload"},
        "splash": {"sa_block_q": 1024, "use_tokamax_splash": True},
        "optimizer": {"opt_type": "adamw"},
        "attention": "flash",
        "other_flags": {
            "base_num_decoder_layers": 2,
            "use_iota_embed": True,
            "use_qwix_quantization": True,
            "act_quantization_calibration_method": "fixed,-224,224",
        },
        "quantization": "fp8_full",
    }
    read = read_run(run)
    keys, lost = reference_keys(read)
    assert lost == (Lost("use_tokamax_splash=true", touches="kernel"),)
    expected = {
        "fsdp": "64",
        "context_parallelism": "8",
        "tensor": "1",
        "context": "device",
        "mlpwo": "offload",
        "sa_block_q": "1024",
        "num_decoder_layers": "2",
        "use_iota_embed": "true",
        "attention": "auto",
        "dtype": "bfloat16",
        "quantization": "fp8_full",
        "act_quantization_calibration_method": "fixed,-224,224",
    }
    assert {key: keys[key] for key in expected} == expected
    assert TrainerStep(read.target).invalid(keys) is None


@pytest.mark.parametrize(
    ("sparse", "capacity", "slots", "lost"),
    [
        (True, 1.25, None, ()),  # MaxText's dropless experts have no slots
        (False, 1.25, "1.25", ()),
        (False, -1, "-1", (Lost("sparse_matmul=false", work="experts' dispatch"),)),
    ],
)
def test_experts_have_slots_where_maxtexts_have(sparse, capacity, slots, lost):
    flags = {"sparse_matmul": sparse, "capacity_factor": capacity, "use_custom_sort_vjp": True}
    run = {**RUN, "model_name": "mixtral-8x7b", "hardware": "v6e", "device_type": "v6e-8"}
    found = reference_keys(read_run({**run, "other_flags": flags}))
    assert found.keys.get("capacity_factor") == slots
    assert found.lost == lost


@pytest.mark.parametrize(("flags", "whole"), [({}, "true"), ({"whole_routing": False}, "false")])
def test_weights_of_all_rows_are_scattered_unless_the_run_is_of_an_older_maxtext(flags, whole):
    run = {**RUN, "model_name": "mixtral-8x7b", "hardware": "v6e", "device_type": "v6e-8"}
    keys, lost = reference_keys(read_run({**run, "other_flags": {"capacity_factor": 1, **flags}}))
    assert keys["whole_routing"] == whole
    assert not any("whole_routing" in one.setting for one in lost)


@pytest.mark.parametrize(
    ("hardware", "quantization", "capacity", "is_said"),
    [
        ({"hardware": "b200", "jax_devices": 64}, "fp8", 1.25, True),
        ({"hardware": "b200", "jax_devices": 64}, "", 1.25, False),
        ({"hardware": "b200", "jax_devices": 64}, "fp8", -1, False),
        ({"hardware": "v6e", "device_type": "v6e-8"}, "int8", 1.25, False),
    ],
)
def test_what_xla_makes_of_quantized_slots_on_gpus_is_said(
    hardware, quantization, capacity, is_said
):
    pytest.importorskip("qwix")
    flags = {"other_flags": {"capacity_factor": capacity}, "quantization": quantization}
    run = {"model_name": "mixtral-8x7b", "per_device_batch_size": 1, "max_target_length": 4096}
    keys, lost = reference_keys(read_run({**run, **hardware, **flags}))
    assert any("second gathers" in one.setting for one in lost) == is_said
    assert ("whole_expert_gradients" in keys) == is_said


@pytest.mark.parametrize("hardware", [{"hardware": "h100", "jax_devices": 64}, V6E])
@pytest.mark.parametrize(
    ("quantization", "flags", "said"),
    [
        ("fp8", {}, "one scale per tensor"),  # Flax's Fp8DotGeneralOp
        ("int8", {}, "AQT"),
        ("int8", {"use_qwix_quantization": True}, ""),
        ("fp8_full", {"use_qwix_quantization": True}, ""),
    ],
)
def test_what_maxtext_rounds_by_without_qwix_is_said(hardware, quantization, flags, said):
    pytest.importorskip("qwix")
    run = {"model_name": "llama2-7b", "per_device_batch_size": 1, "max_target_length": 4096}
    given = {**run, **hardware, "quantization": quantization, "other_flags": flags}
    lost = reference_keys(read_run(given)).lost
    assert [one.touches for one in lost] == (["vector"] if said else [])
    assert not said or said in lost[0].setting


def test_aqts_int8_is_in_the_first_line_with_how_much_it_may_take():
    """Plans with its rounding: GPT-3 10.87 to 11.88 and 20.73 to 23.72 s, Mixtral 7.29 to 9.42."""
    pytest.importorskip("qwix")
    ((why, longer),) = followed(read_run({**RUN, **V6E, "quantization": "int8"})).doubts
    assert "AQT" in why
    assert longer == pytest.approx(max(11.88 / 10.87, 23.72 / 20.73, 9.42 / 7.29) - 1, abs=0.005)
    assert not followed(read_run({**RUN, **V6E, "quantization": "fp8_full"})).doubts


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("remat_policy", "minimal_with_context_and_quantization"),
        ("opt_type", "muon"),
        ("matmul_precision", "highest"),
    ],
)
def test_what_changes_the_steps_work_is_another_program(key, value):
    run = read_run({**RUN, **V6E, key: value})
    with pytest.raises(UserError, match=f"another program.*{key}={value}"):
        followed(run)
    assert followed(run, "nearest").other_work


@pytest.mark.parametrize(("tokamax", "fused"), [(True, "true"), (False, "false")])
def test_tokamaxs_attention_has_one_backward_kernel(tokamax, fused):
    splash = {"use_tokamax_splash": tokamax, "sa_use_fused_bwd_kernel": False}
    keys, _ = reference_keys(read_run({**RUN, **V6E, "splash": splash}))
    assert keys["sa_use_fused_bwd_kernel"] == fused


@pytest.mark.parametrize(("sparse", "lost"), [(False, ()), (True, ("megablox=false",))])
def test_the_kernel_of_sparse_experts_is_theirs_alone(sparse, lost):
    run = {**RUN, **V6E, "model_name": "mixtral-8x7b"}
    flags = {"sparse_matmul": sparse, "megablox": False, "capacity_factor": 1.25}
    found = reference_keys(read_run({**run, "other_flags": flags}))
    assert tuple(one.setting for one in found.lost) == lost


def test_whole_experts_are_followed_where_each_device_gets_as_many():
    flags = {"fsdp_shard_on_exp": True, "mu_dtype": "bfloat16", "grad_dtype": "bfloat16"}
    run = {**RUN, "model_name": "mixtral-8x7b", "hardware": "v6e", "other_flags": flags}
    keys, lost = reference_keys(read_run({**run, "device_type": "v6e-8"}))  # eight experts
    assert (keys["shard_exp_on_fsdp"], keys["mu_dtype"]) == ("true", "bfloat16")
    assert keys["grad_dtype"] == "bfloat16"
    assert lost == ()
    two = {"ici_fsdp_transpose_parallelism": 2}
    for name in ("fsdp_shard_on_exp", "use_2d_fsdp_sharding"):  # MaxText splits the rest of each
        flags = {"other_flags": {name: True}, "mesh": two}
        if name != "fsdp_shard_on_exp":  # one that is off takes nothing back, wherever it stands
            flags["other_flags"]["fsdp_shard_on_exp"] = False
        keys, lost = reference_keys(read_run({**run, "device_type": "v6e-16", **flags}))
        assert (keys["fsdp"], keys["fsdp_transpose"], keys["shard_exp_on_fsdp"]) == (
            "8",
            "2",
            "true",
        )
        assert lost == ()
    keys, lost = reference_keys(read_run({**run, "device_type": "v6e-16"}))
    assert "shard_exp_on_fsdp" not in keys
    assert lost == (Lost("shard_exp_on_fsdp=true", touches="transfers"),)


def test_without_qwix_quantisation_is_not_followed_and_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "qwix", None)
    found = reference_keys(
        read_run({**RUN, "hardware": "v6e", "device_type": "v6e-8", "quantization": "int8"})
    )
    assert "quantization" not in found.keys
    assert found.other_work == (
        "quantization=int8, which needs pip install 'mfu-jax[quantize]' (matmul precision)",
    )


def test_calibration_of_no_quantisation_is_named():
    flags = {"act_quantization_calibration_method": "absmax", "logits_dot_in_fp32": False}
    keys, lost = reference_keys(
        read_run({**RUN, "hardware": "v6e", "device_type": "v6e-8", "other_flags": flags})
    )
    assert "act_quantization_calibration_method" not in keys
    assert lost == (Lost("act_quantization_calibration_method=absmax (without quantization)"),)


@pytest.mark.parametrize(
    ("keys", "work"),
    [
        ({"quantization": "te_mxfp8"}, "quantization=te_mxfp8 (matmul precision)"),
        (
            {"other_flags": {"context_parallel_strategy": "ulysses"}},
            "context_parallel_strategy=ulysses (context parallelism)",
        ),
        (
            {"other_flags": {"context_parallel_strategy": "ring", "mtp_num_layers": 1}},
            "context_parallel_strategy=ring, in kernels as the run's (context parallelism)",
        ),
        ({"attention": "paged"}, "attention=paged (attention kernel)"),
        (
            {"model_name": "mixtral-8x7b", "other_flags": {"sparse_matmul": False}},
            "sparse_matmul=false (experts' dispatch)",
        ),
    ],
)
def test_a_setting_that_makes_another_program_is_no_detail(keys, work):
    found = reference_keys(read_run({**RUN, "hardware": "v6e", "device_type": "v6e-8", **keys}))
    assert found.other_work == (work,)
    assert found.notes({}) == ()


def test_a_ring_on_tpus_is_followed():
    flags = {"context_parallel_strategy": "ring", "context_parallel_load_balance": True}
    run = read_run({**RUN, "hardware": "v6e", "device_type": "v6e-8", "other_flags": flags})
    keys, lost = reference_keys(run)
    assert keys["context_parallel_strategy"] == "ring"
    assert lost == ()


def test_details_are_told_by_the_time_that_they_may_change():
    flags = {"opt_type": "adam_pax", "use_tokamax_splash": True, "unheard_of": 1}
    mesh = {"ici_sequence_parallelism": 2}
    run = {**RUN, "hardware": "v6e", "device_type": "v6e-8", "other_flags": flags, "mesh": mesh}
    seconds = {"matmul": 5.0, "vector": 2.0, "kernel": 0.5, "copy": 0.6}
    seconds |= {"all-gather over fsdp on ici": 1.5, "slices out of step": 0.4}
    told = [
        note.removeprefix("not followed by the reference model: ")
        for note in reference_keys(read_run(run)).notes(seconds)
    ]
    assert told == [
        "opt_type=adam_pax (vector: 20.0% of the step)",
        "sequence_parallelism=2 (as context) (transfers: 15.0% of the step)",
        "use_tokamax_splash=true (kernel: 5.0% of the step)",
        "unheard_of=1",
    ]
