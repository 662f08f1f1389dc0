"""What the trainer's config alone says of a step, against runs whose memory was printed."""

import json

import jax
import pytest

from mfu_jax.planning.step_sources import MaxTextStep
from mfu_jax.planning.targets import parse_target
from mfu_jax.trainer.config.pyconfig import load
from mfu_jax.trainer.planned.planned_step import TrainerStep, lower
from mfu_jax.trainer.step.state import state_bytes_per_device
from tests.support.paths import DATA

FACTS = {fact["id"]: fact for fact in json.loads((DATA / "memory_facts.json").read_text())}
V6E = parse_target(topology="v6e-8")
MODEL = {"model_name": "llama3-8b", "max_target_length": "128"}


def _state_bytes(step, keys):
    no_gradients = {"gradient_clipping_threshold": "0"}  # held at once
    return state_bytes_per_device(load(step.words({**keys, **no_gradients})))


def test_resident_state_is_what_a_run_printed():
    """Llama 3.1 8B on 8 TPU7x devices, fsdp: weights and two moments in float32."""
    fact = FACTS["tpu7x-8dev-llama31-8b-peaks"]
    step = TrainerStep(parse_target(topology="tpu7x:2x2x1"))
    state = _state_bytes(step, {"model_name": "llama3-8b", "max_target_length": "1024"})
    assert state / 2**30 == pytest.approx(fact["resident_gib"]["native_train_py"], rel=0.005)


def test_the_state_is_split_by_the_mesh_and_kept_in_its_dtype():
    step = TrainerStep(V6E)
    whole = _state_bytes(step, {**MODEL, "data": "8"})
    assert _state_bytes(step, {**MODEL, "fsdp": "8"}) == whole // 8
    assert _state_bytes(step, {**MODEL, "data": "8", "weight_dtype": "bfloat16"}) == whole // 2


@pytest.mark.full
@pytest.mark.parametrize(
    ("policy", "said"),
    [("auto", "note: remat_policy=auto is minimal_with_context here\n"), ("full", "")],
)
def test_the_policy_that_auto_stands_for_is_said(policy, said, capsys):
    """Of the policies for scanned layers, the first: a tiny model fits with any."""
    words = "emb_dim=64 mlp_dim=128 num_decoder_layers=2 attention=dot_product vocab_size=64"
    lower([*words.split(), f"remat_policy={policy}"], jax.devices()[:1])
    assert capsys.readouterr().out == said


@pytest.mark.parametrize(
    ("given", "mesh"),
    [
        ({}, {"data=1", "fsdp=8"}),
        ({"ici_fsdp_parallelism": "-1", "ici_tensor_parallelism": "2"}, {"fsdp=4", "tensor=2"}),
        ({"fsdp": "4"}, {"fsdp=4"}),
    ],
)
def test_meshes_as_maxtext_names_them(given, mesh):
    assert mesh <= set(TrainerStep(V6E).words({**MODEL, **given}))


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"fsdp": "3"}, "does not fill the 8 devices"),
        ({"per_device_batch_size": "0.5"}, "not divisible by the mesh's"),
        ({"emb_dimm": "3"}, "unknown key"),
    ],
)
def test_wrong_steps_say_why(given, word):
    assert word in str(TrainerStep(V6E).invalid({**MODEL, **given}))


@pytest.mark.parametrize(
    ("keys", "turns"),
    [
        ({"fsdp": "8"}, None),
        # 32 layers: once through two stages of 16, two microbatches
        ({"pipeline": "2", "fsdp": "4", "num_layers_per_pipeline_stage": "16"}, (3, 1)),
        # twice through four stages of 4, eight microbatches
        (
            {
                "pipeline": "4",
                "fsdp": "2",
                "num_layers_per_pipeline_stage": "4",
                "num_pipeline_microbatches": "8",
            },
            (8 * 2 + 3, 3),
        ),
        # 21 pairs of a local and a global layer: once through three stages of seven pairs
        (
            {
                "model_name": "gemma2-9b",
                "pipeline": "3",
                "fsdp": "1",
                "num_layers_per_pipeline_stage": "14",
            },
            (5, 2),
        ),
    ],
)
def test_the_turns_of_a_pipeline(keys, turns):
    work = TrainerStep(V6E).work({**MODEL, **keys})
    assert work.pipeline == turns
    assert work.mesh.get("fsdp", 1) == int(keys["fsdp"]) or not work.mesh


def test_a_right_step_says_nothing():
    assert TrainerStep(V6E).invalid(MODEL) is None


def test_a_plan_names_its_model_and_batch():
    named = TrainerStep(V6E).named({**MODEL, "per_device_batch_size": "3"})
    assert named == "llama3-8b (32 layers, emb_dim=4096), 3 × 128 tokens a device,"
    assert TrainerStep(V6E).named({"max_target_length": "64"}) == (
        "the model of base.yml (4 layers, emb_dim=256), 8 × 64 tokens a device,"
    )
    maxtext = MaxTextStep().named({"model_name": "gemma2-9b"})
    assert maxtext == "gemma2-9b, 12 × 2048 tokens a device,"


def test_every_setting_is_in_the_identity():
    step = TrainerStep(V6E)
    assert step.identity(MODEL) != step.identity({**MODEL, "adam_b1": "0.8"})
    assert step.identity(MODEL) == step.identity(MODEL)
