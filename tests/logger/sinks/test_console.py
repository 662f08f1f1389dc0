"""The line of a step: MaxText's, with ours at its end."""

import io
import os
import re
import subprocess
import sys
import termios
from collections.abc import Sequence

import pytest

from mfu_jax.errors import UserError
from mfu_jax.logger.sinks.console import format_window
from mfu_jax.sinks import SINKS, ConsoleSink, Sink, StepRecord, make_sink, register_sink

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
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

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
    assert lines.getvalue().startswith("completed step: 4")


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
    assert "\x1b" not in without  # no bar that she did not ask for
    for shown in (without, with_bar):
        assert shown.count("shard [/data/x] :smile:\r\n") == 1
        assert shown.count("wide" * 30 + "\r\n") == 1
        lines = re.findall(r"completed step: \d, .*eval/n{60}: 1.*\r\n", shown)
        assert [text[16] for text in lines] == ["0", "1", "2"]
    assert "3/10" in with_bar
    # The bar is erased before each of our lines.
    assert len(re.findall(r"\x1b\[2Kcompleted step: ", with_bar)) == 3


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
        with pytest.raises(UserError, match="unknown sink 'consol'; did you mean 'console'"):
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
