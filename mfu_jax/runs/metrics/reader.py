"""Reads the lines of a metrics file, or of a part of one, into a table of steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from mfu_jax.runs.metrics.foreign import ForeignLines
from mfu_jax.runs.metrics.lines import (
    NAMES,
    TIME,
    are_sane,
    foreign_step,
    form_of,
    is_special,
    read_line,
    words_of,
)
from mfu_jax.runs.metrics.record_templates import Templates
from mfu_jax.runs.metrics.step_table import LoggedStep, StepTable
from mfu_jax.util.user_files import text_lines

_MOST_NOTES = 10_000


class Reader:
    """Reads the lines of a file one by one, and counts those that are not steps.

    Attributes:
        steps: found so far.
        forms: of the lines: ``jsonl``, ``maxtext``, ….
        counts: lines that are not new steps, by reason.
        notes: step → its record's notes in words, for the last steps that have any.
        last_line: the last line with a step.
        profile_line: the last line with profile numbers.
        gpu_line: the last line with a reading of the GPUs.
    """

    def __init__(self) -> None:
        self.steps = StepTable()
        self.forms: set[str] = set()
        self.counts = Counter[str]()
        self.notes: dict[int, str] = {}
        self.last_line = ""
        self.profile_line = ""
        self.gpu_line = ""
        self._foreign = ForeignLines()
        self._templates = Templates(NAMES, is_special)

    def read(self, blocks: Iterable[bytes]) -> None:
        """Adds the lines of a file, in blocks."""
        for block in blocks:
            self.gpu_line = _last_line_with(b'"gpu/', block) or self.gpu_line
            place = 0
            while place < len(block):
                place = self._read_rows(block, place) or self._read_one(block, place)
        for found in self._foreign.rest():
            self._add(*foreign_step(found), self.last_line)

    def _read_rows(self, block: bytes, begin: int) -> int:
        """Adds the records of a known shape from a position on; returns their end; 0: none."""
        found = self._templates.rows(block, begin, self.steps.last_number)
        if found is None:
            return 0
        template, rows = found
        if not are_sane(template, rows):
            while begin < rows.end:
                begin = self._read_one(block, begin)
            return begin
        self.forms.add(form_of(template.kind))
        self.steps.extend(template.kind, template.names, rows.numbers, rows.values)
        self.last_line = block[rows.last : rows.end].decode("utf-8", "replace")
        return rows.end

    def _read_one(self, block: bytes, begin: int) -> int:
        """Adds the line at a position; returns its end."""
        end = block.find(b"\n", begin) + 1 or len(block)
        for line in text_lines(block[begin:end]):
            for form, step in self._steps_of(line):
                self._add(form, step, line)
        return end

    def _steps_of(self, line: str) -> Iterable[tuple[str, LoggedStep | None]]:
        """The form and the steps that a line completes; no step if the line is broken."""
        try:
            theirs = self._foreign.take(line)
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            return [("", None)]
        if theirs is not None:
            return map(foreign_step, theirs)
        found = read_line(line)
        return [] if found is None else [found]

    def _add(self, form: str, step: LoggedStep | None, line: str) -> None:
        if step is None:
            self.counts["unreadable"] += 1
        elif TIME not in step.scalars:
            self.counts["other_records"] += 1
        elif step.number == self.steps.last_number:
            self.counts["repeated"] += 1
        else:
            self.forms.add(form)
            self.steps.append(step)
            self._remember(line, step.number)
            if form in ("jsonl", "maxtext"):
                self._templates.learn(line)

    def _remember(self, line: str, step: int) -> None:
        """Keeps the last record, and the notes of a record that has any."""
        self.last_line = line
        if '"profile/mfu"' in line:
            self.profile_line = line
        if '"notes"' in line or '"flags"' in line:
            if len(self.notes) >= _MOST_NOTES:
                del self.notes[next(iter(self.notes))]
            self.notes[step] = words_of(line)

    def join(self, later: Reader) -> None:
        """Appends what another reader has read of the following lines."""
        is_repeated = later.steps and later.steps.numbers[0] == self.steps.last_number
        self.counts.update(later.counts)
        self.counts["repeated"] += bool(is_repeated)
        self.steps.extend_table(later.steps, skip=bool(is_repeated))
        self.forms |= later.forms
        self.notes |= later.notes
        for step in list(self.notes)[: max(0, len(self.notes) - _MOST_NOTES)]:
            del self.notes[step]
        self.last_line = later.last_line or self.last_line
        self.profile_line = later.profile_line or self.profile_line
        self.gpu_line = later.gpu_line or self.gpu_line

    def __getstate__(self) -> dict[str, object]:
        """For another process: the results, without the compiled expressions."""
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}


def _last_line_with(words: bytes, block: bytes) -> str:
    """The last line of a block that contains the words; empty if none does."""
    place = block.rfind(words)
    if place < 0:
        return ""
    begin, end = block.rfind(b"\n", 0, place) + 1, block.find(b"\n", place)
    return block[begin : end if end >= 0 else len(block)].decode("utf-8", "replace")
