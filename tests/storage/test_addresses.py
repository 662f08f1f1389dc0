"""Addresses of stores keep their slashes and are never local folders."""

from pathlib import Path

import pytest

from mfu_jax.errors import UserError
from mfu_jax.runs.metrics.files import read_metrics
from mfu_jax.storage.addresses import Address, check_path, filesystem_of, open_object, path_of


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gs://b/run", Address("gs://b/run")),
        ("s3://b", Address("s3://b")),
        ("file:///tmp/run", Path("/tmp/run")),
        ("local:///tmp/run", Path("/tmp/run")),
        ("output/run", Path("output/run")),
        ("c:/run", Path("c:/run")),  # a drive of Windows
    ],
)
def test_what_is_an_address(text: str, expected: Path | Address) -> None:
    found = check_path(text, "metrics_file")
    assert (type(found), found) == (type(expected), expected)


def test_an_address_joins_like_a_path() -> None:
    file = path_of("gs://b/runs/") / "demo" / "metrics.jsonl"
    assert file == "gs://b/runs/demo/metrics.jsonl"
    assert file.name == "metrics.jsonl"
    assert file.parent == "gs://b/runs/demo"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (Path("gs://b/run"), r"went through pathlib.Path; pass it as text: 'gs://b/run'"),
        ("run\0", "holds a NUL character"),
    ],
)
def test_what_would_go_to_the_wrong_place_is_refused(path: str | Path, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_path(path, "metrics_file")


def test_a_store_that_nothing_here_reaches_is_refused() -> None:
    with pytest.raises(UserError, match=r"metrics_file 'nowhere://b/x' cannot be reached \("):
        filesystem_of(Address("nowhere://b/x"), "metrics_file")


def test_objects_are_read_as_files_are() -> None:
    fsspec = pytest.importorskip("fsspec")
    fsspec.filesystem("memory").pipe_file("/addresses/x", b"a\xffb\n")
    with open_object(Address("memory://addresses/x")) as lines:
        assert list(lines) == [b"a\xffb\n"]


def test_a_report_reads_a_metrics_file_in_a_store() -> None:
    store = pytest.importorskip("fsspec").filesystem("memory")
    line = b'{"step": 3, "kind": "step", "perf/step_time_seconds": 0.5}\n'
    store.pipe_file("memory://addresses/metrics.jsonl", line)
    (step,) = read_metrics("memory://addresses/metrics.jsonl").steps
    assert (step.number, step.scalars["perf/step_time_seconds"]) == (3, 0.5)
    with pytest.raises(UserError, match=r"'memory://addresses/none' cannot be read"):
        read_metrics("memory://addresses/none")
