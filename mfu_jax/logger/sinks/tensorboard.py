"""TensorBoard event files through tensorboardX's protos: no TensorFlow and no extra thread."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

from mfu_jax.errors import UserError
from mfu_jax.logger.records.step_record import RecordError, StepRecord
from mfu_jax.logger.sinks import event_files, tensorboard_plugins
from mfu_jax.logger.sinks.base import Sink, register_sink
from mfu_jax.logger.sinks.event_files import ScalarsForm
from mfu_jax.logger.sinks.markdown import as_markdown, values_as_markdown
from mfu_jax.logger.sinks.names import UniqueNames
from mfu_jax.storage.addresses import Address, check_path
from mfu_jax.storage.files import AppendOnlyFile, unwritable
from mfu_jax.storage.targets import folder_target
from mfu_jax.util.optional_deps import require

_SUMMARY_FIELD = 5  # of Event (tensorflow/core/util/event.proto)
_MOST_FORMS = 100  # a loop that invents new names every step must not fill the memory
_OWN_TAGS = (
    "step/kind/text_summary",
    "step/notes/text_summary",
    *tensorboard_plugins.OVERVIEW.values(),
)


@register_sink("tensorboard")
class TensorBoardSink(Sink):
    """Writes every metric as a scalar, texts as Markdown, and the set-up as hyperparameters.

    The first tab opens on the group Overview: MFU, HFU, step time, tokens/s and loss of measured
    steps. The plugin Custom Scalars has pages with the charts that matter: efficiency, learning,
    health.

    Each step is one event, written by the calling thread. tensorboardX's `SummaryWriter` would send
    each scalar through a multiprocessing queue, and a disk error would silently end its thread and
    then block the next write forever. Values are stored as float32: 1e308 is shown as infinite.

    Args:
        folder: TensorBoard's log directory for this run, or its address in an object store.
        resume_from_step: first step that this run will write. Steps from there on are dropped from
            this sink's earlier files in the folder, as are those that the loop went back over; if
            0, the files are moved to its subfolder ``previous1``. Other writers' files are kept.
        fsync_seconds: seconds of data that a power cut may lose; see `AppendOnlyFile`.

    Raises:
        UserError: the folder cannot be written to, or another process writes to it.
    """

    periods_per_write = 4  # nobody looks more often

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        resume_from_step: int = 0,
        fsync_seconds: float = -1.0,
    ) -> None:
        self._events = _tensorboardx("proto.event_pb2")
        self._text_summary = _tensorboardx("summary").text
        self._names = UniqueNames("TensorBoard", reserved=_OWN_TAGS)
        self._forms: dict[tuple[str, ...], ScalarsForm] = {}
        self._step = resume_from_step
        self._is_experiment = self._has_failed = False
        self._target = folder_target(
            folder,
            "tensorboard_dir",
            keep=resume_from_step > 0,
            ending=event_files.ENDING,
            lock=".writer.lock",
        )
        self.made_by = ("tensorboard", {"folder": self._target.place})
        # Two runs that start in the same second must not share a file.
        name = f"events.out.tfevents.{_unique_suffix()}{event_files.ENDING}"
        self.path = self._target.path / name
        with self._target.opening():
            try:
                note = self._prepare(resume_from_step)
            except OSError as error:
                raise unwritable(folder, "tensorboard_dir", error) from error
            self._file = AppendOnlyFile(
                self.path,
                "tensorboard_dir",
                header=self._event(0, file_version="brain.Event:2")
                + self._event(0, summary=tensorboard_plugins.layout()),
                lock=self._target.lock,
                fsync_seconds=fsync_seconds,
            )
        self.warnings = [*self._target.warnings, *filter(None, [note])]

    def write(self, record: StepRecord) -> None:
        self.write_many([record])

    def write_many(self, records: Sequence[StepRecord]) -> None:
        self._append(event_files.framed(*map(self._step_event, records)))
        self._step = records[-1].step

    def write_text(self, tag: str, text: str) -> None:
        self._append(self._event(self._step, summary=self._text(tag, as_markdown(text))))

    def write_setup(self, values: Mapping[str, Any], texts: Mapping[str, str]) -> None:
        if values:
            summary = self._text("setup/values", values_as_markdown(values))
            self._append(self._event(self._step, summary=summary))
        for tag, text in texts.items():
            self.write_text(f"setup/{tag}", text)
        chosen = tensorboard_plugins.hyperparameters(values, texts)
        if chosen and not self._is_experiment:
            self._is_experiment = True
            for summary in tensorboard_plugins.experiment(chosen):
                self._append(self._event(self._step, summary=summary))

    def write_failure(self, reason: str) -> None:
        self._has_failed = True
        self.write_text("failure", reason)

    def flush(self) -> None:
        self._file.sync()
        self._target.flush()

    def close(self) -> None:
        if self._is_experiment:
            end = tensorboard_plugins.ended(self._has_failed)
            self._is_experiment = False
            self._append(self._event(self._step, summary=end))
        self._file.close()
        self._target.close()

    def _prepare(self, resume_from_step: int) -> str:
        if not resume_from_step:
            return event_files.set_aside(self._target.path)
        for file in event_files.ours(self._target.path):
            event_files.cut(file, resume_from_step, self._events.Event)
        return ""

    def _step_event(self, record: StepRecord) -> bytes:
        """A step as a serialised ``Event``."""
        scalars = record.scalars
        if record.flags:
            scalars = {**scalars, **{f"flags/{flag}": 1.0 for flag in record.flags}}
        try:
            parts = [self._form(record.kind, *scalars).filled(scalars.values())]
        except (TypeError, ValueError, OverflowError) as error:
            raise RecordError(f"step {record.step} cannot be an event: {error}") from error
        if record.kind != "step":
            parts.append(self._text("step/kind", record.kind).SerializeToString())
        if record.notes:
            text = self._text("step/notes", "\n\n".join(record.notes))
            parts.append(text.SerializeToString())
        head = event_files.event_head(record.step, record.unix_seconds)
        return head + event_files.as_field(_SUMMARY_FIELD, b"".join(parts))

    def _form(self, kind: str, *names: str) -> ScalarsForm:
        """The form for steps of this kind with these scalars."""
        if form := self._forms.get((kind, *names)):
            return form
        if len(self._forms) >= _MOST_FORMS:
            self._forms.clear()
        tags = dict(enumerate(self._names.of(names)))
        overview = tensorboard_plugins.OVERVIEW if kind == "step" else {}
        columns = [*tags.items()]
        columns += [(names.index(name), tag) for name, tag in overview.items() if name in names]
        form = self._forms[kind, *names] = ScalarsForm(columns)
        return form

    def _text(self, tag: str, text: str) -> Any:
        return self._text_summary(tag, text)

    def _append(self, events: bytes) -> None:
        self._file.append(events)
        self._target.wrote()

    def _event(self, step: int, unix_seconds: float | None = None, **content: Any) -> bytes:
        wall_time = time.time() if unix_seconds is None else unix_seconds
        event = self._events.Event(step=step, wall_time=wall_time, **content)
        return event_files.framed(event.SerializeToString())


def write_scalars(
    folder: str | os.PathLike[str], run: str, step: int, scalars: Mapping[str, float]
) -> None:
    """Writes scalars of one step as a run of its own, beside the run in `folder`.

    TensorBoard follows only the last file in a folder, so a second writer needs a folder of its
    own. Writing the same step again replaces it.

    Args:
        folder: TensorBoard's log directory.
        run: name of the subfolder to write.
        step: the step of all scalars.
        scalars: values by name.

    Raises:
        UserError: the folder cannot be written to.
    """
    event = _tensorboardx("proto.event_pb2").Event
    summary = _tensorboardx("proto.summary_pb2").Summary()
    for name, value in scalars.items():
        summary.value.add(tag=name, simple_value=value)
    now = time.time()
    events = (
        event(wall_time=now, file_version="brain.Event:2"),
        event(wall_time=now, step=step, summary=summary),
    )
    place = check_path(folder, "tensorboard")
    if isinstance(place, Address):
        raise UserError(
            f"tensorboard={os.fspath(folder)!r} is an object store; expected a local or mounted "
            f"folder; write there, and copy the folder"
        )
    path = place / run / f"events.out.tfevents.{step:010d}.{run}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"".join(event_files.framed(e.SerializeToString()) for e in events))
    except OSError as error:
        raise unwritable(folder, "tensorboard", error) from error


def _unique_suffix() -> str:
    """Seconds first, because TensorBoard reads a folder's files in name order."""
    now = time.time_ns()
    return f"{now // 10**9}.{socket.gethostname()}.{os.getpid()}.{now % 10**9:09d}"


def _tensorboardx(module: str) -> Any:
    return require(f"tensorboardX.{module}", "the sink 'tensorboard'", install="tensorboardX")
