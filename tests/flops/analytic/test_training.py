"""Frozen weights, LoRA and DPO against the traced count of the reference model."""

from __future__ import annotations

from typing import Any

import pytest

from mfu_jax.errors import UserError
from mfu_jax.flops.analytic.model_configs.model import ModelConfig
from mfu_jax.flops.analytic.totals import (
    calculate_tokens_per_device,
    flops_breakdown,
    model_flops_per_device,
)
from mfu_jax.flops.traced.counting import count_model_flops
from mfu_jax.trainer.config import pyconfig
from tests.support.jax_versions import has_nnx_list
from tests.support.tiny_models import gradient

SIZES = {
    "vocab_size": 23,
    "num_decoder_layers": 3,
    "emb_dim": 12,
    "num_query_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 6,
    "mlp_dim": 17,
    "per_device_batch_size": 2,
    "max_target_length": 9,
}
CONFIG = ModelConfig.from_mapping(SIZES)
EVERY = ["q_proj", "k_proj", "v_proj", "o_proj", "wi_0", "wi_1", "wo"]


@pytest.mark.full(
    keep=[
        "{'frozen': ['mlp']}",
        "{'frozen': ['attention', 'tokens']}",
        "{'lora_rank': 3, 'lora_targets': ['o_proj']}",
        "{'frozen': ['layers']}",
        "{'frozen': ['wo', 'q_proj', 'tokens']}",
    ]
)
@has_nnx_list
@pytest.mark.parametrize(
    "keys",
    [
        *({"lora_rank": 3, "lora_targets": names} for names in (["v_proj"], ["o_proj"], EVERY)),
        *({"frozen": names} for names in (["layers"], ["mlp"], ["attention", "tokens"])),
        {"frozen": ["wo", "q_proj", "tokens"]},
    ],
    ids=str,
)
def test_what_is_trained_equals_the_traced_count(keys: dict[str, Any]) -> None:
    options = {"logits_via_embedding": False, "attention": "dot_product"}
    config = pyconfig.from_mapping({}, overrides={**SIZES, **options, **keys})
    step, arguments = gradient(config)
    traced = count_model_flops(step, *arguments)
    ours = model_flops_per_device(CONFIG.replace(**keys))
    assert (ours.forward, ours.training) == (traced.forward, traced.total)


def test_dpo_runs_pairs_through_policy_and_reference():
    # chosen and rejected: 2 × the sequences; policy 3 ×, reference 1 × the forward
    pairs = CONFIG.replace(use_dpo=True)
    plain, dpo = model_flops_per_device(CONFIG), model_flops_per_device(pairs)
    assert dpo.training * 3 == plain.training * 2 * 4
    assert calculate_tokens_per_device(pairs) == 2 * 2 * 9


def test_capacity_factor_counts_slots_filled_or_not():
    sparse = CONFIG.replace(num_experts=4, num_experts_per_tok=2, moe_mlp_dim=8, mlp_dim=0)
    rows, padded = (
        {row.component: row.forward_flops for row in flops_breakdown(config)}
        for config in (sparse, sparse.replace(capacity_factor=1.25))
    )
    assert padded["moe/experts/wi_0"] * 4 == rows["moe/experts/wi_0"] * 5
    assert padded["moe/router"] == rows["moe/router"]


def test_packed_documents_see_only_themselves():
    rows = flops_breakdown(CONFIG.replace(packed_document_lengths=(4, 3, 2)), "exact")
    pairs = sum(1 for n in (4, 3, 2) for q in range(n) for k in range(n) if k <= q)
    scores = [row.forward_flops for row in rows if row.kind == "attention"]
    assert scores == [2 * 2 * 3 * pairs * 4 * 6] * 2


def test_an_unknown_target_is_named():
    with pytest.raises(UserError, match="'q_proj'"):
        model_flops_per_device(CONFIG.replace(lora_rank=4, lora_targets=("qproj",)))
    with pytest.raises(UserError, match="lora_targets"):
        model_flops_per_device(CONFIG.replace(lora_rank=4))
    with pytest.raises(UserError, match="tokens"):
        model_flops_per_device(CONFIG.replace(frozen=("token",)))
