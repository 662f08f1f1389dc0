"""What GPUs multiply beyond the mathematics: whole tiles, and window positions on padding.

A tile is stated where the program or a kernel's name has its size. What libraries decide when they
run is assumed: an H100's counters agree with it (tests/data/h100_counters.yaml).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from mfu_jax.flops.count import NOTHING_BEYOND, Beyond
from mfu_jax.flops.executed.formulas.matmuls import flops_per_multiply_add, result_shape
from mfu_jax.flops.executed.formulas.windows import WindowDimension, parse_window
from mfu_jax.flops.executed.hlo.dimensions import dot_indices
from mfu_jax.flops.executed.hlo.module import HloComputation, HloInstruction, HloModule
from mfu_jax.flops.executed.hlo.shapes import Shape

ATTENTION_BLOCK = 128  # queries and keys of cuDNN's attention
# Of the gradients of strided convolutions: rows of each class of positions, and window × channels.
_STRIDED_ROWS, _STRIDED_COLUMNS = 1024, 256
_IS_TRITON = '"kind":"__triton'
# nvjet_sm90_tst_144x128_64x6_2x1_v_bz_TNT; sm80_xmma_gemm_bf16bf16_…_tilesize128x128x32_stage4….
_LIBRARY_TILE = re.compile(
    r"(?:\bnvjet_[a-z0-9]+_[a-z]+_|tilesize|cutlass_\w*?_)(\d+)x(\d+)(?:_(\d+)x\d|x(\d+))"
)


def whole_tiles(sizes: Iterable[int], tiles: Iterable[int]) -> int:
    """The product of sizes, each rounded up to its tile.

    >>> whole_tiles((4000, 777, 1111), (128, 256, 64))
    4831838208
    """
    return math.prod(-(-size // tile) * tile for size, tile in zip(sizes, tiles, strict=True))


class TritonTiles:
    """The tiles of XLA's Triton fusions, which their ``backend_config`` states.

    Args:
        module: the program.
    """

    def __init__(self, module: HloModule) -> None:
        self.module = module

    @cached_property
    def _fusions(self) -> dict[str, HloInstruction]:
        """The fusions that Triton compiles, by the name of their computation."""
        return {
            name: fusion
            for _, fusion in self.module.with_opcode("fusion")
            if _IS_TRITON in fusion.attribute_text
            for name in fusion.callees
        }

    def beyond(self, computation: HloComputation, dot: HloInstruction) -> int:
        """FLOPs that a fused matmul runs on the rest of its tiles; 0 if none are stated."""
        fusion = self._fusions.get(computation.name)
        if fusion is None:
            return 0
        config = _of(fusion.backend_config, "fusion_backend_config")
        result, (m, n, contracted) = result_shape(dot), _sizes(computation, dot)
        if gemm := _of(config, "triton_gemm_config"):
            tiles = json_integers([gemm.get(f"block_{axis}") for axis in "mnk"])
            if len(tiles) != 3 or not result.size:
                return 0
            batch = result.size // (m * n)
            products = batch * whole_tiles((m, n, math.prod(contracted)), tiles)
        else:
            # The root may be the transposed result, but then its tile is, too.
            root = next(iter(fusion.shape.leaves()), result)
            tiles = _output_tile(config)
            if len(tiles) != len(root.dims) or root.size != result.size:
                return 0
            depth = self._contracted_tiles(computation, dot) or contracted
            if len(depth) != len(contracted):
                return 0
            products = whole_tiles(root.dims, tiles) * whole_tiles(contracted, depth)
        needed = result.size * math.prod(contracted)
        return flops_per_multiply_add(result.dtype) * (products - needed)

    def _contracted_tiles(self, computation: HloComputation, dot: HloInstruction) -> Sequence[int]:
        """Tiles of the contracted dimensions: of the dot, or of its operand's nested fusion."""
        if sizes := json_integers(dot.backend_config.get("sizes")):
            return sizes
        operand = computation.operand(dot, 0)
        tile = _output_tile(_of(operand.backend_config, "fusion_backend_config"))
        dims = dot.integers("lhs_contracting_dims")
        return [tile[d] for d in dims] if len(tile) == len(operand.shape.dims) else []


