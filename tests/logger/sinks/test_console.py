"""The line of a step: MaxText's, with ours at its end."""

import io
import os
import re
import subprocess
import sys
import termios
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, strategies

from mfu_jax.errors import UserError
from mfu_jax.logger.sinks.console import format_short, format_window
from mfu_jax.sinks import SINKS, ConsoleSink, Sink, StepRecord, make_sink, register_sink
from mfu_jax.util.formatting import Paper

SCALARS = {
    "perf/step_time_seconds": 0.123,
    "perf/per_device_tflops_per_sec": 0.1214,
    "perf/per_device_tokens_per_sec": 8123.4,
    "learning/total_weights": 2048,
    "learning/loss": 4.2111,
    "perf/mfu": 0.412,
    "perf/hfu": 0.5492,
}

# MaxText's own line, as its users' log parsers read it.
MAXTEXT_LINE = re.compile(
    r"^completed step: (\d+), seconds: ([\d.]+), TFLOP/s/device: ([\d.]+), "
    r"Tokens/s/device: ([\d.]+), total_weights: (\d+), loss: ([\d.]+)"
)


class Terminal(io.StringIO):
    """Says that it is one."""

    def isatty(self) -> bool:
        return True


def line(scalars: dict[str, float] | None = None, **fields: object) -> str:
    stream = io.StringIO()
    values = SCALARS if scalars is None else scalars
    ConsoleSink(stream, progress=False).write(
        StepRecord(step=7, unix_seconds=0.0, scalars=values, **fields)  # type: ignore[arg-type]
    )
    return stream.getvalue()


def test_a_window_without_model_flops_says_so() -> None:
    times = {f"rolling/step_time_seconds_{name}": 0.5 for name in ("median", "p90", "p99")}
    assert format_window({"rolling/steps": 4, **times}) == (
        "last 4 measured steps: median 0.500 s, p90 0.500 s, p99 0.500 s; "
        "means: TFLOP/s/device: n/a, MFU: n/a, HFU: n/a"
    )


def test_the_line_is_maxtexts_with_mfu_and_hfu() -> None:
    assert line() == (
        "completed step: 7, seconds: 0.123, TFLOP/s/device: 0.121, Tokens/s/device: 8123.4, "
        "total_weights: 2048, loss: 4.211, MFU: 41.2%, HFU: 54.9%\n"
    )


def test_small_numbers_keep_digits_that_say_something() -> None:
    small = SCALARS | {"perf/per_device_tflops_per_sec": 0.00002134, "perf/mfu": 0.0003412}
    text = line(small)
    found = MAXTEXT_LINE.match(text)
    assert found is not None
    assert found.groups() == ("7", "0.123", "0.0000213", "8123.4", "2048", "4.211")
    assert "MFU: 0.0341%" in text


@pytest.mark.parametrize(
    ("loss", "shown"),
    [
        (205603758669824.0, "2.05604e+14"),
        (-1234567.0, "-1.23457e+06"),
        (999999.0, "999999.000"),
        (0.05, "0.050"),
        (0.0, "0.000"),
        (0.0000213, "2.13e-05"),
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
    ],
)
def test_a_loss_of_any_size_is_readable(loss: float, shown: str) -> None:
    assert f", loss: {shown}, MFU" in line(SCALARS | {"learning/loss": loss})


def test_labels_flags_and_time_outside_steps_come_last() -> None:
    extra = {"goodput/eval_seconds": 3.25, "goodput/data_wait_seconds": 0.0, "eval/avg_loss": 4.5}
    assert line(SCALARS | extra, kind="compile", flags=("mfu_over_1",)).endswith(
        "HFU: 54.9%, eval_seconds: 3.250, eval/avg_loss: 4.5, [compile], [! mfu_over_1]\n"
    )


def test_notes_have_lines_of_their_own() -> None:
    assert line(notes=("why it is so",)).splitlines()[1] == "note, step 7: why it is so"


def test_what_is_not_known_is_not_made_up() -> None:
    assert line({"perf/step_time_seconds": 0.5}) == (
        "completed step: 7, seconds: 0.500, MFU: n/a, HFU: n/a\n"
    )


def test_no_progress_bar_where_standard_error_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    plain = ConsoleSink(io.StringIO(), progress=None)
    plain.write(StepRecord(step=0, unix_seconds=0.0, scalars=SCALARS))
    plain.close()
    assert sys.stderr.getvalue() == ""

    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    lines = io.StringIO()
    bar = ConsoleSink(lines, total_steps=10, progress=None)
    bar.write(StepRecord(step=4, unix_seconds=0.0, scalars=SCALARS))
    bar.close()
    assert "5/10" in sys.stderr.getvalue()
    assert lines.getvalue().startswith("completed step: 4")  # the lines go to a file


