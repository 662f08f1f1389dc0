"""`mfu-jax profile`: its pages, and its scalars for TensorBoard."""

from __future__ import annotations

from pathlib import Path

import pytest
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.record_writer import masked_crc32c

from mfu_jax import cli
from mfu_jax.profiling.profile import read_profile
from tests.support import accelerator_traces as traces


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    traces.write_program(tmp_path, "TPU v5 lite")
    traces.write_trace(tmp_path, traces.host(), traces.tpu())
    return tmp_path


def test_the_page_goes_beside_the_trace_or_where_it_is_told(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["profile", str(folder), "--html"]) == 0
    assert capsys.readouterr().out.strip() == str(folder / "profile.html")
    assert cli.main(["profile", str(folder), "--html", str(folder / "other.html")]) == 0
    page = (folder / "other.html").read_text(encoding="utf-8")
    assert page == (folder / "profile.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>")


def test_pages_that_cannot_be_are_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, error in (
        ([str(folder), "--html", str(folder / "programs" / "step.mfu" / "p.html")], "--html"),
        ([str(folder), "p.html"], "'p.html' without --html"),
        ([str(folder), "--html", "--json"], "expected one of them"),
        ([str(folder)] * 3, "expected a folder with a trace"),
        ([str(folder), str(folder), "--html", "--json"], "expected one of them"),
        ([str(folder), str(folder), "--html"], "--html and two profiles: expected one folder"),
        ([], "got none"),
        ([str(folder), "tensorboard=nowhere://bucket/logs"], "cannot be reached"),
    ):
        assert cli.main(["profile", *words]) == 2
        assert error in capsys.readouterr().err


def test_numbers_for_tensorboard(folder: Path) -> None:
    logs = folder / "logs"
    for _ in range(2):  # the second time replaces the first
        assert cli.main(["profile", str(folder), f"tensorboard={logs}"]) == 0
    (file,) = (logs / "profile").iterdir()
    events = [Event.FromString(data) for data in records(file)]
    values = {v.tag: v.simple_value for event in events for v in event.summary.value}
    answer = read_profile(folder).to_json()
    assert values["profile/mfu"] == pytest.approx(answer["mfu"])
    assert values["profile/step_time_seconds"] == pytest.approx(100e-6)
    for bar in answer["waterfall"]:
        assert values[f"profile/waterfall/{bar['name']}"] == pytest.approx(bar["seconds"])
    assert events[-1].step == traces.STEPS - 1


def test_numbers_for_tensorboard_in_an_object_store(folder: Path) -> None:
    store = pytest.importorskip("fsspec").filesystem("memory")
    assert cli.main(["profile", str(folder), "tensorboard=memory://profile-of-a-run/"]) == 0
    (file,) = store.ls("/profile-of-a-run/profile", detail=False)
    assert b"profile/mfu" in store.cat_file(file)


def records(file: Path) -> list[bytes]:
    """The data of an event file, its checksums verified."""
    content, found = file.read_bytes(), []
    while content:
        size = int.from_bytes(content[:8], "little")
        found.append(content[12 : 12 + size])
        for data, checksum in ((content[:8], content[8:12]), (found[-1], content[12 + size :])):
            assert masked_crc32c(data) == int.from_bytes(checksum[:4], "little")
        content = content[16 + size :]
    return found
