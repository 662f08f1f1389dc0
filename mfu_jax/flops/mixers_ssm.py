"""Token mixers that only Hugging Face models have: Mamba-1, gated convolutions.

Shapes as in `matmuls`: T tokens, S sequence length, D model width; I inner channels, N state.
"""

from __future__ import annotations

from mfu_jax.flops.components import Cache, Component
from mfu_jax.flops.matmuls import Components, norm, projection, short_convolution, vector


def mamba(
    width: int,
    *,
    inner: int,
    state: int,
    rank: int,
    kernel: int,
    bias: bool = False,
    conv_bias: bool = True,
    inner_norms: bool = False,
    name: str = "mamba",
) -> Components:
    """A Mamba-1 layer (arXiv 2312.00752) with a time step of rank R.

    ``in [D, 2·I]``, a depthwise convolution over I channels, ``x [I, R + 2·N]``, ``dt [R, I]``,
    ``out [I, D]``. The recurrence updates the state elementwise, without a sum, and reads it (h·C):
    I·N multiply-adds a token.

    Args:
        inner_norms: norms over the time step, B and C (Jamba).
    """
    norms = (norm(f"{name}/norms", rank + 2 * state),) if inner_norms else ()
    return (
        projection(f"{name}/in_proj", width, 2 * inner, bias=bias),
        short_convolution(f"{name}/conv", kernel, inner, bias=conv_bias),
        projection(f"{name}/x_proj", inner, rank + 2 * state),
        projection(f"{name}/dt_proj", rank, inner, bias=True),
        vector(f"{name}/decay", inner * (state + 1)),
        *norms,
        Component(
            name=f"{name}/core",
            kind="attention",
            macs=inner * state,
            cache=Cache(state=inner * state),
        ),
        projection(f"{name}/out_proj", inner, width, bias=bias),
    )


def gated_short_convolution(
    width: int, *, kernel: int, bias: bool = False, name: str = "conv"
) -> Components:
    """LFM2's convolution block: ``in [D, 3·D]`` makes two gates and x, ``out [D, D]``."""
    return (
        projection(f"{name}/in_proj", width, 3 * width, bias=bias),
        short_convolution(f"{name}/conv", kernel, width, bias=bias),
        projection(f"{name}/out_proj", width, width, bias=bias),
    )
