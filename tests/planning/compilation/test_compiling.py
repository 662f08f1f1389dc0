"""Compiling in a child process: what it returns, and what each kind of failure says."""

import dataclasses
import re
import signal
import time
from pathlib import Path

import pytest

from mfu_jax.errors import UserError
from mfu_jax.planning.compilation import compiling
from mfu_jax.planning.compilation.compiling import (
    Limits,
    Request,
    TooLarge,
    UnknownOptionError,
    compile_known_flags,
    compile_program,
    request_json,
)
from mfu_jax.planning.targets import parse_target, target_config, with_memory_fraction
from tests.support.fake_compiler import TEXT
from tests.support.paths import DATA

TARGET = parse_target(topology="v6e-8")
GIB = 2**30


@pytest.fixture(autouse=True)
def logs_of_failures(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def _request(flags=(), **config):
    module = "tests.support.fake_compiler"
    return Request(module=module, target=TARGET, config=config, flags=flags)


@pytest.mark.full
def test_the_childs_dump_and_its_progress():
    words = []
    assert compile_program(_request(), progress=words.append).program.as_text() == TEXT
    assert words == ["compiling"]


@pytest.mark.full
@pytest.mark.parametrize("scheduled", [False, True])
def test_what_the_child_chose_is_a_note(scheduled):
    found = compile_program(_request(chose="a policy", scheduled=scheduled))
    assert found.notes == ("a policy",)


@pytest.mark.full
@pytest.mark.parametrize(
    ("message", "used", "limit"),
    [
        (
            "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO "
            "temporaries (37.82G) exceeds available HBM (31.25G).",
            37.82,
            31.25,
        ),
        ("XLA:TPU compile permanent error. Used 34.50G of 31.25G hbm. Exceeded by", 34.5, 31.25),
    ],
)
def test_a_program_that_does_not_fit_is_figures(message, used, limit):
    refusal = compile_program(_request(message=message)).program
    assert isinstance(refusal, TooLarge)
    assert (refusal.used_bytes, refusal.limit_bytes) == (int(used * GIB), int(limit * GIB))


@pytest.mark.full
def test_unknown_flags_and_keys_are_left_out_and_said(tmp_path):
    log = tmp_path / "log"
    request = _request(
        ("--xla_old=true", "--xla_new=true", "--xla_older=1", "--xla_old_and_known=1"),
        arguments=["old_key=3", "model_name=llama2-7b"],
        log=str(log),
    )
    program, notes = compile_known_flags(request)
    assert program.as_text() == TEXT
    assert [note.rpartition(": ")[2] for note in notes] == ["xla_old, xla_older", "old_key"]
    assert len(log.read_text().splitlines()) == 3  # compiles: all flags at once, then the key


@pytest.mark.full
@pytest.mark.parametrize("given", [(), ("--xla_on=true",)])
def test_a_refused_flag_is_switched_off_and_said(given):
    """Left out, it would have its default: libtpu names the flag, set or not."""
    program, notes = compile_known_flags(_request(given, refuses="xla_on"))
    assert program.as_text() == TEXT
    assert len(notes) == 1
    assert notes[0].endswith("refuses the flag --xla_on: --xla_on=false is passed")


@pytest.mark.full
def test_gpu_flags_that_are_unknown_are_all_left_out():
    """XLA's own words; it names them with their values, and ends the process."""
    said = "F1122 parse_flags_from_env.cc:234] Unknown flags in XLA_FLAGS: --xla_old=0 --xla_older="
    with pytest.raises(UnknownOptionError) as failure:
        compile_program(_request(message=said))
    assert failure.value.options == ("xla_old", "xla_older")


@pytest.mark.full
@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"crash": signal.SIGSEGV}, "killed by signal 11"),
        ({"message": "what went wrong"}, "exit code 1: what went wrong"),
        (
            {
                "message": "F1123 22:13:08.081828   25361 emitter.cc:175] Check failed: kib > 0 \n"
                "*** Check failure stack trace: ***\n    @ 0x7f58e549bc54  xla::Emit()\n"
                "E1123 22:13:08.394492   25361 process_state.cc:708] RAW: Raising signal 6"
            },
            r"exit code 1: emitter\.cc:175\] Check failed: kib > 0; the whole log",
        ),
        (
            {
                "message": "ValueError: 255 tokens\n----\nFor simplicity, JAX has removed its "
                "internal frames from the traceback of the following exception. Set …"
            },
            "exit code 1: ValueError: 255 tokens",
        ),
        ({"message": "ModuleNotFoundError: No module named 'maxtext'"}, "has no MaxText"),
        (
            {"message": "RuntimeError: JAX TPU support not installed; cannot generate"},
            r"hint: run pip install .mfu-jax\[plan-tpu\]",
        ),
        (
            {"message": "NotImplementedError: topology not implemented for cuda"},
            r"hint: run pip install .mfu-jax\[plan-gpu\]",
        ),
        ({"crash": signal.SIGKILL}, "killed, probably as it ran out of host memory"),
        ({"message": "terminate called after throwing std::bad_alloc"}, "out of host memory"),
        ({"message": "F1 low_level_alloc.cc:625] RAW: mmap error: 12"}, "out of host memory"),
    ],
)
def test_failures_are_one_line(config, word):
    with pytest.raises(UserError, match=word):
        compile_program(_request(**config))


