"""Names that a backend would merge stay apart."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mfu_jax.logger.sinks.base import UniqueNames


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


def test_a_loop_that_invents_names_does_not_fill_the_memory(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mfu_jax.logger.sinks.base._MOST_NAMES", 3)
    names = UniqueNames("Prometheus", underscored, reserved=["step"])
    given = {name: names[name] for name in ("top-1", "top_1", "loss")}
    for number in range(100):
        assert names[f"invented-{number}"] == f"invented_{number}"
    assert [names[name] for name in ("step", "top.1", "los-s")] == ["step_2", "top_1_3", "los_s"]
    assert {name: names[name] for name in given} == given
    assert (len(names._mapped), len(names._taken)) == (3, 4)
    assert caplog.text.count("Prometheus: more than 3 names of metrics") == 1
