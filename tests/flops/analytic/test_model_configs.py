"""`ModelConfig`: groups inside, MaxText's flat names at the door."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest

from mfu_jax.errors import UserError
from mfu_jax.flops.analytic.inputs import override_keys
from mfu_jax.flops.analytic.model_configs.group import Group
from mfu_jax.flops.analytic.model_configs.model import MAXTEXT_FIELDS, ModelConfig

CONFIG = ModelConfig(vocab_size=10, num_decoder_layers=2, emb_dim=4)


def test_a_flat_name_belongs_to_one_group() -> None:
    groups = [CONFIG, *(v for v in vars(CONFIG).values() if isinstance(v, Group))]
    names = Counter(
        field.name
        for group in groups
        for field in dataclasses.fields(group)
        if not isinstance(getattr(group, field.name), Group)
    )
    assert max(names.values()) == 1
    assert set(names) == set(CONFIG.flat())


def test_flat_names_lead_to_their_groups_and_back() -> None:
    changed = CONFIG.replace(num_experts=8, max_target_length=64, model_name="mine")
    assert (changed.experts.num_experts, changed.step.max_target_length) == (8, 64)
    assert (changed.model_name, changed.value("num_experts")) == ("mine", 8)
    assert ModelConfig.from_mapping(changed.flat()) == changed
    assert changed.attention is CONFIG.attention


def test_what_only_a_config_json_sets_is_not_an_override() -> None:
    assert {"num_experts", "sliding_window_size", "vocab_size"} <= set(override_keys())
    assert {"layer_types", "qk_norm", "mamba_inner"}.isdisjoint(MAXTEXT_FIELDS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": -1}, "vocab_size=-1: expected a positive number"),
        ({"num_decoder_layers": 200_000}, "num_decoder_layers=200000: expected at most"),
        ({"num_experts_per_tok": 3, "num_experts": 2}, "num_experts_per_tok=3 contradicts"),
        ({"first_num_dense_layers": 3}, "first_num_dense_layers=3 contradicts"),
        ({"num_query_heads": 3, "num_kv_heads": 2}, "num_query_heads=3 is not a multiple"),
        ({"packed_document_lengths": [9, 9], "max_target_length": 16}, "sum to 18"),
        ({"image_size_for_vit": [8, 8, 3]}, "height and width"),
        ({"num_exprts": 3}, "unknown key 'num_exprts'; did you mean 'num_experts'"),
        ({"mlp_dim": 2**51}, "mlp_dim=2251799813685248: expected a number from 0"),
    ],
)
def test_contradictions_are_errors_within_and_across_groups(
    changes: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        CONFIG.replace(**changes)