@pytest.mark.full
def test_the_whole_log_of_a_failure_is_kept(logs_of_failures):
    message = "F0101 tpu.cc:1 Check failed: cores > 0\nwhat went wrong"
    with pytest.raises(UserError, match="what went wrong; the whole log: ") as failure:
        compile_program(_request(message=message))
    path = Path(str(failure.value).rpartition(": ")[2])
    assert path.parent == logs_of_failures
    assert message in path.read_text()


@pytest.mark.full
def test_a_compiler_that_takes_too_long_is_ended():
    with pytest.raises(UserError, match=r"took over 0 s"):
        compile_program(_request(seconds=60), limits=Limits(seconds=0.2))


@pytest.mark.full
def test_a_compiler_keeps_to_its_memory():
    limits = Limits(memory_bytes=2**30)
    with pytest.raises(UserError, match=r"out of host memory \(compile_gib=1\)"):
        compile_program(_request(bytes=2**31), limits=limits)
    assert compile_program(_request(bytes=2**31)).program.as_text() == TEXT


@pytest.mark.full
@pytest.mark.parametrize(
    "said",
    [
        "LLVM ERROR: pthread_create failed: Resource temporarily unavailable",
        "F1123 22:27:34.1 9 env.cc:93] Check failed: x creation via pthread_create() failed.",
    ],
)
def test_a_thread_without_room_for_its_stack_is_out_of_the_memory_that_was_allowed(said):
    """The compilers' own words, of real compiles with less than half a GiB."""
    with pytest.raises(UserError, match=r"out of host memory \(compile_gib=1\)"):
        compile_program(_request(message=said), limits=Limits(memory_bytes=2**30))
    with pytest.raises(UserError, match=r"(?s)exit code 1: .*pthread_create"):
        compile_program(_request(message=said))


@pytest.mark.full
def test_a_crash_within_a_limit_of_memory_names_the_limit():
    with pytest.raises(UserError, match="signal 11, perhaps for compile_gib=1: "):
        compile_program(_request(crash=signal.SIGSEGV), limits=Limits(memory_bytes=2**30))


def test_less_memory_than_any_compile_takes_is_refused_at_once():
    """With 0.1 GiB, numpy's BLAS was seen to ask for memory for ever."""
    with pytest.raises(UserError, match=r"(?s)compile_gib=0\.1 .*expected 0\.4 or more"):
        compile_program(_request(seconds=60), limits=Limits(memory_bytes=round(0.1 * 2**30)))


def test_a_gpus_description_has_the_fields_of_the_recorded_one():
    """The recorded one is XLA's own file for H100, of whose memory it takes 80%."""
    recorded = (DATA / "h100_target_config.txtpb").read_text()
    described = target_config(parse_target(hardware="h100", devices=8).chip, 0.8)
    fields = re.compile(r"(\w+): ([\d.]+)")
    ours, xlas = dict(fields.findall(described)), dict(fields.findall(recorded))
    assert {key: ours.get(key) for key in xlas if key != "minor"} == {
        key: value for key, value in xlas.items() if key != "minor"
    }
    assert '  runtime_version: "12.8.0"\n' in described  # fp8 matmuls need CUDA 12


@pytest.mark.full
def test_the_compiler_reads_the_profile():
    target = parse_target(hardware="h100", devices=8)
    request = dataclasses.replace(_request(reads_profile=True), target=target, profile="costs {}\n")
    assert compile_program(request).program.text == "costs {}\n"


@pytest.mark.parametrize("given", [0.94, None])
def test_xla_schedules_within_the_share_of_a_gpus_memory_that_jax_takes(given: float | None):
    """XLA takes 80% of the memory described (openxla/xla, gpu_hlo_schedule.cc), JAX 75%."""
    target = parse_target(hardware="h100", devices=8)
    recorded = (DATA / "h100_target_config.txtpb").read_text()
    (size,) = re.findall(r"device_memory_size: (\d+)", recorded)
    target = with_memory_fraction(target, given) if given else target
    request = dataclasses.replace(_request(), target=target)
    (scaled,) = re.findall(r"device_memory_size: (\d+)", request_json(request)["target_config"])
    assert 0.8 * int(scaled) == pytest.approx((given or 0.75) * int(size))


@pytest.mark.full
@pytest.mark.parametrize(
    "then", [{"seconds": 60}, {"crash": signal.SIGSEGV}, {"crash": signal.SIGKILL}, {}]
)
def test_a_scheduled_program_is_taken_with_its_memory_whatever_machine_code_does(then):
    words = []
    began = time.monotonic()
    program, notes = compile_program(_request(scheduled=True, **then), progress=words.append)
    assert time.monotonic() - began < 30
    assert (program.as_text(), notes, words) == (TEXT, (), ["compiling"])
    assert program.memory["peak_memory_in_bytes"] == 3 * 512


@pytest.mark.full
def test_an_error_after_the_schedule_is_a_note(monkeypatch):
    monkeypatch.setattr(compiling, "is_scheduled", lambda folder: False)  # the error is in time
    program, notes = compile_program(_request(scheduled=True, message="exceeds memory of VMEM"))
    assert program.as_text() == TEXT
    assert notes == ("the compiler failed once it was scheduled: exceeds memory of VMEM",)


@pytest.mark.full
def test_a_refused_program_that_was_scheduled_is_kept():
    refusal = compile_program(_request(scheduled=True, message="34.5G exceeds 31.25G")).program
    assert isinstance(refusal, TooLarge)
    assert refusal.program.as_text() == TEXT
