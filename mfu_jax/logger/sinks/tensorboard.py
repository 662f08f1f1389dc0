"""TensorBoard event files by tensorboardX: no TensorFlow, no extra thread."""

from __future__ import annotations

import functools
import logging
import os
import re
import socket
import struct
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mfu_jax.logger.records.step_record import RecordError, StepRecord
from mfu_jax.logger.sinks.append_only import AppendOnlySink
from mfu_jax.logger.sinks.base import UniqueNames, register_sink
from mfu_jax.storage.files import AppendOnlyFile
from mfu_jax.storage.targets import OutputTarget, folder_target
from mfu_jax.util.formatting import encodable
from mfu_jax.util.optional_deps import require

_log = logging.getLogger("mfu_jax")
# Marks our files in a folder; other writers' files are left alone.
_ENDING = ".mfu_jax"
_VERSION = "brain.Event:2"
# Metric → its card in the group that TensorBoard shows first: the first tab sorts groups by name,
# and those of other metrics begin with lower-case letters.
_OVERVIEW = {
    "perf/mfu": "Overview/1 MFU",
    "perf/hfu": "Overview/2 HFU",
    "perf/step_time_seconds": "Overview/3 step time in seconds",
    "perf/per_device_tokens_per_sec": "Overview/4 tokens per second per device",
    "learning/loss": "Overview/5 loss",
}
_OWN_TAGS = ("step/kind/text_summary", "step/notes/text_summary", *_OVERVIEW.values())


@register_sink("tensorboard")
class TensorBoardSink(AppendOnlySink):
    """Writes every metric as a scalar, and texts as Markdown.

    The first tab opens on the group Overview: MFU, HFU, step time, tokens/s and loss of measured
    steps.

    Each step is one event, written by the calling thread. When a run resumes, or its loop goes
    back, TensorBoard is told to drop the steps that come again; files are only appended to.
    Values are stored as float32: 1e308 is shown as infinite.

    Args:
        folder: TensorBoard's log directory for this run, or its address in an object store.
        resume_from_step: first step that this run will write: TensorBoard drops what earlier files
            in the folder have from there on. If 0, those of this sink are moved to its subfolder
            ``previous1``. Other writers' files are kept.
        fsync_seconds: seconds of data that a power cut may lose; see `AppendOnlyFile`.

    Raises:
        UserError: the folder cannot be written to, or another process writes to it.
    """

    setting = "tensorboard_dir"

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        resume_from_step: int = 0,
        fsync_seconds: float = -1.0,
    ) -> None:
        self._event = _tensorboardx("proto.event_pb2").Event
        make = _tensorboardx("summary").text
        self._text = lambda tag, text: make(tag, encodable(text))  # paths may be no UTF-8
        self._names = UniqueNames("TensorBoard", reserved=_OWN_TAGS)
        self._step, self._last = resume_from_step, -1
        self._setup: list[Any] = []
        # Of the last step, which usually differs from the next one only in numbers.
        self._key: tuple[str, ...] = ()
        self._shown: list[str] = []
        self._of_step: Any = None
        self._values: list[Any] = []
        super().__init__(folder, resume_from_step=resume_from_step, fsync_seconds=fsync_seconds)

    def _target_of(self, path: str | os.PathLike[str], *, keep: bool) -> OutputTarget:
        return folder_target(path, self.setting, keep=keep, ending=_ENDING, lock=".writer.lock")

    def _prepare(self, resume_from_step: int) -> None:
        if not resume_from_step:
            _set_aside(self._target.path)
        self.path = _new_path(self._target.path)

    def _open(self, header: bytes = b"") -> AppendOnlyFile:
        events = [self._now(0, file_version=_VERSION), *self._setup]
        if self._step:
            events += self._restart(self._step)
        return super()._open(b"".join(map(_framed, events)))

    def write_many(self, records: Sequence[StepRecord]) -> None:
        pieces: list[bytes] = []
        last = self._last
        for record in records:
            if record.step <= last:
                pieces += map(_framed, self._restart(record.step))
            pieces.append(_framed(self._step_event(record)))
            last = record.step
        self._append(b"".join(pieces))
        self._step = self._last = last

    def write_text(self, tag: str, text: str) -> None:
        self._write_markdown({tag: as_markdown(text)})

    def write_setup(self, values: Mapping[str, Any], texts: Mapping[str, str]) -> None:
        table = {"setup/values": values_as_markdown(values)} if values else {}
        markdown = {f"setup/{tag}": as_markdown(text) for tag, text in texts.items()}
        self._write_markdown({**table, **markdown})

    def write_failure(self, reason: str) -> None:
        self.write_text("failure", reason)

    def close(self) -> None:
        try:
            self._write([])  # the head of a file that still has nothing
        finally:
            super().close()

    def _write_markdown(self, texts: Mapping[str, str]) -> None:
        events = {tag: self._now(self._step, summary=self._text(tag, texts[tag])) for tag in texts}
        self._write(events.values())
        self._setup += [e for tag, e in events.items() if tag.startswith(("setup/", "ledger/"))]

    def _restart(self, step: int) -> list[Any]:
        """Events after which TensorBoard forgets this step and later ones, except the set-up."""
        log = _tensorboardx("proto.event_pb2").SessionLog
        start = self._now(step, session_log=log(status=log.START))
        # TensorBoard takes the first START of a run only for its beginning.
        return [start, start, *(event for event in self._setup if event.step >= step)]

    def _step_event(self, record: StepRecord) -> Any:
        """The event of a step, which is valid until the next call."""
        scalars = record.scalars
        if record.flags:
            scalars = {**scalars, **{f"flags/{flag}": 1.0 for flag in record.flags}}
        key = (record.kind, *scalars)
        if key != self._key or self._of_step is None:
            self._key, self._of_step = key, self._event()
            self._shown = [n for n in _OVERVIEW if n in scalars] if record.kind == "step" else []
            tags = (*self._names.of(scalars), *map(_OVERVIEW.__getitem__, self._shown))
            self._values = [self._of_step.summary.value.add(tag=tag) for tag in tags]
        event = self._of_step
        try:
            event.step, event.wall_time = record.step, record.unix_seconds
            numbers = (*scalars.values(), *map(scalars.__getitem__, self._shown))
            for value, number in zip(self._values, numbers, strict=True):
                value.simple_value = number
        except (TypeError, ValueError, OverflowError) as error:
            raise RecordError(f"step {record.step} cannot be an event: {error}") from error
        texts = {} if record.kind == "step" else {"step/kind": record.kind}
        if record.notes:
            texts["step/notes"] = "\n\n".join(record.notes)
        for tag, text in texts.items():
            event.summary.MergeFrom(self._text(tag, text))
            self._of_step = None
        return event

    def _now(self, step: int, **content: Any) -> Any:
        return self._event(step=step, wall_time=time.time(), **content)

    def _write(self, events: Iterable[Any]) -> None:
        self._append(b"".join(map(_framed, events)))


