"""TensorBoard event files through tensorboardX's protos: no TensorFlow and no extra thread."""

from __future__ import annotations

import os
import socket
import struct
import time
from typing import Any

from mfu_jax.logger.sinks.base import Sink, StepRecord, register_sink
from mfu_jax.logger.sinks.files import AppendOnlyFile, local_path
from mfu_jax.parts import load_part


@register_sink("tensorboard")
class TensorBoardSink(Sink):
    """Writes every metric as a scalar, and texts, such as the set-up, for the text plugin.

    A step is one event, written by the calling thread. tensorboardX's `SummaryWriter` would send
    each scalar through a queue between processes, and a disk error would silently end its thread
    and then block the next write forever.

    Args:
        folder: TensorBoard's log directory of this run.
        resume_from_step: first step that this run will write; TensorBoard discards what earlier
            runs wrote to the same folder from there on.

    Raises:
        UserError: the folder cannot be written to.
    """

    def __init__(self, folder: str | os.PathLike[str], *, resume_from_step: int = 0) -> None:
        self._events = _tensorboardx("proto.event_pb2")
        self._summaries = _tensorboardx("proto.summary_pb2")
        self._text_summary = _tensorboardx("summary").text
        self._crc = _tensorboardx("record_writer").masked_crc32c
        # Two runs that start in the same second must not share a file.
        self.path = local_path(
            os.path.join(folder, f"events.out.tfevents.{_unique_suffix()}"), "tensorboard_dir"
        )
        self._file = AppendOnlyFile(self.path, "tensorboard_dir")
        self.made_by = ("tensorboard", {"folder": self.path.parent})
        self._step = resume_from_step
        self._append(0, file_version="brain.Event:2")
        if resume_from_step > 0:
            start = self._events.SessionLog(status=self._events.SessionLog.START)
            self._append(resume_from_step, session_log=start)

    def write(self, record: StepRecord) -> None:
        self._step = record.step
        summary = self._summaries.Summary()
        for name, value in record.scalars.items():
            summary.value.add(tag=name, simple_value=value)
        for flag in record.flags:
            summary.value.add(tag=f"flags/{flag}", simple_value=1.0)
        if record.kind != "step":
            summary.MergeFrom(self._text("step/kind", record.kind))
        if record.notes:
            summary.MergeFrom(self._text("step/notes", "\n\n".join(record.notes)))
        self._append(record.step, record.unix_seconds, summary=summary)

    def write_text(self, tag: str, text: str) -> None:
        # Markdown keeps lines and columns in a block indented by four spaces.
        block = "\n".join(f"    {line}" for line in text.splitlines()) if "\n" in text else text
        self._append(self._step, summary=self._text(tag, block))

    def flush(self) -> None:
        self._file.sync()

    def close(self) -> None:
        self._file.close()

    def _text(self, tag: str, text: str) -> Any:
        return self._text_summary(tag, text)

    def _append(self, step: int, unix_seconds: float | None = None, **content: Any) -> None:
        wall_time = time.time() if unix_seconds is None else unix_seconds
        data = self._events.Event(step=step, wall_time=wall_time, **content).SerializeToString()
        # TFRecord: length, its checksum, the event, its checksum.
        length = struct.pack("<Q", len(data))
        checksums = (struct.pack("<I", self._crc(piece)) for piece in (length, data))
        self._file.append(length + next(checksums) + data + next(checksums))


def _unique_suffix() -> str:
    """Seconds first, because TensorBoard reads a folder's files in name order."""
    now = time.time_ns()
    return f"{now // 10**9}.{socket.gethostname()}.{os.getpid()}.{now % 10**9:09d}"


def _tensorboardx(module: str) -> Any:
    return load_part(f"tensorboardX.{module}", "the sink 'tensorboard'", install="tensorboardX")
