"""DPO: FLOPs of the analytic rule == traced == executed, the loss by hand, and pairs from rows."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mfu_jax.errors import UserError
from mfu_jax.flops.traced.counting import count_model_flops
from mfu_jax.instrumentation import counts
from mfu_jax.trainer.config import pyconfig
from mfu_jax.trainer.data.batches import make_iterator
from mfu_jax.trainer.data.preferences import preference_loss, preference_pair
from mfu_jax.trainer.step import mesh, state
from tests.support import tiny_models
from tests.support.compilation import only_counted
from tests.support.tiny_step import compiled_step, tiny_config, traced_flops

B, S, V, D, F, L, N, h = 2, 16, 64, 32, 48, 2, 4, 8


def config(**keys: Any) -> pyconfig.Config:
    sizes = {"layers": L, "batch": B, "length": S, "vocab": V, "width": D, "mlp": F, "heads": N}
    return tiny_config(
        **sizes, head_dim=h, **{"warmup_steps_fraction": 0.0, "use_dpo": True, **keys}
    )


@pytest.mark.full
@pytest.mark.parametrize("keys", [{}, {"gradient_accumulation_steps": 2}, {"lora_rank": 3}])
def test_pairs_run_through_policy_and_reference(keys: dict[str, Any]) -> None:
    c = config(**keys)
    with only_counted():
        program = compiled_step(c)
    found = counts.count_program(program, counts.analytic_model(c, convention="dense"))
    assert found.executed.total == found.model.per_device == traced_flops(c)
    assert found.ledger.residual == 0
    if keys == {}:
        # 2 sequences a pair; forward and backward of the policy, forward of the reference
        layer = 2 * S * D * (4 * N * h + 3 * F) + 2 * (2 * N * S * S * h)
        assert found.executed.total == (3 + 1) * 2 * B * (L * layer + 2 * S * D * V)


@pytest.mark.full
def test_the_loss_is_equation_7() -> None:
    # One token to predict, of two: the policy gives the chosen one 3/4, the rejected one 1/4.
    even, policy = [[[0.0, 0.0]]] * 2, [[[math.log(3), 0.0]]] * 2
    batch = {
        "inputs": jnp.zeros((2, 1), jnp.int32),
        "inputs_position": jnp.zeros((2, 1), jnp.int32),
        "inputs_segmentation": jnp.ones((2, 1), jnp.int32),
        "targets": jnp.array([[0], [1]]),
        "targets_weight": jnp.ones((2, 1), jnp.int32),
    }
    c = config(dpo_beta=0.5, dpo_label_smoothing=0.25)
    losses, shown = preference_loss(jnp.asarray(policy), jnp.asarray(even), batch, c)
    margin = 0.5 * (math.log(0.75 / 0.5) - math.log(0.25 / 0.5))
    right, wrong = math.log(1 + math.exp(-margin)), math.log(1 + math.exp(margin))
    assert losses.tolist() == pytest.approx([0.75 * right + 0.25 * wrong])
    assert float(shown["dpo_reward_margin"]) == pytest.approx(margin)
    assert float(shown["dpo_reward_accuracy"]) == 1


def test_a_pair_shares_its_prompt_and_its_tokens() -> None:
    row = np.random.default_rng(0).integers(1, 99, S + 1)
    pair = preference_pair(row)
    assert (pair["inputs"][0] == row[:-1]).all()
    assert (pair["inputs"][0, : S // 2] == pair["inputs"][1, : S // 2]).all()
    assert sorted(pair["targets"][0]) == sorted(pair["targets"][1])
    assert (pair["targets"][0] != pair["targets"][1]).any()
    assert pair["targets_weight"].sum(axis=1).tolist() == [S + 1 - S // 2] * 2


@pytest.mark.full
def test_the_policy_learns_what_is_chosen_and_the_reference_stays() -> None:
    c = config(dpo_beta=1.0, learning_rate=1e-2)
    grid = mesh.make_mesh(c, jax.devices()[:1])
    run, now = compiled_step(c), state.create_state(c, grid)
    first = [np.asarray(leaf) for leaf in jax.tree.leaves(now.reference)]
    rows = mesh.rows_per_process(c, grid)
    assert rows == 2 * B
    batch = next(make_iterator(c, split="train", rows_per_process=rows, accumulation=1))
    assert batch["inputs"].shape == (1, 2 * B, S)
    seen = []
    for _ in range(8):
        now, metrics = run(now, mesh.put_batch(batch, grid))
        seen.append({name: float(value) for name, value in metrics.items()})
    assert seen[0]["loss"] == pytest.approx(math.log(2))  # policy and reference are the same
    assert seen[0]["total_weights"] == B
    assert seen[-1]["loss"] < 0.1
    assert seen[-1]["dpo_reward_accuracy"] == 1
    last = [np.asarray(leaf) for leaf in jax.tree.leaves(now.reference)]
    assert all((a == b).all() for a, b in zip(first, last, strict=True))


def test_what_dpo_does_not_train_is_refused() -> None:
    with pytest.raises(UserError, match="mtp_num_layers=1"):
        config(mtp_num_layers=1)


@pytest.mark.full
def test_experts_of_the_policy_have_their_loss_and_their_biases() -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_mlp_dim": 8, "vocab_size": 32}
    c = config(decoder_block="mixtral", load_balance_loss_weight=0.5, **experts)
    gradient, (params, batch) = tiny_models.gradient(c)
    traced = count_model_flops(gradient, params, batch)
    assert traced.total == tiny_models.analytic(c)
    (_, parts), _ = jax.eval_shape(gradient, params, batch)
    assert set(parts.further) == {"moe_lb_loss"}
    assert set(parts.shown) == {"dpo_reward_margin", "dpo_reward_accuracy"}
