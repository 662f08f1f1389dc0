"""TransformerEngine's kernels, executed and traced; expected counts are pairs counted one by one.

The call's attributes are those of a recorded program; the primitive is a stand-in with the same
name, operands and `config` as transformer_engine/jax/cpp_extensions/attention.py has at 2.x.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Primitive

from mfu_jax.flops.executed.counting import executed_flops
from mfu_jax.flops.executed.result import ExecutedCount
from mfu_jax.flops.traced.counting import count_model_flops

B, T, S, N, K, H, V = 2, 6, 8, 4, 2, 16, 8
NO_MASK, PADDING, CAUSAL, FROM_BOTTOM_RIGHT = 0, 1, 2, 4


def pairs(keep: Any, queries: int = T, keys: int = S) -> int:
    return sum(keep(i, j) for i in range(queries) for j in range(keys))


def executed(mask: int, window: tuple[int, int] = (-1, -1), *, backward: bool = False) -> Any:
    sizes = {
        "attn_heads": N, "input_batch": B, "kv_max_seqlen": S, "mask_type": mask,
        "max_segments_per_seq": 1, "num_gqa_groups": K, "q_max_seqlen": T, "qk_head_dim": H,
        "qkv_layout": 9, "v_head_dim": V, "window_size_left": window[0],
        "window_size_right": window[1],
    }  # fmt: skip
    attributes = ", ".join(f"{name} = {value} : i64" for name, value in sizes.items())
    target = f"te_fused_attn_{'backward' if backward else 'forward'}_ffi"
    return executed_flops(f"""HloModule jit_f

ENTRY %main (q: bf16[{B},{T},{N},{H}], k: bf16[{B},{S},{K},{H}], v: bf16[{B},{S},{K},{V}]) -> bf16[{B},{T},{N},{V}] {{
  %q = bf16[{B},{T},{N},{H}] parameter(0)
  %k = bf16[{B},{S},{K},{H}] parameter(1)
  %v = bf16[{B},{S},{K},{V}] parameter(2)
  ROOT %call = bf16[{B},{T},{N},{V}] custom-call(%q, %k, %v), custom_call_target="{target}", api_version=API_VERSION_TYPED_FFI, backend_config={{{attributes}, is_training = true, scaling_factor = 1.0 : f64}}
}}
""")  # noqa: E501


MASKS = {
    "none": (NO_MASK, (-1, -1), lambda i, j: True),
    "causal": (CAUSAL, (-1, -1), lambda i, j: j <= i),
    "window": (CAUSAL, (2, 0), lambda i, j: i - 2 <= j <= i),
    "both sides": (NO_MASK, (1, 2), lambda i, j: i - 1 <= j <= i + 2),
    "bottom right": (FROM_BOTTOM_RIGHT, (-1, -1), lambda i, j: j <= i + S - T),
}


@pytest.mark.parametrize("name", MASKS)
def test_executed_attention(name: str) -> None:
    mask, window, keep = MASKS[name]
    product = 2 * B * N * pairs(keep)
    forward = executed(mask, window)
    assert forward.total == product * (H + V)
    backward = executed(mask, window, backward=True)
    assert backward.total == product * (3 * H + 2 * V)  # S, dQ, dK; dP, dV
    assert backward.rematerialized == product * H
    assert not forward.unaccounted
    assert not backward.unaccounted


def test_padded_sequences_are_counted_whole_and_said_to_be() -> None:
    count = executed(PADDING)
    assert count.total == 2 * B * N * T * S * (H + V)
    assert any("sequence lengths are data" in str(flag) for flag in count.flags)


def gemm(extra: str, out: str) -> ExecutedCount:
    return executed_flops(f"""HloModule jit_f

ENTRY %main (a: bf16[6,4,10], s: f32[0], b: bf16[10,14]) -> {out} {{
  %a = bf16[6,4,10] parameter(0)
  %s = f32[0] parameter(1)
  %b = bf16[10,14] parameter(2)
  ROOT %call = {out} custom-call(%a, %s, %b, %s, %s), custom_call_target="te_gemm_v2_ffi", api_version=API_VERSION_TYPED_FFI, backend_config={{config = {{{extra}}}}}
}}
""")  # noqa: E501


def test_matmuls() -> None:
    assert gemm("collective_op = 0 : i64", "bf16[6,4,14]").total == 2 * 24 * 10 * 14
    for extra, out in (
        ("collective_op = 1 : i64", "bf16[24,4,14]"),  # gathers its rows from four devices
        ("collective_op = 0 : i64", "bf16[6,4,13]"),
    ):
        count = gemm(extra, out)
        assert count.total == 0
        assert count.unaccounted


class Mask(Enum):
    NO_MASK = 0
    CAUSAL_MASK = 2
    CAUSAL_BOTTOM_RIGHT_MASK = 4


class Layout(Enum):
    BS3HD = 5
    BSHD_BS2HD = 7
    BSHD_BSHD_BSHD = 9


class Config(NamedTuple):
    attn_mask_type: Mask
    qkv_layout: Layout
    window_size: tuple[int, int]


forward = Primitive("te_fused_attn_forward_ffi_wrapper")


@forward.def_abstract_eval
def _(q: Any, k: Any, v: Any, *, config: Any) -> Any:
    batch, length = q.shape[:2]
    return jax.core.ShapedArray((batch, length, N, v.shape[-1] if v.ndim > 1 else H), q.dtype)


@pytest.mark.parametrize(
    ("layout", "shapes", "keys", "width"),
    [
        ("BSHD_BSHD_BSHD", [(B, T, N, H), (B, S, K, H), (B, S, K, V)], S, V),
        ("BSHD_BS2HD", [(B, T, N, H), (B, S, 2, K, H), (0,)], S, H),
        ("BS3HD", [(B, T, 3, N, H), (0,), (0,)], T, H),
    ],
)
@pytest.mark.parametrize("name", ["none", "causal", "window", "bottom right"])
def test_traced_attention(
    name: str, layout: str, shapes: list[tuple[int, ...]], keys: int, width: int
) -> None:
    mask, window, _ = MASKS[name]
    shift = keys - T if name == "bottom right" else 0
    kept = {
        "none": lambda i, j: True,
        "window": lambda i, j: i - 2 <= j <= i,
    }.get(name, lambda i, j: j <= i + shift)
    config = Config(Mask(mask), Layout[layout], window)

    def attend(*arrays: jax.Array) -> jax.Array:
        return forward.bind(*arrays, config=config)

    arrays = [jnp.zeros(shape, jnp.bfloat16) for shape in shapes]
    count = count_model_flops(attend, *arrays)
    assert count.total_in("exact") == 2 * B * N * pairs(kept, keys=keys) * (H + width)
    assert not count.unaccounted
