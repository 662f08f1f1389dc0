"""Windows of convolutions and of reductions: sizes, strides, padding, dilation."""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass

from mfu_jax.flops.executed.hlo.module import HloInstruction


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowDimension:
    """One spatial dimension of a convolution's window, with XLA's defaults."""

    size: int = 1
    stride: int = 1
    pad_low: int = 0
    base_dilation: int = 1
    window_dilation: int = 1

    def real_positions(self, base: int, output: int) -> int:
        """Pairs of output and kernel positions that read an element, not padding or a hole.

        The kernel's k-th element reads input position ``o·stride + k·window_dilation − pad_low``
        of the dilated base, whose real elements are the multiples of `base_dilation` below
        ``(base − 1)·base_dilation + 1``. Counted in O(size), with one congruence per k.
        """
        if base <= 0 or output <= 0:
            return 0
        last = (base - 1) * self.base_dilation
        stride, dilation = self.stride, self.base_dilation
        common = math.gcd(stride, dilation)
        period = dilation // common  # in o
        inverse = pow(stride // common, -1, period) if period > 1 else 0
        total = 0
        for k in range(self.size):
            offset = k * self.window_dilation - self.pad_low
            if offset % common:
                continue  # this kernel element reads only holes
            first = max(0, -(offset // stride))  # the first o with o·stride + offset ≥ 0
            end = min(output - 1, (last - offset) // stride)
            if end < first:
                continue
            phase = (-offset // common) * inverse % period if period > 1 else 0
            start = first + (phase - first) % period
            if start <= end:
                total += (end - start) // period + 1
        return total


_WINDOW_PART = re.compile(r"(size|stride|pad|lhs_dilate|rhs_dilate)=([\dx_\-]+)")


def parse_window(instruction: HloInstruction) -> tuple[WindowDimension, ...]:
    """``{size=3x3 stride=2x2 pad=1_1x1_1 lhs_dilate=… rhs_dilate=…}``, one entry per dimension."""
    try:
        return read_window(instruction.attribute("window"))
    except ValueError as error:
        raise instruction.error(str(error)) from None


@functools.lru_cache(maxsize=4096)
def read_window(text: str) -> tuple[WindowDimension, ...]:
    """As `parse_window`, from the attribute's text; raises ValueError."""
    parts = dict(_WINDOW_PART.findall(text))
    try:
        sizes = [int(v) for v in parts["size"].split("x")] if "size" in parts else []
        pads = parts["pad"].split("x") if "pad" in parts else ["0_0"] * len(sizes)
        strides, base, window = (
            [int(v) for v in parts[key].split("x")] if key in parts else [1] * len(sizes)
            for key in ("stride", "lhs_dilate", "rhs_dilate")
        )
        return tuple(
            WindowDimension(
                size=size,
                stride=stride,
                pad_low=_low(pad),
                base_dilation=lhs,
                window_dilation=rhs,
            )
            for size, stride, pad, lhs, rhs in zip(sizes, strides, pads, base, window, strict=True)
        )
    except ValueError:
        raise ValueError("window that cannot be read") from None


def _low(pad: str) -> int:
    """The padding before a dimension, of ``low_high``."""
    low, _ = map(int, pad.split("_"))
    return low