def short(record: StepRecord, columns: int = 100, *, has_colours: bool = False) -> str:
    return format_short(record, Paper(columns, True, has_colours))


def step(scalars: dict[str, float] | None = None, **fields: Any) -> StepRecord:
    return StepRecord(step=7, unix_seconds=0.0, scalars=scalars or SCALARS, **fields)


def test_a_terminal_gets_a_short_line_with_mfu_third() -> None:
    assert short(step()) == (
        "step     7     0.123 s  MFU  41.2%  loss 4.211  HFU  54.9%  8,123 tokens/s/device"
    )
    assert short(step(), columns=40) == "step     7     0.123 s  MFU  41.2%"


@given(
    values=strategies.dictionaries(
        strategies.sampled_from([*SCALARS, "goodput/eval_seconds", "goodput/data_wait_seconds"]),
        strategies.floats(1e-9, 1e15),
    ),
    kind=strategies.sampled_from(["step", "warmup", "compile"]),
    number=strategies.integers(0, 10**7),
)
def test_no_short_line_has_more_than_100_columns(
    values: dict[str, float], kind: str, number: int
) -> None:
    record = StepRecord(step=number, unix_seconds=0.0, scalars=values, kind=kind)
    text = short(record)
    assert len(text) <= 100
    assert (f"[{kind}]" in text) == (kind != "step")
    assert re.sub(r"\x1b\[\d+m", "", short(record, has_colours=True)) == text


def test_flags_are_kept_where_there_is_room_for_nothing_else() -> None:
    assert short(step(flags=("mfu_over_1",)), columns=60).endswith("  [! mfu_over_1]")


@pytest.mark.parametrize(
    ("variables", "has_colours"),
    [
        ({"TERM": "xterm"}, True),
        ({"TERM": "dumb"}, False),
        ({"TERM": "xterm", "NO_COLOR": "1"}, False),
    ],
)
def test_colours_only_where_they_are_wanted(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], has_colours: bool
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    terminal = Terminal()
    ConsoleSink(terminal).write(step(flags=("mfu_over_1",)))
    assert terminal.getvalue().startswith("step ")
    assert ("\x1b[31m[! mfu_over_1]\x1b[0m" in terminal.getvalue()) == has_colours


def test_texts_are_as_wide_as_a_terminal_and_whole_in_a_file() -> None:
    terminal, file = Terminal(), io.StringIO()
    text = "peak of one device: " + "mfu-jax hardware " * 8
    for stream in (terminal, file):
        sink = ConsoleSink(stream)
        sink.write_setup({}, {"ledger": text, "config": "steps=9"})
        sink.write_text("note", "a\n  b")
    assert max(map(len, terminal.getvalue().splitlines())) <= 100
    assert " ".join(terminal.getvalue().split()) == " ".join(f"{text} a b".split())
    assert file.getvalue() == f"{text}\na\n  b\n"


def test_maxtexts_line_in_a_terminal_and_the_short_one_in_a_file_are_a_setting_away() -> None:
    terminal, file = Terminal(), io.StringIO()
    ConsoleSink(terminal, line="maxtext").write(step())
    ConsoleSink(file, line="short").write(step())
    assert MAXTEXT_LINE.match(terminal.getvalue())
    assert file.getvalue() == f"{short(step())}\n"
    with pytest.raises(UserError, match="did you mean 'short'"):
        ConsoleSink(file, line="shrot")


def test_a_bar_in_a_terminal_takes_the_place_of_ordinary_lines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    bar = ConsoleSink(total_steps=40, progress=True)
    bar.write(step(kind="compile"))
    bar.write_many([step(), step(notes=("slow",)), step()])
    bar.close()
    shown = sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert "compiling…" in shown
    assert "8/40 · 0.123 s · MFU 41.2% · loss 4.211" in shown
    assert shown.count("step     7") == 2  # the one that compiled, and the one with a note


def test_a_bar_in_a_file_takes_the_place_of_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    bar = ConsoleSink(total_steps=40, progress=True)
    bar.write_many([step(), step(notes=("slow",)), step()])
    bar.close()
    assert sys.stdout.getvalue().count("step     7") == 3  # type: ignore[attr-defined]


