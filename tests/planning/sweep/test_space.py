"""What is swept, and what is one value."""

import pytest

from mfu_jax.errors import UserError
from mfu_jax.planning.sweep.space import seconds_of, split


def test_lists_and_ranges_are_combined():
    fixed, points = split({"a": "x,y", "per_device_batch_size": "1..3", "b": "[p,q]", "c": "1e3"})
    assert fixed == {"b": "[p,q]", "c": "1e3"}
    assert len(points) == 2 * 3
    assert points[4].values == {"a": "y", "per_device_batch_size": "2"}
    assert points[4].batch == 2
    assert points[4].group == (("a", "y"),)


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"a": "1"}, "nothing to sweep"),
        ({"a": "5..2"}, "FIRST..LAST"),
        ({"a": "1..99999"}, "FIRST..LAST"),
        ({"a": "1..100", "b": "1..100"}, "10,000 points"),
        ({"per_device_batch_size": "1,two"}, "expected numbers"),
    ],
)
def test_wrong_sweeps_are_one_line(values, word):
    with pytest.raises(UserError, match=word):
        split(values)


@pytest.mark.parametrize("text", ["20 weeks", "", "min", "-3s"])
def test_a_wrong_budget_is_one_line(text):
    with pytest.raises(UserError, match="expected a time"):
        seconds_of(text)
