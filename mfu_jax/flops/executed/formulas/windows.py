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
    is_reversed: bool = False

    def real_positions(self, base: range, output: range, kernel: range) -> int:
        """Pairs of output and kernel positions that read an element, not padding or a hole.

        The window's k-th element reads input position ``o·stride + k·window_dilation − pad_low``
        of the dilated base, whose real elements are multiples of `base_dilation`.

        Args:
            base: the input's positions that are not zero; the others need not be.
            output: the result's positions.
            kernel: the kernel's.
        """
        kernel = mirrored(kernel, self.size) if self.is_reversed else kernel
        elements = scaled(base, self.base_dilation)
        offsets = (k * self.window_dilation - self.pad_low for k in kernel)
        return sum(len(common(scaled(output, self.stride, o), elements)) for o in offsets)


def scaled(positions: range, by: int, offset: int = 0) -> range:
    """Each position times `by`, plus `offset`."""
    start, end = (position * by + offset for position in (positions.start, positions.stop - 1))
    return range(start, end + 1, positions.step * by)


def mirrored(positions: range, size: int) -> range:
    """The positions counted from the other end."""
    if not positions:
        return positions
    return range(size - 1 - positions[-1], size - positions[0], positions.step)


def common(one: range, other: range) -> range:
    """The numbers that are in both ranges, whose steps are positive.

    >>> common(range(1, 20, 4), range(0, 18, 3))
    range(9, 18, 12)
    """
    divisor = math.gcd(one.step, other.step)
    apart, rest = divmod(other.start - one.start, divisor)
    if rest:
        return range(0)
    period = other.step // divisor
    first = one.start + one.step * (apart * pow(one.step // divisor, -1, period) % period)
    step = one.step * period
    first += -(-(max(one.start, other.start) - first) // step) * step
    return range(first, min(one.stop, other.stop), step)


# Parts of a window's text, and what they are for each dimension if they are left out.
_DEFAULTS = {
    "size": "1",
    "stride": "1",
    "pad": "0_0",
    "lhs_dilate": "1",
    "rhs_dilate": "1",
    "rhs_reversal": "0",
}
_WINDOW_PART = re.compile(rf"({'|'.join(_DEFAULTS)})=([\dx_\-]+)")


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
    count = parts["size"].count("x") + 1 if "size" in parts else 0
    columns = (
        parts[key].split("x") if key in parts else [default] * count
        for key, default in _DEFAULTS.items()
    )
    try:
        return tuple(
            WindowDimension(
                size=int(size),
                stride=int(stride),
                pad_low=_low(pad),
                base_dilation=int(lhs),
                window_dilation=int(rhs),
                is_reversed=turned == "1",
            )
            for size, stride, pad, lhs, rhs, turned in zip(*columns, strict=True)
        )
    except ValueError:
        raise ValueError("window that cannot be read") from None


def _low(pad: str) -> int:
    """The padding before a dimension, of ``low_high``."""
    low, _ = map(int, pad.split("_"))
    return low