LOOP_IN_A_TERMINAL = """
import sys
from mfu_jax.logger.metric_logger import MetricLogger
from mfu_jax.sinks import ConsoleSink

streams = sys.stdout, sys.stderr

def train(sinks):
    with MetricLogger(sinks=sinks, write_period_seconds=0, hang_factor=0) as logger:
        print("shard [/data/x] :smile:", flush=True)
        print("wide" * 30, file=sys.stderr, flush=True)
        for step in range(3):
            logger.record(step, {"loss": 2.5, "eval/" + "n" * 60: 1.0})
            logger.flush()
        assert (sys.stdout, sys.stderr) == streams

train(None)
print("now with a bar", flush=True)
train([ConsoleSink(total_steps=10, progress=True)])
"""


def in_a_terminal(program: str) -> str:
    """What a Python program shows in a terminal of 40 columns."""
    leader, terminal = os.openpty()
    termios.tcsetwinsize(terminal, (24, 40))
    environment = os.environ | {"TERM": "xterm", "JAX_PLATFORMS": "cpu"}
    environment.pop("COLUMNS", None)
    child = subprocess.Popen(
        [sys.executable, "-c", program], stdout=terminal, stderr=terminal, env=environment
    )
    os.close(terminal)
    shown = b""
    try:
        while piece := os.read(leader, 2**16):
            shown += piece
    except OSError:  # Linux: nobody holds the other end any more
        pass
    os.close(leader)
    assert child.wait() == 0, shown.decode()
    return shown.decode()


@pytest.mark.full
def test_a_users_prints_reach_her_terminal_as_they_are() -> None:
    without, _, with_bar = in_a_terminal(LOOP_IN_A_TERMINAL).partition("now with a bar\r\n")
    assert "\x1b[2K" not in without  # no bar that she did not ask for
    for shown in (without, with_bar):
        assert shown.count("shard [/data/x] :smile:\r\n") == 1
        assert shown.count("wide" * 30 + "\r\n") == 1
        assert re.findall(r"step +(\d) +\S+ s", shown) == ["0", "1", "2"]
        assert shown.count("n" * 60) == 3
    assert "3/10" in with_bar
    # The bar is erased before each of our lines.
    assert len(re.findall(r"\x1b\[2K(?:\x1b\[2m)?step ", with_bar)) == 3


def test_a_sink_that_writes_many_records_writes_one_and_one_of_neither_says_so() -> None:
    class Batches(Sink):
        def write_many(self, records: Sequence[StepRecord]) -> None:
            written.append(list(records))

    written: list[list[StepRecord]] = []
    record = StepRecord(step=1, unix_seconds=0.0, scalars={})
    Batches().write(record)
    assert written == [[record]]
    with pytest.raises(NotImplementedError):
        Sink().write(record)


def test_sinks_are_found_by_name_and_can_be_added() -> None:
    @register_sink("mine")
    class Mine(Sink):
        def __init__(self, answer: int = 0) -> None:
            self.answer = answer

    try:
        made = make_sink("mine", answer=42)
        assert isinstance(made, Mine)
        assert made.answer == 42
        with pytest.raises(UserError, match=r"(?s)unknown sink 'consol'.*did you mean 'console'"):
            make_sink("consol")
    finally:
        del SINKS["mine"]
    assert {"console", "jsonl", "tensorboard", "csv"} <= set(SINKS)


def test_several_steps_are_one_write_and_one_flush() -> None:
    class Stream(io.StringIO):
        writes = flushes = 0

        def write(self, text: str) -> int:
            self.writes += 1
            return super().write(text)

        def flush(self) -> None:
            self.flushes += 1

    stream = Stream()
    sink = ConsoleSink(stream, progress=False)
    steps = [StepRecord(step=s, unix_seconds=0.0, scalars=SCALARS, notes=("why",)) for s in (1, 2)]
    sink.write_many(steps)
    assert [text[:17] for text in stream.getvalue().splitlines()] == [
        "completed step: 1",
        "note, step 1: why",
        "completed step: 2",
        "note, step 2: why",
    ]
    assert (stream.writes, stream.flushes) == (1, 1)


def test_a_terminal_without_unicode_shows_the_rest() -> None:
    raw = io.BytesIO()
    sink = ConsoleSink(io.TextIOWrapper(raw, encoding="ascii"), progress=False)
    sink.write_text("setup", "2 × cpu")
    assert raw.getvalue() == b"2 ? cpu\n"
