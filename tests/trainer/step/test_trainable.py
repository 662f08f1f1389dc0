"""Adapters and frozen weights: analytic rule == traced == executed, and what a step changes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mfu_jax.errors import UserError
from mfu_jax.flops.executed.counting import executed_flops
from mfu_jax.instrumentation import counts
from mfu_jax.trainer.config import pyconfig
from mfu_jax.trainer.config.pyconfig import Config
from mfu_jax.trainer.step import mesh, state
from tests.support.compilation import only_counted
from tests.support.tiny_step import compiled_step, traced_flops

B, S = 2, 16
SIZES = {
    "num_decoder_layers": 3,
    "per_device_batch_size": B,
    "max_target_length": S,
    "vocab_size": 64,
    "emb_dim": 32,
    "mlp_dim": 48,
    "num_query_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "logits_via_embedding": False,
    "dataset_type": "synthetic",
    "attention": "dot_product",
    "warmup_steps_fraction": 0.0,
}
MLA = {
    "decoder_block": "deepseek",
    "attention_type": "mla",
    "num_kv_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}
EXPERTS = {
    "decoder_block": "mixtral",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_mlp_dim": 12,
    "scan_layers": False,
}


def config(**keys: Any) -> Config:
    return pyconfig.from_mapping({}, overrides={**SIZES, **keys})


@pytest.mark.full
@pytest.mark.parametrize(
    "keys",
    [
        {"lora_rank": 3},
        {"lora_rank": 3, "scan_layers": False, "lora_targets": ["k_proj"]},
        {"lora_rank": 2, "lora_targets": ["wo", "wi_0"], "logits_via_embedding": True},
        {"lora_rank": 2, "lora_targets": ["q_b", "kv_a", "o_proj"], **MLA},
        {"lora_rank": 2, "lora_targets": ["wo", "wi_1"], "capacity_factor": 1.0, **EXPERTS},
        {"frozen": ["mlp"]},
        {"frozen": ["tokens", "attention"]},
        {"frozen": ["tokens", "q_proj", "wo"]},
        {"frozen": ["tokens", "layers"]},
    ],
    ids=str,
)
def test_the_analytic_rule_is_what_runs(keys: dict[str, Any]) -> None:
    c = config(**keys)
    with only_counted():
        program = compiled_step(c)
    found = counts.count_program(program, counts.analytic_model(c, convention="dense"))
    assert found.executed.total == found.model.per_device == traced_flops(c)
    assert executed_flops(program).unaccounted == ()
    assert found.ledger.residual == 0


def after_one_step(c: Config) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], Any]:
    """Weights before and after, by path, and the optimizer's state."""
    grid = mesh.make_mesh(c, jax.devices()[:1])
    now = state.create_state(c, grid)
    before = by_path(now.params)
    tokens = jax.random.randint(jax.random.key(0), (1, B, S), 1, 64)
    ones = jnp.ones_like(tokens)
    batch = {
        "inputs": tokens,
        "targets": jnp.roll(tokens, -1, axis=-1),
        "inputs_position": jnp.broadcast_to(jnp.arange(S), tokens.shape),
        "inputs_segmentation": ones,
        "targets_weight": ones,
    }
    later, _ = compiled_step(c)(now, batch)
    return before, by_path(later.params), later.opt_state


def by_path(params: Any) -> dict[str, np.ndarray]:
    flat = nnx.to_flat_state(params)
    return {"/".join(map(str, path)): np.asarray(value.get_value()) for path, value in flat}


@pytest.mark.full
def test_only_adapters_move_and_only_they_have_moments() -> None:
    before, after, optimizer = after_one_step(config(lora_rank=3))
    moved = {path for path in before if (before[path] != after[path]).any()}
    adapters = {path for path in before if path.endswith(("lora_a", "lora_b"))}
    # a's gradient is 0 as long as b is 0: only weight decay moves it
    assert {path for path in adapters if path.endswith("lora_b")} <= moved <= adapters
    size = sum(before[path].size for path in adapters)
    # q: 32 → 3 → 4·8, v: 32 → 3 → 2·8, of three layers
    assert size == 3 * 3 * ((32 + 32) + (32 + 16))
    assert sum(leaf.size for leaf in jax.tree.leaves(optimizer) if leaf.ndim) == 2 * size


@pytest.mark.full
def test_frozen_weights_stay() -> None:
    before, after, _ = after_one_step(config(frozen=["attention", "tokens"]))
    moved = {path for path in before if (before[path] != after[path]).any()}
    expected = {path for path in before if path.endswith("kernel") and "mixer" not in path}
    assert moved == expected


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"frozen": ["atention"]}, "'attention'"),
        ({"lora_rank": 2, "lora_targets": ["qproj"]}, "'q_proj'"),
        ({"lora_rank": 2, "frozen": ["mlp"]}, "leave frozen out"),
        ({"frozen": ["tokens"], "logits_via_embedding": True}, "tied"),
    ],
)
def test_what_cannot_be_trained_is_refused(keys: dict[str, Any], message: str) -> None:
    def build() -> None:
        c = config(**keys)
        state.abstract_state(c, mesh.make_mesh(c, jax.devices()[:1]))

    with pytest.raises(UserError, match=message):
        build()
