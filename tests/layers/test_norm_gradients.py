"""Gradients that are whole before a norm's backward pass: where, and the same numbers."""

from __future__ import annotations

from typing import Any

import jax
import pytest

from mfu_jax.errors import UserError
from mfu_jax.trainer.config import pyconfig
from mfu_jax.trainer.planned import planned_step
from tests.campaigns.meshes import STEPS_OF_A_TEST, TOKENS, trained
from tests.support.floats import assert_close_as_float32
from tests.support.platforms import resolved_on

SIZES = (
    "emb_dim=64 mlp_dim=128 num_decoder_layers=3 attention=dot_product per_device_batch_size=1"
).split()


def barriers(*keys: str) -> int:
    text: str = planned_step.lower([*SIZES, *keys], jax.devices()[:1]).as_text()
    return text.count("optimization_barrier")


@pytest.mark.full
@pytest.mark.parametrize(
    ("keys", "more"),
    [
        ([], 2),  # one body for all layers, with two norms
        (["scan_layers=false"], 3 * 2),
        # two pairs of layers, whose four norms behind the parts have none
        (["decoder_block=gemma2", "num_decoder_layers=2", "scan_layers=false"], 2 * 2 * 2),
    ],
)
def test_one_barrier_per_norm_before_a_part(keys: list[str], more: int) -> None:
    assert barriers("norm_gradients=whole", *keys) - barriers("norm_gradients=fused", *keys) == more


@pytest.mark.full
def test_whole_gradients_change_no_loss_and_no_flop() -> None:
    ways = [
        trained({"remat_policy": "full", "norm_gradients": how}, 1) for how in ("whole", "fused")
    ]
    (whole, flops), (fused, of_fused) = ways
    assert_close_as_float32(whole, fused, terms=STEPS_OF_A_TEST * TOKENS)
    assert flops.executed.total == of_fused.executed.total
    assert flops.ledger.residual == 0


@pytest.mark.parametrize(
    ("platform", "experts", "given", "how"),
    [
        ("tpu", 1, "auto", "whole"),
        ("tpu", 8, "auto", "fused"),
        ("tpu", 8, "whole", "whole"),
        ("tpu", 1, "fused", "fused"),
        ("cuda", 1, "auto", "fused"),
        ("cpu", 1, "auto", "fused"),
        ("cpu", 1, "whole", "whole"),
    ],
)
def test_auto_is_whole_on_tpus_without_experts(
    platform: str, experts: int, given: str, how: str
) -> None:
    keys: dict[str, Any] = {"norm_gradients": given}
    if experts > 1:
        keys |= {"decoder_block": "mixtral", "num_experts": experts, "num_experts_per_tok": 2}
        keys |= {"moe_mlp_dim": 64}
    assert resolved_on(platform, keys).norm_gradients == how


def test_auto_is_fused_on_tpu7x() -> None:
    """XLA's cycles of Llama 3 70B on 64 chips: 12.77 · 10⁹ fused, 12.82 whole."""
    assert resolved_on("tpu", {}, "TPU7x").norm_gradients == "fused"


def test_another_word_is_an_error() -> None:
    with pytest.raises(UserError, match="norm_gradients"):
        pyconfig.from_mapping({}, overrides={"norm_gradients": "never"})
