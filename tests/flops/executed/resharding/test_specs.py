"""How values are split is followed from the parameters, and written as one writes it."""

from __future__ import annotations

import jax

from mfu_jax.flops.executed.resharding.specs import Merged, reshaped, words
from tests.campaigns.shardings import PLANTS, found_in, setting_of

ROWS, WIDTH = ("data",), ("model",)


def test_words_write_a_spec_as_one_does() -> None:
    assert words((ROWS, (), ("a", "b"))) == "P('data', None, ('a', 'b'))"
    assert words((ROWS, (), ())) == "P('data')"
    assert words(((), ())) == "P()"
    assert words((ROWS, None)) == "P('data', U)"
    assert words((None, None)) == words(None) == ""


def test_a_merged_dimension_is_taken_apart_again() -> None:
    merged = reshaped((ROWS, WIDTH, ()), (4, 16, 8), (64, 8))
    assert merged == (Merged([(4, ROWS), (16, WIDTH)]), ())
    assert words(merged) == "P(U)"
    assert reshaped(merged, (64, 8), (4, 16, 8)) == (ROWS, WIDTH, ())
    assert reshaped((ROWS,), (12,), (3, 4)) == (ROWS, ())
    assert reshaped((ROWS, ()), (4, 6), (6, 4)) is None


def test_both_shardings_are_named_by_mesh_axes() -> None:
    s = setting_of(jax.devices()[:8])
    (one,) = found_in(PLANTS["swapped_axes"](s))
    assert one.before == "P('model', None, 'data')"
    assert one.after == "P(None, ('data', 'model'))"
    assert one.after in one.advice
