"""Curves keep the extremes of what they thin out."""

from __future__ import annotations

import math
import re

from mfu_jax.pages.charts import Bin, ChartPoint, Curve, curves, histogram, thinned, ticks
from tests.support import html_pages


def test_a_spike_among_a_million_values_is_kept() -> None:
    values = [1.0] * 100_000
    values[54_321] = 9.0
    points = thinned(range(100_000), values)
    assert len(points) == 360
    assert max(point.high for point in points) == 9.0
    assert sum(point.values for point in points) == 100_000
    (spike,) = (point for point in points if point.high > 1)
    assert math.isclose(spike.mean, 1 + 8 / spike.values)


def test_values_that_are_not_finite_are_left_out() -> None:
    points = thinned([0, 1, 2], [1.0, math.nan, math.inf])
    assert points == [ChartPoint(0.0, 1.0, 1.0, 1.0, 1)]
    assert thinned([], []) == []


def test_one_far_value_does_not_flatten_the_curve() -> None:
    values = [1.0 + 0.1 * (n % 2) for n in range(300)]
    values[150] = 1e6
    curve = Curve(name="a", points=thinned(range(300), values))
    text = curves("y", [curve], x_title="x", x_text=str, y_text=lambda y: f"y={y:g}")
    assert "y=1.1<" in text
    assert ">y=1e+06<" not in text
    assert "|y=1e+06|" in text  # what the pointer shows is not cut off
    (line,) = re.findall(r'<polyline points="(.*?)"', text)
    heights = {pair.split(",")[1] for pair in line.split()}
    assert len(heights) == 3  # both of its values, and the edge


def test_few_steps_are_all_inside_the_picture_and_no_label_stands_twice() -> None:
    curve = Curve(name="a", points=thinned([2, 3, 4], [0.031, 0.0304, 0.069]))
    text = curves("y", [curve], x_title="step", x_text="s={:.0f}".format, y_text="y={:.2f}".format)
    assert re.findall(r">s=(.*?)<", text) == ["2", "3", "4"]
    labels = re.findall(r">y=(.*?)<", text)
    assert labels == ["0.04", "0.05", "0.06"]
    (line,) = re.findall(r'<polyline points="(.*?)"', text)
    assert len({pair.split(",")[1] for pair in line.split()}) == 3


def test_impossible_values_do_not_set_the_axis_unless_most_are() -> None:
    for above, top in ((5, 0.4), (35, 20.0)):
        ys = [0.4] * (40 - above) + [20.0] * above
        points = thinned(list(range(40)), ys)
        curve = Curve(name="", points=points)
        text = curves("MFU", [curve], x_title="step", x_text=str, y_text="y={}".format, possible=1)
        labels = [float(label) for label in re.findall(r">y=(.*?)<", text)]
        assert top / 2 < max(labels) <= 1.5 * top
        assert "|20.0" in text.replace("y=", "")  # under the pointer, whatever the axis


def test_waits_that_are_mostly_zero_have_an_axis_from_zero_to_their_spike() -> None:
    values = [0.0] * 300
    values[150] = 0.8
    curve = Curve(name="a", points=thinned(range(300), values))
    text = curves("y", [curve], x_title="x", x_text=str, y_text="y={:g}".format, has_zero=True)
    assert re.findall(r">y=(.*?)<", text) == ["0", "0.2", "0.4", "0.6", "0.8"]


def test_a_constant_has_a_chart() -> None:
    curve = Curve(name="a", points=thinned(range(5), [0.0] * 5))
    html_pages.elements(curves("y", [curve], x_title="x", x_text=str, y_text=str))
    assert ticks(3.0, 3.0) == [3.0]


def test_what_is_constant_but_for_rounding_has_ticks_that_differ() -> None:
    curve = Curve(name="a", points=thinned(range(5), [1.0, 1.0, 1.0 - 1e-7, 1.0, 1.0]))
    text = curves("y", [curve], x_title="x", x_text=str, y_text="y={:.4g}".format)
    labels = re.findall(r">y=(.*?)<", text)
    assert len(set(labels)) == len(labels) > 1


def test_a_histogram_has_a_bar_for_each_bin() -> None:
    bins = [Bin(low=float(n), high=n + 1.0, count=10**n) for n in range(4)]
    text = histogram("steps", bins, x_title="s", x_text=str)
    assert html_pages.values(text, "data-count") == [1, 10, 100, 1000]
