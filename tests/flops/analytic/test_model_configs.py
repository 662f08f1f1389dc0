"""`ModelConfig`: groups inside, MaxText's flat names at the door."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections import Counter

import pytest

from mfu_jax.errors import UserError
from mfu_jax.flops.analytic.inputs.maxtext_keys import override_keys
from mfu_jax.flops.analytic.inputs.overrides import load_model_config
from mfu_jax.flops.analytic.model_configs.group import FieldGroup
from mfu_jax.flops.analytic.model_configs.model import MAXTEXT_FIELDS, ModelConfig

CONFIG = ModelConfig(vocab_size=10, num_decoder_layers=2, emb_dim=4)


def test_a_flat_name_belongs_to_one_group() -> None:
    groups = [CONFIG, *(v for v in vars(CONFIG).values() if isinstance(v, FieldGroup))]
    names = Counter(
        field.name
        for group in groups
        for field in dataclasses.fields(group)
        if not isinstance(getattr(group, field.name), FieldGroup)
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
        ({"attention_type": "locl_sliding"}, "(?s)expected .*did you mean 'local_sliding'"),
        ({"packed_document_lengths": [9, 9], "max_target_length": 16}, "sum to 18"),
        ({"packed_document_lengths": [-5, 16]}, "expected no negative number"),
        ({"image_size_for_vit": [8, 8, 3]}, "height and width"),
        ({"num_exprts": 3}, "unknown key 'num_exprts'\nhint: did you mean 'num_experts'"),
        ({"mlp_dim": 2**51}, "mlp_dim=2251799813685248: expected a number from 0"),
    ],
)
def test_contradictions_are_errors_within_and_across_groups(
    changes: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        CONFIG.replace(**changes)


def test_equal_configs_are_equal_and_hash_alike_also_as_copies() -> None:
    config = load_model_config("llama3-8b")
    for same in (load_model_config("llama3-8b"), copy.deepcopy(config), config.replace()):
        assert same == config
        assert hash(same) == hash(config)
    assert pickle.loads(pickle.dumps(config)) == config


@pytest.mark.parametrize("change", [{"emb_dim": 64}, {"head_dim": 8}, {"max_target_length": 9}])
def test_a_field_of_any_group_makes_another_config(change: dict[str, int]) -> None:
    config = load_model_config("llama3-8b")
    assert config.replace(**change) != config
    assert config.replace(**change) == config.replace(**change)


def test_groups_of_different_kinds_are_never_equal() -> None:
    config = load_model_config("llama3-8b")
    assert config.attention != config.experts
    assert config.attention != vars(config.attention)


def test_no_field_can_be_assigned() -> None:
    config = load_model_config("llama3-8b")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.emb_dim = 1  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.attention.head_dim = 1  # type: ignore[misc]


def test_a_config_shows_what_differs_from_the_defaults() -> None:
    config = ModelConfig.from_mapping(
        {"vocab_size": 10, "num_decoder_layers": 2, "emb_dim": 4, "head_dim": 8}
    )
    assert repr(config) == (
        "ModelConfig(vocab_size=10, num_decoder_layers=2, emb_dim=4, "
        "attention=AttentionConfig(head_dim=8))"
    )
