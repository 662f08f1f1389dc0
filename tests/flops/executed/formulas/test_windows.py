"""Positions of windows, and common parts of ranges, against counting them one by one."""

from __future__ import annotations

import random

from mfu_jax.flops.executed.formulas.windows import WindowDimension, common


def _range(draw: random.Random) -> range:
    start = draw.randint(-9, 9)
    return range(start, start + draw.randint(0, 40), draw.randint(1, 9))


def test_the_common_part_of_two_ranges() -> None:
    draw = random.Random(0)
    for _ in range(2000):
        one, other = _range(draw), _range(draw)
        assert list(common(one, other)) == sorted(set(one) & set(other))


def test_positions_that_read_an_element_that_is_real() -> None:
    draw = random.Random(0)
    for _ in range(1000):
        window = WindowDimension(
            size=draw.randint(1, 6),
            stride=draw.randint(1, 5),
            pad_low=draw.randint(-4, 5),
            base_dilation=draw.randint(1, 5),
            window_dilation=draw.randint(1, 3),
            is_reversed=draw.random() < 0.5,
        )
        base, output = range(draw.randint(0, 5), 15), range(0, 12, draw.randint(1, 3))
        kernel = range(draw.randint(0, window.size - 1), window.size)
        expected = 0
        for tap in kernel:
            k = window.size - 1 - tap if window.is_reversed else tap
            for o in output:
                at = o * window.stride + k * window.window_dilation - window.pad_low
                expected += at % window.base_dilation == 0 and at // window.base_dilation in base
        assert window.real_positions(base, output, kernel) == expected
