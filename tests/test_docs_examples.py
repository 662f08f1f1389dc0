"""Pages whose examples are doctests."""

from __future__ import annotations

import doctest

import pytest

from tests.support.paths import DOCS


@pytest.mark.parametrize(
    ("page", "least"), [("kernels.md", 5), ("masks.md", 20), ("traced.md", 18)]
)
def test_every_example_of_a_page_prints_what_the_page_shows(page: str, least: int) -> None:
    # A fence that closes a block would be read as the last line of its output: blank line before.
    results = doctest.testfile(str(DOCS / page), module_relative=False)
    assert results.attempted >= least
    assert results.failed == 0
