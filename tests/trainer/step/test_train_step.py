"""Three counts, one truth: the trainer's compiled step against the analytic count and arithmetic.

`analytic` comes from mfu_jax.flops.analytic (config alone), `executed` from the optimised HLO of
the step that the trainer runs, `by_hand` from the dimensions below. All are ints, compared with ==.
"""

import contextlib
import functools
import itertools

import jax
import pytest

from mfu_jax.flops.analytic.parameters import count_parameters
from mfu_jax.flops.analytic.totals import calculate_tflops_per_device, model_flops_per_device
from mfu_jax.flops.executed.counting import executed_flops
from mfu_jax.flops.executed.result import ExecutedCount
from mfu_jax.trainer.config.pyconfig import Config
from mfu_jax.trainer.data.batches import make_iterator
from mfu_jax.trainer.step import mesh, state
from tests.support.compilation import only_counted
from tests.support.floats import assert_close_as_float32
from tests.support.tiny_step import compiled_step, tiny_config

L, B, S, V, D, F, N, h = 3, 2, 64, 256, 64, 192, 4, 16


def config(**keys: object) -> Config:
    sizes = {"layers": L, "batch": B, "length": S, "vocab": V, "width": D, "mlp": F, "heads": N}
    return tiny_config(**sizes, head_dim=h, **keys)


def executed(config: Config) -> ExecutedCount:
    with only_counted():
        return executed_flops(compiled_step(config))


@pytest.mark.full
def test_the_program_counted_is_the_program_run() -> None:
    c = config(remat_policy="full", gradient_accumulation_steps=4)
    texts = []
    for how in (only_counted(), contextlib.nullcontext()):
        with how:
            texts.append(compiled_step(c).as_text())
    assert texts[0] == texts[1]


def forward_by_hand(kv_heads: int) -> dict[str, int]:
    """2·m·n·k of every matmul of one micro-batch's forward pass."""
    tokens = B * S
    return {
        "qkv": L * 2 * tokens * D * (N + 2 * kv_heads) * h,
        "out": L * 2 * tokens * N * h * D,
        "attention": L * 2 * (2 * B * N * S * S * h),
        "mlp_in": L * 2 * (2 * tokens * D * F),
        "mlp_out": L * 2 * tokens * F * D,
        "head": 2 * tokens * D * V,
    }


