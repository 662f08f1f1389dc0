"""Quantised training steps: FLOPs by dtype against arithmetic, peaks, and losses."""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import pytest

from mfu_jax.errors import UserError
from mfu_jax.flops.analytic.totals import model_flops_per_device
from mfu_jax.flops.executed.counting import executed_flops
from mfu_jax.hardware.step_peaks import find_peaks
from mfu_jax.instrumentation import counts
from mfu_jax.trainer.config.pyconfig import Config
from mfu_jax.trainer.step import mesh, state
from mfu_jax.trainer.step import train_step as step
from tests.support.compilation import only_counted
from tests.support.tiny_step import compiled_step, tiny_config

B, S, V, D, F, L, N, h = 2, 16, 64, 32, 48, 2, 4, 8
TOKENS = B * S
# Forward FLOPs, 2·m·n·k: of a layer's projections, of its scores, of the head.
PROJECTIONS = 2 * TOKENS * D * (4 * N * h + 3 * F)
SCORES = 2 * (2 * B * N * S * S * h)
HEAD = 2 * TOKENS * D * V
SLOTS, EXPERTS = 24, 4  # capacity: 1.5 · 16 tokens · 2 / 4 experts a sequence


def config(**keys: object) -> Config:
    sizes = {"layers": L, "batch": B, "length": S, "vocab": V, "width": D, "mlp": F, "heads": N}
    schedule = {"steps": 20, "warmup_steps_fraction": 0.0}
    return tiny_config(**sizes, head_dim=h, **{**schedule, **keys})


def compiled(config: Config) -> jax.stages.Compiled:
    pytest.importorskip("qwix")
    with only_counted():
        return compiled_step(config)


@pytest.mark.full
@pytest.mark.parametrize("remat", ["none", "full"])
def test_int8_projections_run_in_int8_forwards_and_backwards(remat: str) -> None:
    c = config(quantization="int8", remat_policy=remat)
    count = executed_flops(compiled(c))
    again = remat == "full"  # all of a layer but its last matmul
    assert count.by_dtype["s8"] == L * (
        3 * PROJECTIONS + again * (PROJECTIONS - 2 * TOKENS * D * F)
    )
    assert count.by_dtype["f32"] == 3 * HEAD + L * (3 + again) * SCORES
    assert count.forward + count.backward == model_flops_per_device(c, "dense").training
    assert count.unaccounted == ()


@pytest.mark.full
@pytest.mark.parametrize("by_matmul", [False, True])
def test_experts_with_slots_run_in_int8(by_matmul: bool) -> None:
    c = config(
        slots_by_matmul=by_matmul,
        quantization="int8",
        num_experts=EXPERTS,
        num_experts_per_tok=2,
        moe_mlp_dim=F,
        capacity_factor=SLOTS / 8,
        decoder_block="mixtral",
    )
    count = executed_flops(compiled(c))
    attention, router = 2 * TOKENS * D * 4 * N * h, 2 * TOKENS * D * EXPERTS
    experts = 2 * B * EXPERTS * SLOTS * D * 3 * F
    # To the slots, whose matrix has no gradient, and back from them.
    moves = (2 + 3) * 2 * B * S * EXPERTS * SLOTS * D if by_matmul else 0
    eight_bit = count.by_dtype["s8"] + count.by_dtype.get("s32", 0)  # one-hot integers, on a CPU
    assert eight_bit == L * (3 * (attention + router + experts) + moves)
    assert count.total - L * moves == model_flops_per_device(c, "dense").training


@pytest.mark.parametrize(("recipe", "dtype"), [("int8", "int8"), ("fp8_full", "fp8")])
def test_the_models_flops_have_the_dtypes_that_they_run_in(recipe: str, dtype: str) -> None:
    c = config(quantization=recipe, dtype="bfloat16")
    found = counts.analytic_model(c, convention="dense").flops_by_dtype
    assert found == {dtype: 3 * L * PROJECTIONS, "bfloat16": 3 * (HEAD + L * SCORES)}


