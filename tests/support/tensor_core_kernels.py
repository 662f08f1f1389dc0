"""Small Pallas kernels for GPUs, compiled by Mosaic: three blocks of two warp groups."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tests.support.jax_versions import VERSION

GROUPS, BLOCKS, TILE = 2, 3, 64
ONE = 2 * TILE**3  # FLOPs of a whole product of two tiles

Body = Callable[[Any, Any, Any], None]


def kernel(body: Callable[..., None], results: tuple[tuple[int, ...], ...] = ()) -> Any:
    """A kernel in which `body` gets an accumulator and two tiles, 64 × 64 each.

    With `results`, which it leaves as they are, `body` gets all references after them.
    """

    def whole(*refs: Any) -> None:
        def with_operands(a: Any, b: Any) -> None:
            def with_accumulator(acc: Any) -> jax.Array:
                body(acc, a, b, *(refs if results else ()))
                return acc[...]  # type: ignore[no-any-return]

            tile = pl.run_scoped(with_accumulator, plgpu.ACC((TILE, TILE), jnp.float32))
            if not results:
                refs[-1][...] = tile

        tiles = plgpu.TilingTransform((8, TILE)), plgpu.SwizzleTransform(128)
        operand = plgpu.SMEM((TILE, TILE), jnp.float16, transforms=tiles)
        pl.run_scoped(with_operands, operand, operand, collective_axes="wg")

    options: dict[str, Any] = {"grid": (BLOCKS,), "grid_names": ("block",)}
    options |= {"num_threads": GROUPS, "thread_name": "wg"}
    out = "out_type" if VERSION >= (0, 10) else "out_shape"
    shapes = [jax.ShapeDtypeStruct(dims, jnp.float16) for dims in results]
    options[out] = shapes or jax.ShapeDtypeStruct((TILE, TILE), jnp.float32)
    return plgpu.kernel(whole, **options)  # type: ignore[no-any-return]


def multiply(acc: Any, a: Any, b: Any) -> None:
    """One product of all tiles."""
    plgpu.wgmma(acc, a, b)
    plgpu.wgmma_wait(0)


def second_group(acc: Any, a: Any, b: Any) -> None:
    """Only the second warp group multiplies."""
    pl.when(lax.axis_index("wg") == 1)(lambda: multiply(acc, a, b))


def by_block(acc: Any, a: Any, b: Any, *_: Any) -> None:
    """The blocks multiply once, three and five times."""

    def step(_: Any, carry: Any) -> Any:
        multiply(acc, a, b)
        return carry

    lax.fori_loop(0, 2 * lax.axis_index("block") + 1, step, 0)


# Bodies, and how many whole products all of their warp groups run.
BODIES: dict[str, tuple[Body, int]] = {
    "multiply": (multiply, BLOCKS * GROUPS),
    "second_group": (second_group, BLOCKS),
    "by_block": (by_block, (1 + 3 + 5) * GROUPS),
}


def hlo_of(function: Callable[[], jax.Array]) -> str:
    """The custom call of a kernel, lowered for CUDA by this version of JAX, as HLO text."""
    text = jax.jit(function).trace().lower(lowering_platforms=("cuda",)).as_text()
    match = re.search(r'mhlo\.backend_config = \{.*?\b(module = "[^"]*")', text)
    assert match
    call = 'custom-call(), custom_call_target="mosaic_gpu_v2", api_version=API_VERSION_TYPED_FFI'
    return f"""HloModule kernel
ENTRY main {{
  ROOT wgmma.1 = f32[64,64] {call}, backend_config={{{match[1]}}}
}}"""
