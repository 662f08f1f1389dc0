"""What the state takes, and the refusal of what cannot fit."""

import types
from typing import Any

import jax
import pytest

from mfu_jax.errors import UserError
from mfu_jax.trainer.config.pyconfig import load
from mfu_jax.trainer.step.mesh import make_mesh
from mfu_jax.trainer.step.state import abstract_state, check_memory, state_bytes_per_device

SIZES = ["configs/base.yml", "emb_dim=32", "mlp_dim=64", "num_decoder_layers=2"]


def device(limit: int | None) -> Any:
    statistics = None if limit is None else {"bytes_limit": limit}
    return types.SimpleNamespace(platform="gpu", memory_stats=lambda: statistics)


@pytest.mark.parametrize(
    "options", [["mu_dtype=bfloat16"], ["weight_dtype=bfloat16"], ["logits_via_embedding=false"]]
)
def test_state_and_gradients_take_the_bytes_of_their_arrays(options: list[str]) -> None:
    config = load([*SIZES, *options])
    state = abstract_state(config, make_mesh(config, jax.devices()[:1]))
    weights = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state.params))
    moments = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state.opt_state))
    counters = sum(
        leaf.dtype.itemsize for leaf in jax.tree.leaves(state.opt_state) if not leaf.ndim
    )
    gradients = weights
    assert state_bytes_per_device(config) == weights + moments - counters + gradients


def test_gradients_that_need_not_all_exist_at_once_are_left_out() -> None:
    with_norm = state_bytes_per_device(load(SIZES))
    without = state_bytes_per_device(load([*SIZES, "gradient_clipping_threshold=0"]))
    assert without * 4 == with_norm * 3
    narrow = state_bytes_per_device(load([*SIZES, "grad_dtype=bfloat16"]))
    assert narrow * 8 == with_norm * 7


def test_a_state_larger_than_the_device_is_refused_with_both_figures() -> None:
    config = load([*SIZES, "emb_dim=65536"])
    needed = state_bytes_per_device(config)
    check_memory(config, [device(needed)])
    check_memory(config, [device(None)])  # not known: nothing is refused
    with pytest.raises(UserError, match=r"[\d,]+ parameters do not fit") as error:
        check_memory(config, [device(2**30)])
    for words in (f"{needed / 2**30:,.1f} GiB", "1.0 GiB", "emb_dim=65536"):
        assert words in str(error.value)


def test_split_weights_count_once_over_their_devices() -> None:
    whole, half = load(SIZES), load([*SIZES, "fsdp=2"])
    assert state_bytes_per_device(half) * 2 == state_bytes_per_device(whole)