@pytest.mark.full
@pytest.mark.parametrize(
    ("scan", "accumulation", "kv_heads", "tied"),
    list(itertools.product([True, False], [1, 4], [N, 2], [True, False])),
)
def test_without_remat_analytic_equals_executed(
    scan: bool, accumulation: int, kv_heads: int, tied: bool
) -> None:
    c = config(
        scan_layers=scan,
        gradient_accumulation_steps=accumulation,
        num_kv_heads=kv_heads,
        logits_via_embedding=tied,
    )
    by_hand = 3 * accumulation * sum(forward_by_hand(kv_heads).values())
    analytic = model_flops_per_device(c, "dense")
    count = executed(c)
    assert analytic.training == by_hand
    assert count.total == by_hand
    assert (count.forward, count.backward) == (by_hand // 3, by_hand // 3 * 2)
    assert count.unaccounted == ()


@pytest.mark.full
@pytest.mark.parametrize(
    ("policy", "scan", "accumulation", "kv_heads", "tied"),
    [
        *itertools.product(["minimal", "full"], [True, False], [1, 4], [2], [True]),
        *itertools.product(["minimal", "full"], [True], [1], [N], [False]),
    ],
)
def test_with_remat_executed_less_model_is_the_rematerialised_part(
    policy: str, scan: bool, accumulation: int, kv_heads: int, tied: bool
) -> None:
    c = config(
        remat_policy=policy,
        scan_layers=scan,
        gradient_accumulation_steps=accumulation,
        num_kv_heads=kv_heads,
        logits_via_embedding=tied,
    )
    forward = forward_by_hand(kv_heads)
    # full keeps a layer's input alone: all that the backward pass reads is made again, which is
    # every matmul but the block's last (nothing reads its result again). minimal keeps the results
    # of all matmuls with weights and repeats the two between activations: the scores for the
    # softmax's gradient, and the context, which the output projection's weight gradient reads.
    again = {
        "full": forward["qkv"] + forward["attention"] + forward["out"] + forward["mlp_in"],
        "minimal": forward["attention"],
    }
    count = executed(c)
    model = 3 * accumulation * sum(forward.values())
    assert count.total - model == count.rematerialized
    assert count.rematerialized == accumulation * again[policy]
    assert model_flops_per_device(c, "dense").training == model


@pytest.mark.full
def test_saving_names_repeats_what_was_not_saved() -> None:
    c = config(remat_policy="names", remat_save_names=["context", "query_proj", "key_proj"])
    forward = forward_by_hand(N)
    value = forward["qkv"] // 3
    # Saved: queries, keys, attention output. Made again: values, scores (the softmax is needed for
    # the gradients), output projection (for the MLP's input) and the MLP's first half.
    again = value + forward["attention"] // 2 + forward["out"] + forward["mlp_in"]
    assert executed(c).rematerialized == again


@pytest.mark.full
def test_a_layer_and_its_components_can_be_told_apart_by_scope() -> None:
    scopes = executed(config(scan_layers=False)).by_scope
    forward = forward_by_hand(N)
    for layer in range(L):
        mlp = sum(v for k, v in scopes.items() if f"layers_{layer}/mlp/" in k)
        assert mlp == 3 * (forward["mlp_in"] + forward["mlp_out"]) // L
    head = sum(v for k, v in scopes.items() if "logits_dense" in k)
    assert head == 3 * forward["head"]


def losses(config: Config, devices: int, steps: int = 3) -> list[float]:
    grid = mesh.make_mesh(config, jax.devices()[:devices])
    train_step = compiled_step(config, devices)
    train_state = state.create_state(config, grid)
    rows = mesh.micro_batch_size(config, grid.size)
    accumulation = config.gradient_accumulation_steps
    data = make_iterator(config, split="train", rows_per_process=rows, accumulation=accumulation)
    out = []
    for _ in range(steps):
        batch = jax.device_put(next(data), mesh.batch_sharding(grid))
        train_state, metrics = train_step(train_state, batch)
        out.append(float(metrics["loss"]))
    return out


@functools.cache
def losses_of_one_device() -> list[float]:
    """Eight rows a step, in one piece and scanned."""
    return losses(config(per_device_batch_size=8, num_kv_heads=2), 1)


@pytest.mark.full
def test_a_mesh_of_eight_gives_the_losses_of_one_device() -> None:
    eight = config(per_device_batch_size=1, data=2, fsdp=2, tensor=2, num_kv_heads=2)
    assert_close_as_float32(losses(eight, 8), losses_of_one_device(), terms=8 * S)


def test_per_device_flops_of_eight_devices_make_up_the_one_device_flops() -> None:
    one, eight = config(per_device_batch_size=8), config(per_device_batch_size=1)
    for convention in ("maxtext", "exact", "dense"):
        per_device = model_flops_per_device(eight, convention).training
        assert 8 * per_device == model_flops_per_device(one, convention).training
    assert 8 * calculate_tflops_per_device(eight).total == calculate_tflops_per_device(one).total


@pytest.mark.full
def test_accumulation_and_layer_loops_change_no_loss() -> None:
    parts = config(
        per_device_batch_size=2, gradient_accumulation_steps=4, scan_layers=False, num_kv_heads=2
    )
    assert_close_as_float32(losses(parts, 1), losses_of_one_device(), terms=8 * S)


@pytest.mark.full
def test_the_state_is_donated() -> None:
    c = config()
    with only_counted():
        text = compiled_step(c).as_text()
    arrays = len(jax.tree.leaves(state.abstract_state(c, mesh.make_mesh(c, jax.devices()[:1]))))
    assert text is not None
    assert (
        text.splitlines()[0].count("may-alias") + text.splitlines()[0].count("must-alias") == arrays
    )


@pytest.mark.parametrize("block", ["llama2", "gpt3"])
def test_parameters_are_those_of_the_written_out_model(block: str) -> None:
    plain = block == "gpt3"
    c = config(
        decoder_block=block,
        mlp_activations=("gelu",) if plain else ("silu", "linear"),
        use_bias=plain,
        num_kv_heads=2,
        logits_via_embedding=plain,
        trainable_position_size=S if plain else 0,
    )
    kv = 2 * h
    weights = D * N * h + 2 * D * kv + N * h * D + (2 if plain else 3) * D * F
    biases = (N * h + 2 * kv + D + F + D) if plain else 0
    norms = 2 * D * (2 if plain else 1)
    layers = L * (weights + biases + norms)
    # GPT: tied head and learned positions; llama: a head of its own.
    ends = V * D + D * (2 if plain else 1) + (S * D if plain else D * V)
    train_state = state.abstract_state(c, mesh.make_mesh(c, jax.devices()[:1]))
    assert state.parameter_count(train_state) == layers + ends
    assert count_parameters(c).total == layers + ends
