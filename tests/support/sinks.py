"""A sink that keeps what it is given."""

from collections.abc import Sequence

from mfu_jax.logger.sinks import Sink, StepRecord
from mfu_jax.logger.summary import Summary


class ListSink(Sink):
    """Keeps everything; the first writes raise `failures`, one each."""

    def __init__(self, failures: Sequence[Exception] = (), *, every_step: bool = True) -> None:
        self.records: list[StepRecord] = []
        self.texts: list[tuple[str, str]] = []
        self.summary: Summary | None = None
        self.closed = False
        self.failures = list(failures)
        self.keeps_every_step = every_step

    def write(self, record: StepRecord) -> None:
        if self.failures:
            raise self.failures.pop(0)
        self.records.append(record)

    def write_text(self, tag: str, text: str) -> None:
        self.texts.append((tag, text))

    def write_summary(self, summary: Summary) -> None:
        self.summary = summary

    def close(self) -> None:
        self.closed = True

    def scalar(self, name: str) -> list[float | None]:
        """One value per record, None where the record has none."""
        return [record.scalars.get(name) for record in self.records]
