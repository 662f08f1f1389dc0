"""What is searched, and what is one value."""

import pytest

from mfu_jax.errors import UserError
from mfu_jax.planning.tune.space import SearchAxis, Space, listed_axes, seconds_of


def test_lists_and_ranges_are_combined():
    axes, fixed = listed_axes(
        {"a": "x,y", "per_device_batch_size": "1..3", "b": "[p,q]", "c": "1e3"}
    )
    assert fixed == {"b": "[p,q]", "c": "1e3"}
    space = Space(axes)
    assert space.size == 2 * 3
    assert space.settings((1, 1)) == {"a": "y", "per_device_batch_size": "2"}
    assert space.batch((1, 1)) == 2


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"a": "1"}, "nothing to search"),
        ({"a": "5..2"}, "FIRST..LAST"),
        ({"a": "1..99999"}, "FIRST..LAST"),
        ({"per_device_batch_size": "1,two"}, "expected numbers"),
    ],
)
def test_wrong_lists_are_one_line(values, word):
    with pytest.raises(UserError, match=word):
        Space(listed_axes(values)[0])


def test_a_search_begins_at_the_first_valid_point():
    names = {str(size): {"fsdp": str(size)} for size in (1, 2, 4, 8)}
    space = Space([SearchAxis(name="fsdp", choices=names)])
    space.begin_where(lambda point: point > (1,))
    assert space.start == (2,)
    assert space.changes((2,)) == "the start"
    space.begin_where(lambda point: False)
    assert space.start == (2,)


@pytest.mark.parametrize("text", ["20 weeks", "", "min", "-3s"])
def test_a_wrong_budget_is_one_line(text):
    with pytest.raises(UserError, match="expected a time"):
        seconds_of(text)