def test_utilisation_is_over_the_peak_of_each_dtype() -> None:
    c = config(quantization="int8", dtype="bfloat16")
    model = counts.analytic_model(c, convention="dense")
    peaks = find_peaks(jax.devices()[0], model.flops_by_dtype, hardware_name="v5p")
    # TPU v5p (hardware.yml): 918 TOP/s in int8, 459 TFLOP/s in bf16.
    seconds = 3 * L * PROJECTIONS / 918e12 + 3 * (HEAD + L * SCORES) / 459e12
    assert peaks.optimal_seconds(model.per_device, model.flops_by_dtype) == pytest.approx(seconds)


def losses(c: Config, steps: int, devices: int = 1) -> list[float]:
    """Of a batch that is learned by heart."""
    grid = mesh.make_mesh(c, jax.devices()[:devices])
    run = step.compile_train_step(c, grid, state.abstract_state(c, grid))
    now, tokens = (
        state.create_state(c, grid),
        jax.random.randint(jax.random.key(0), (1, B, S), 1, V),
    )
    places = jnp.broadcast_to(jnp.arange(S), tokens.shape)
    ones = jnp.ones_like(tokens)
    batch = {
        "inputs": tokens,
        "targets": jnp.roll(tokens, -1, axis=-1),
        "inputs_position": places,
        "inputs_segmentation": ones,
        "targets_weight": ones,
    }
    found = []
    for _ in range(steps):
        now, metrics = run(now, jax.device_put(batch, mesh.batch_sharding(grid)))
        found.append(float(metrics["loss"]))
    return found


@pytest.mark.full
def test_a_quantised_model_learns_as_the_plain_one() -> None:
    pytest.importorskip("qwix")
    plain, narrow = losses(config(), 12), losses(config(quantization="fp8_full"), 12)
    assert narrow[0] != plain[0]  # it is quantised
    assert narrow[0] == pytest.approx(plain[0], rel=0.02)
    fallen = plain[0] - plain[-1]
    assert fallen > 0.5
    assert narrow[0] - narrow[-1] > 0.8 * fallen


# Experts whose shards are gathered in eight bits: a fixed range rounds them alike.
GATHERED = {
    "decoder_block": "mixtral",
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_mlp_dim": F,
    "weight_quantization_calibration_method": "fixed,-2,2",
    "shard_exp_on_fsdp": True,
}


@pytest.mark.full
@pytest.mark.parametrize(
    ("experts", "first"),
    [({}, "fsdp"), (GATHERED, "fsdp"), (GATHERED, "fsdp_transpose")],
    ids=["dense", "experts", "experts in two parts"],
)
def test_scales_are_those_of_whole_rows_and_columns_on_a_mesh(
    experts: dict[str, object], first: str
) -> None:
    pytest.importorskip("qwix")
    alone = losses(config(quantization="fp8_full", **experts), 2)
    axes = {"data": 1, first: 2, "tensor": 2, "per_device_batch_size": B / 4}
    split = losses(config(quantization="fp8_full", **axes, **experts), 2, devices=4)
    assert split == pytest.approx(alone, rel=1e-3)


def test_without_qwix_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "qwix", None)
    with pytest.raises(UserError, match=r"(?s)quantization=int8 needs .*mfu-jax\[quantize\]"):
        state.make_model(config(quantization="int8"), 0)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"quantization": "int7"}, "int7"),
        ({"act_quantization_calibration_method": "fixed,-1,1"}, "without quantization"),
        ({"quantization": "fp8", "act_quantization_calibration_method": "fixed,1"}, "fixed,LOW"),
        ({"quantization": "fp8", "bwd_quantization_calibration_method": "minmax"}, "absmax"),
    ],
)
def test_wrong_recipes_are_refused(keys: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        config(**keys)
