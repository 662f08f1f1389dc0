"""Names that a backend would merge stay apart."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mfu_jax.logger.sinks.names import UniqueNames


def underscored(name: str) -> str:
    return "".join(c if c.isalnum() and c.isascii() else "_" for c in name)


@given(st.lists(st.text("aB1_-/@é", max_size=8), unique=True, max_size=30))
def test_no_two_names_are_mapped_to_the_same_one(names: list[str]) -> None:
    mapped = UniqueNames("x", underscored, longest=6, reserved=["step"])
    found = [mapped[name] for name in names]
    assert len(set(found)) == len(names)
    assert all(0 < len(name) <= 6 and name == underscored(name) for name in found)
    assert "step" not in found
    assert [mapped[name] for name in names] == found


@given(st.lists(st.text("ab/", min_size=1, max_size=6), unique=True, max_size=20))
def test_names_that_are_files_are_never_folders_too(names: list[str]) -> None:
    mapped = UniqueNames("x", is_tree=True)
    found = [mapped[name] for name in names]
    assert not any(a.startswith(f"{b}/") for a, b in itertools.permutations(found, 2))


def test_a_name_that_had_to_change_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    names = UniqueNames("Prometheus", underscored)
    for _ in range(3):
        assert (names["top-1"], names["top_1"]) == ("top_1", "top_1_2")
    (warning,) = caplog.records
    assert warning.getMessage() == (
        "Prometheus: metric 'top_1' is written as 'top_1_2', because 'top_1' is another one's "
        "name there"
    )