def as_markdown(text: str) -> str:
    """A text as Markdown: lines, or the pairs of a configuration, are a block.

    >>> as_markdown("steps=80 run_name=demo")
    '    steps=80\\n    run_name=demo'
    """
    words = text.split()
    lines = words if all("=" in word for word in words) else text.splitlines()
    return text if len(lines) < 2 else "\n".join(f"    {line}" for line in lines)


def values_as_markdown(values: Mapping[str, Any]) -> str:
    """A table of names and values, which mean only themselves."""
    rows = [f"| {_cell(key)} | {_cell(str(value))} |" for key, value in values.items()]
    return "\n".join(["| name | value |", "|---|---|", *rows])


def _cell(text: str) -> str:
    plain = text.replace("&", "&amp;").replace("<", "&lt;")
    return " ".join(re.sub(r"([\\`*_\[\]|#])", r"\\\1", plain).split())


@functools.cache
def _tensorboardx(module: str) -> Any:
    """A module of the package, imported when a run writes events."""
    return require(f"tensorboardX.{module}", "the sink 'tensorboard'", install="tensorboardX")


def _framed(event: Any) -> bytes:
    """An event as it is in a file: its size and itself, each with tensorboardX's checksum.

    tensorboardX's own writers cannot take back an event that a full disk tore, which would end the
    file for TensorBoard, nor flush without the fsync that uploads a whole file of a mounted bucket.
    """
    data = event.SerializeToString()
    size = struct.pack("<Q", len(data))
    return b"".join((size, _checksum(size), data, _checksum(data)))


def _checksum(data: bytes) -> bytes:
    return struct.pack("<I", _tensorboardx("record_writer").masked_crc32c(data))


def _ours(folder: Path) -> list[Path]:
    return sorted(file for file in folder.glob(f"*{_ENDING}") if file.is_file())


def _new_path(folder: Path) -> Path:
    """The path of a file that TensorBoard, which goes by name, reads after all of ours.

    Seconds come first, as in every event file, but never before those of an earlier file, however
    the clock was set. Two runs that start in the same second must not share a file.
    """
    now = time.time_ns()
    before = [int(file.name.split(".")[3]) for file in _ours(folder)]
    seconds = max([now // 10**9, *(second + 1 for second in before)])
    unique = f"{socket.gethostname()}.{os.getpid()}.{now % 10**9:09d}"
    return folder / f"events.out.tfevents.{seconds}.{unique}{_ENDING}"


def _set_aside(folder: Path) -> None:
    """Moves our files of an earlier run to a free ``previousN`` within the folder, and says so.

    TensorBoard shows it as a run of its own.
    """
    if files := _ours(folder):
        number = next(n for n in range(1, 10**9) if not (folder / f"previous{n}").exists())
        kept = folder / f"previous{number}"
        kept.mkdir()
        for file in files:
            os.replace(file, kept / file.name)
        _log.warning("%s held an earlier run, which is now %s", folder, kept)
