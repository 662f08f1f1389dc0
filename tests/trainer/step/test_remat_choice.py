"""``remat_policy=auto`` recomputes least of what fits."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils

from mfu_jax.errors import UserError
from mfu_jax.trainer.step import mesh, remat_choice, state
from tests.support.tiny_step import tiny_config

L, B, S, V, D, F, N, h = 4, 8, 128, 256, 64, 256, 4, 16
TOKENS, FLOAT = B * S, 4
MLP_IN = L * TOKENS * 2 * F * FLOAT
LOGITS = 2 * TOKENS * V * FLOAT


def config(**keys: Any) -> Any:
    sizes = {"layers": L, "batch": B, "length": S, "vocab": V, "width": D, "mlp": F, "heads": N}
    return tiny_config(**sizes, head_dim=h, **keys)


def saved(policy: str, **keys: Any) -> int:
    c = config(remat_policy=policy, **keys)
    return remat_choice.saved_bytes(c, mesh.make_mesh(c, jax.devices()[:1]), *state._split_model(c))


def test_a_policy_keeps_the_tensors_that_it_names() -> None:
    assert saved("minimal_with_context") - saved("save_dot_with_context_except_mlp") == MLP_IN
    # Beyond a layer's input: queries, keys, values, context, output projection.
    named = L * TOKENS * (4 * N * h + D) * FLOAT
    assert saved("save_dot_with_context_except_mlp") - saved("full") == named


@pytest.mark.parametrize("scan", [True, False])
def test_weights_are_not_among_what_is_kept(scan: bool) -> None:
    """With full recomputation: a layer's input, L times; embeddings and the last norm beside it."""
    one = TOKENS * D * FLOAT
    assert L * one <= saved("full", scan_layers=scan) < (L + 4) * one


@pytest.mark.parametrize("scan", [True, False])
def test_less_memory_means_more_recomputation(scan: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    c = config(remat_policy="auto", scan_layers=scan)
    grid = mesh.make_mesh(c, jax.devices()[:1])
    chosen = []
    for policy in ("none", "minimal_with_context", "save_dot_with_context_except_mlp", "full"):
        need = state.state_bytes_per_device(c) + LOGITS + saved(policy, scan_layers=scan)
        monkeypatch.setattr(state, "_memory_bytes", lambda _, need=need: 1.02 * need / 0.85)
        chosen.append(state.resolve_attention(c, grid).remat_policy)
    first = "minimal_with_context" if scan else "none"
    assert chosen == [first, "minimal_with_context", "save_dot_with_context_except_mlp", "full"]


def test_absent_devices_have_the_memory_of_their_chip() -> None:
    absent = [_Absent("NVIDIA H200")]
    assert state._memory_bytes(_Grid(absent)) == int(139.8 * 2**30)  # what CUDA reports of 141
    with pytest.raises(UserError, match="Unheard Of"):
        state._memory_bytes(_Grid([_Absent("Unheard Of 9000")]))


def test_processes_agree_on_the_least_memory_of_any(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each knows its own devices' memory only, and all must choose the same program."""
    kind = "NVIDIA H100 80GB HBM3"
    grid = _Grid([_Absent(kind), _Granted(kind, process_index=1)])
    asked = []

    def gathered(own: np.ndarray) -> np.ndarray:
        asked.append(own)
        return np.array([59 * 2**30, own])

    monkeypatch.setattr(multihost_utils, "process_allgather", gathered)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert state._memory_bytes(grid) == 59 * 2**30
    assert asked == [60 * 2**30]


@dataclasses.dataclass
class _Absent:
    device_kind: str
    platform: str = "cuda"
    process_index: int = 0

    def memory_stats(self) -> None:
        raise NotImplementedError


class _Grid:
    def __init__(self, devices: list[_Absent]) -> None:
        self.devices = self
        self.flat = devices


class _Granted(_Absent):
    def memory_stats(self) -> Any:
        return {"bytes_limit": 60 * 2**30}
