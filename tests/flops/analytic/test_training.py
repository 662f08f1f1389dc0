"""Frozen weights, LoRA and DPO against the traced count of a JAX model trained that way."""

from __future__ import annotations

from functools import partial

import jax.numpy as jnp
import pytest

from mfu_jax.errors import UserError
from mfu_jax.flops.analytic.model_configs.model import ModelConfig
from mfu_jax.flops.analytic.totals import (
    calculate_tokens_per_device,
    flops_breakdown,
    model_flops_per_device,
)
from tests.support import architecture_models as models
from tests.support import architecture_parts as parts

CONFIG = ModelConfig.from_mapping(
    {
        "vocab_size": 23,
        "num_decoder_layers": 3,
        "emb_dim": 12,
        "num_query_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 5,
        "mlp_dim": 17,
        "per_device_batch_size": 2,
        "max_target_length": 9,
    }
)


def with_adapters(s, w, tokens, *, targets, rank):
    """The llama of the references, with ``x @ A @ B`` beside each target."""

    def adapted(x, name, component, outputs):
        base = x @ w(f"{name}", x.shape[-1], outputs)
        if component not in targets:
            return base
        down = x @ w(f"{name}/lora_a", x.shape[-1], rank)
        return base + down @ w(f"{name}/lora_b", rank, outputs)

    def block(x, i):
        y = parts.rms(x, w(f"{i}/n0", s.emb_dim))
        heads = {"q_proj": s.num_query_heads, "k_proj": s.num_kv_heads, "v_proj": s.num_kv_heads}
        q, k, v = (
            adapted(y, f"{i}/{name}", name, count * s.head_dim).reshape(*y.shape[:2], count, -1)
            for name, count in heads.items()
        )
        y = parts.softmax_attention(q, k, v, parts.causal(y.shape[1]))
        x = x + adapted(y.reshape(*y.shape[:2], -1), f"{i}/o_proj", "o_proj", s.emb_dim)
        y = parts.rms(x, w(f"{i}/n1", s.emb_dim))
        h = jnp.tanh(adapted(y, f"{i}/wi_0", "wi_0", s.mlp_dim))
        h = h * adapted(y, f"{i}/wi_1", "wi_1", s.mlp_dim)
        return x + adapted(h, f"{i}/wo", "wo", s.emb_dim)

    return models.decoder(s, w, tokens, block)


@pytest.mark.parametrize(
    "targets",
    [
        ("q_proj", "v_proj"),
        ("k_proj",),
        ("v_proj",),
        ("o_proj",),
        ("wi_0",),
        ("wo",),
        ("q_proj", "k_proj", "v_proj", "o_proj", "wi_0", "wi_1", "wo"),
    ],
)
def test_lora_equals_the_traced_count(targets):
    model = partial(with_adapters, targets=targets, rank=3)
    traced = models.trace_training(model, CONFIG, trained=lambda name: "lora" in name)
    ours = model_flops_per_device(CONFIG.replace(lora_rank=3, lora_targets=targets))
    assert ours.forward == traced.forward
    assert ours.training == traced.total


@pytest.mark.parametrize(
    ("frozen", "trained"),
    [
        (("tokens",), lambda name: name != "tokens"),
        (("layers",), lambda name: "/a/" not in name and "/m/" not in name),
        (("mlp",), lambda name: "/m/" not in name),
        (("attention", "tokens"), lambda name: "/a/" not in name and name != "tokens"),
        (
            ("wo", "q_proj", "tokens"),
            lambda name: name[1:] not in ("/m/2", "/a/q") and name != "tokens",
        ),
        (("tokens", "layers"), lambda name: name == "head"),
    ],
)
def test_frozen_weights_equal_the_traced_count(frozen, trained):
    def only_matmuls(name):
        return trained(name) and not name.endswith(("n0", "n1", "final_norm"))

    traced = models.trace_training(models.uniform, CONFIG, trained=only_matmuls)
    ours = model_flops_per_device(CONFIG.replace(frozen=frozen))
    assert ours.forward == traced.forward
    assert ours.training == traced.total


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
    assert scores == [2 * 2 * 3 * pairs * 4 * 5] * 2


def test_an_unknown_target_is_named():
    with pytest.raises(UserError, match="'q_proj'"):
        model_flops_per_device(CONFIG.replace(lora_rank=4, lora_targets=("qproj",)))
    with pytest.raises(UserError, match="lora_targets"):
        model_flops_per_device(CONFIG.replace(lora_rank=4))
    with pytest.raises(UserError, match="tokens"):
        model_flops_per_device(CONFIG.replace(frozen=("token",)))