def _of(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = config.get(key)
    return found if isinstance(found, dict) else {}


def _output_tile(config: Mapping[str, Any]) -> list[int]:
    """``{"block_level_fusion_config":{"output_tiles":[{"sizes":["128","256"]}]}}``."""
    tiles = _of(config, "block_level_fusion_config").get("output_tiles")
    first = tiles[0] if isinstance(tiles, list) and tiles else {}
    return json_integers(first.get("sizes") if isinstance(first, dict) else None)


def json_integers(values: Any) -> list[int]:
    """Numbers above 0, which protobuf writes as strings; empty if they are none."""
    texts = [str(value) for value in values] if isinstance(values, list) else []
    return [int(text) for text in texts] if all(t.isdecimal() and int(t) for t in texts) else []


def _sizes(computation: HloComputation, dot: HloInstruction) -> tuple[int, int, list[int]]:
    """m and n of a dot, and the sizes of its contracted dimensions."""
    lhs, rhs = (computation.operand(dot, i).shape.dims for i in (0, 1))
    indices = dot_indices(dot, (len(lhs), len(rhs)))
    m = math.prod(lhs[i.lhs] for i in indices if i.lhs is not None and i.rhs is None)
    n = math.prod(rhs[i.rhs] for i in indices if i.rhs is not None and i.lhs is None)
    return m, n, [lhs[i.lhs] for i in indices if i.lhs is not None and i.result is None]


def pairs_in_blocks(queries: int, keys: int, left: int, right: int) -> int:
    """Pairs in the blocks that have any pair of `attention_pairs`, each block in full.

    >>> pairs_in_blocks(2048, 2048, -1, 0) == 136 * 128**2
    True
    """
    last_block = -(-keys // ATTENTION_BLOCK) - 1
    blocks = 0
    for start in range(0, queries, ATTENTION_BLOCK):
        end = min(start + ATTENTION_BLOCK, queries) - 1
        first_key = max(0, start - left) if left >= 0 else 0
        if first_key >= keys:
            break
        last = min((end + right) // ATTENTION_BLOCK, last_block) if right >= 0 else last_block
        blocks += max(0, last - first_key // ATTENTION_BLOCK + 1)
    return blocks * ATTENTION_BLOCK**2


def beyond_convolution(
    call: HloInstruction, kind: str, arrays: Sequence[Shape], flops: int
) -> Beyond:
    """What cuDNN multiplies beyond a convolution, as an implicit matmul.

    Forward and for the kernel's gradient, all window positions of every output. For the input's
    gradient, every input position times the window positions that its class has: with stride 2, a
    3 × 3 window has four, two, two and one.

    Args:
        call: has `window` and `dim_labels` of the forward convolution.
        kind: the end of its target: ``Forward``, ``BackwardInput`` or ``BackwardFilter``.
        arrays: input, kernel and output.
        flops: its FLOPs at positions that read elements.
    """
    if not flops:
        return NOTHING_BEYOND
    output = arrays[2]
    names = re.split("_|->", call.attribute("dim_labels"))
    windows = parse_window(call)
    sizes = [dict(zip(n, a.dims, strict=True)) for n, a in zip(names, arrays, strict=True)]
    channels = sizes[1]["i"] * sizes[2]["f"]
    multiply_add = flops_per_multiply_add(output.dtype)
    is_strided = any(window.stride > 1 for window in windows)
    is_dense = "feature_group_count" not in call.attribute_text
    assumed = 0
    if kind == "BackwardInput":
        by_axis = [_classes(w, sizes[0][str(i)]) for i, w in enumerate(windows)]
        classes = [(1, sizes[2]["b"])]  # window positions, rows
        for axis in by_axis:
            classes = [(k * taps, n * rows) for k, n in classes for taps, rows in axis]
        total = multiply_add * channels * sum(taps * rows for taps, rows in classes)
        if is_strided and is_dense:
            rest = sum(taps * _rest(rows, _STRIDED_ROWS) for taps, rows in classes)
            assumed = multiply_add * channels * rest
    else:
        positions = math.prod(window.size for window in windows)
        total = multiply_add * channels * positions * (output.size // sizes[2]["f"])
        if kind == "BackwardFilter" and is_strided and is_dense:
            columns = positions * sizes[1]["i"]
            assumed = total // columns * _rest(columns, _STRIDED_COLUMNS)
    return Beyond(assumed=assumed, on_padding=max(0, total - flops))


def _rest(size: int, tile: int) -> int:
    """What a size lacks of whole tiles; 0 below one tile, where a library takes a smaller one."""
    return -size % tile if size > tile else 0


def _classes(window: WindowDimension, size: int) -> list[tuple[int, int]]:
    """Window positions, and how many input positions have them, by the remainder of the stride."""
    offsets = [k * window.window_dilation - window.pad_low for k in range(window.size)]
    classes = []
    for remainder in range(min(window.stride, size)):
        taps = sum((remainder - offset) % window.stride == 0 for offset in offsets)
        classes.append((taps, -(-(size - remainder) // window.stride)))
    return classes


def beyond_library_tile(kernel: str, matmul: tuple[int, int, int, int], is_transposed: bool) -> int:
    """FLOPs that a library's matmul runs on the rest of its tiles; 0 if its name states none.

    Args:
        kernel: the kernel's name.
        matmul: batch, m, n and k.
        is_transposed: whether m, not n, is the result's minor dimension.
    """
    tile = library_tile(kernel)
    batch, m, n, k = matmul
    if tile is None or ("splitK" in kernel and k % tile[2]):  # how k is split is not stated
        return 0
    sizes = (m, n, k) if is_transposed else (n, m, k)
    return 2 * batch * (whole_tiles(sizes, tile) - m * n * k)


def library_tile(kernel: str) -> tuple[int, int, int] | None:
    """The tile that the name of a cuBLAS or cutlass kernel states.

    The result's minor dimension, its other one, and the contracted one.

    >>> library_tile("nvjet_sm90_tst_144x128_64x6_2x1_v_bz_TNT")
    (144, 128, 64)
    """
    match = _LIBRARY_TILE.search(kernel)
    return (int(match[1]), int(match[2]), int(match[3] or match[4])) if match else None
