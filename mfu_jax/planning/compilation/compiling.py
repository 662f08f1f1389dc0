"""Compiles in a child process, to isolate the compiler's crashes, memory and environment."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from mfu_jax.dumps.files import load
from mfu_jax.dumps.program import ProgramDump
from mfu_jax.errors import UserError
from mfu_jax.planning.compilation.child_process import MEMORY
from mfu_jax.planning.compilation.scheduled_text import dump_flags, is_scheduled, read_scheduled
from mfu_jax.planning.targets import Target, target_config
from mfu_jax.util.child_process import child_environment, run_logged

PROFILE_FLAG = "xla_gpu_pgle_profile_file_or_directory_path"
_STAGES = ("tracing", "compiling", "writing")  # progress that a child prints
_NOTE = "note: "  # begins what it prints for the plan's notes
# Without these, libtpu looks for attached TPUs and their metadata server.
_TPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
_SIZE = r"\(?([\d.]+)([KMGT]?)\)?"
_DOES_NOT_FIT = re.compile(
    rf"{_SIZE} exceeds (?:available HBM )?{_SIZE}|Used {_SIZE} of {_SIZE} hbm", re.IGNORECASE
)
_OUT_OF_MEMORY = re.compile(
    r"std::bad_alloc|MemoryError|Cannot allocate memory|bad allocation|mmap error: 12\b|"
    r"LLVM ERROR: out of memory|OpenBLAS error: Memory allocation|"
    r"tcmalloc.* (?:failed|[Uu]nable to allocate)"
)
_NO_THREAD = re.compile(r"pthread_create(?:\(\))? failed")
_NO_COMPILER = (
    (re.compile(r"TPU support not installed|No module named 'libtpu'"), "plan-tpu"),
    (re.compile(r"topology not implemented for cuda|Unknown backend cuda"), "plan-gpu"),
)
_UNKNOWN_FLAG = re.compile(r"Unknown command line flag '([^']+)'")
_UNKNOWN_GPU_FLAGS = re.compile(r"Unknown flags? in XLA_FLAGS: (.+)")
_FLAG_NAME = re.compile(r"--(\w+)")
_REFUSED_FLAG = re.compile(r"FAILED_PRECONDITION: .*Please disable it with (\w+)=false")
_UNKNOWN_KEY = re.compile(r"ValueError: '(\w+)' not in '")
_FATAL = re.compile(r"^F\d{4} \S+ +\d+ (\S+:\d+\] .*\S)", re.MULTILINE)  # as absl logs it
_ABOUT_TRACEBACKS = "For simplicity, JAX has removed its internal frames"
# What a tiny step needs (observed); with less, libraries fail in many ways, or retry forever.
_LEAST_BYTES = int(0.4 * 2**30)
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True, kw_only=True)
class Request:
    """A program to compile.

    Attributes:
        module: compiles it, run as ``python -m module REQUEST.json OUT.mfu``.
        target: the chips.
        python: the interpreter that runs the module; it may lack mfu_jax.
        config: the module's input.
        flags: compiler flags, as ``--name=value``.
        identity: what else determines the program: part of the cache key, not passed to the module.
        profile: durations by which XLA schedules a GPU's program, as text; empty: none.
    """

    module: str
    target: Target
    python: str = sys.executable
    config: Mapping[str, Any] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    identity: Mapping[str, Any] = field(default_factory=dict)
    profile: str = ""


@dataclass(frozen=True, kw_only=True)
class TooLarge:
    """The compiler's refusal of a program that does not fit.

    Attributes:
        used_bytes: what the program needs at its peak.
        limit_bytes: what the device offers.
        message: the compiler's message.
        program: the program as scheduled; None if the compiler did not get that far.
    """

    used_bytes: int
    limit_bytes: int
    message: str
    program: ProgramDump | None = field(default=None, compare=False)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a compile.

    Attributes:
        seconds: wall-clock time.
        memory_bytes: host memory that it allocates, excluding mapped libraries; 0: no limit.
    """

    seconds: float = 1800.0
    memory_bytes: int = 0


class Compiled(NamedTuple):
    """The result of a compile.

    Attributes:
        program: the program, or the compiler's figures if it does not fit.
        notes: what was left out, what the child chose, and an error after the schedule.
    """

    program: ProgramDump | TooLarge
    notes: tuple[str, ...] = ()


def compile_program(
    request: Request,
    *,
    limits: Limits | None = None,
    progress: Callable[[str], None] = lambda word: None,
) -> Compiled:
    """Compiles for chips that are not attached.

    A TPU's compiler is stopped once the program is scheduled: machine code changes nothing of it.
    So an error that only machine code has is mostly not seen; `result.vmem` looks for kernels that
    are too large for VMEM.

    Args:
        request: the program and the chips.
        limits: limits of the child process.
        progress: called with a word for each stage.

    Raises:
        UserError: the compiler is not installed, failed, crashed, or ran out of time or memory.
    """
    limits = limits or Limits()
    if 0 < limits.memory_bytes < _LEAST_BYTES:
        raise UserError(
            f"{_allowed(limits)} is out of host memory before any compile; expected 0.4 or more"
        )
    with tempfile.TemporaryDirectory(prefix="mfu-jax-plan-") as folder:
        out, dumps = Path(folder, "program.mfu"), Path(folder, "xla")
        asked = Path(folder, "request.json")
        asked.write_text(json.dumps(request_json(request)), encoding="utf-8")
        command = [request.python, "-m", request.module, str(asked), str(out)]
        stages = _Stages(Path(folder, "stages"), dumps, progress)
        if request.profile:
            written = Path(folder, "profile.pbtxt")
            written.write_text(request.profile, encoding="utf-8")
            flag = f"--{PROFILE_FLAG}={written}"
            request = dataclasses.replace(request, flags=(*request.flags, flag))
        file = Path(folder, "log")
        code = run_logged(
            command,
            _environment(request, limits, dumps),
            file,
            limits.seconds,
            output=stages.path,
            is_over=stages.is_over,
        )
        stages.report()
        notes = stages.notes()
        log = file.read_text(encoding="utf-8", errors="replace")
        scheduled = read_scheduled(dumps)
        if code == 0 and out.exists():
            return Compiled(scheduled or load(out), notes)
        if refusal := _refusal(log):
            return Compiled(dataclasses.replace(refusal, program=scheduled), notes)
        if scheduled:
            failed = f"the compiler failed once it was scheduled: {_last_line(log)}"
            return Compiled(scheduled, (*notes, failed) if code and code > 0 else notes)
        return _raise(request, code, log, limits)


class _Stages:
    """How far a compiling child process is."""

    def __init__(self, path: Path, dumps: Path, progress: Callable[[str], None]) -> None:
        self.path, self._dumps, self._progress = path, dumps, progress
        self._reported = 0

    def is_over(self) -> bool:
        """Reports what is new; True once a TPU program is scheduled."""
        self.report()
        return is_scheduled(self._dumps)

    def report(self) -> None:
        """Reports the stages that the child has printed since."""
        printed = [line for line in self._lines() if line in _STAGES]
        for word in printed[self._reported :]:
            self._progress(word)
        self._reported = len(printed)

    def notes(self) -> tuple[str, ...]:
        """What the child has printed for the plan."""
        return tuple(x.removeprefix(_NOTE) for x in self._lines() if x.startswith(_NOTE))

    def _lines(self) -> list[str]:
        return [line.strip() for line in self.path.read_text("utf-8").splitlines()]


def compile_known_flags(
    request: Request,
    *,
    limits: Limits | None = None,
    progress: Callable[[str], None] = lambda word: None,
) -> Compiled:
    """Compiles, leaving out flags and MaxText keys that the installed version does not know.

    Returns:
        As `compile_program`; the notes list what was left out.

    Raises:
        UserError: as `compile_program`.
    """
    notes: list[str] = []
    while True:
        try:
            found = compile_program(request, limits=limits, progress=progress)
            return found._replace(notes=(*notes, *found.notes))
        except UnknownOptionError as error:
            flags = tuple(f for f in request.flags if not error.sets(f)) + error.instead
            words = request.config.get("arguments", ())
            config = {**request.config, "arguments": [w for w in words if not error.sets(w)]}
            smaller = dataclasses.replace(request, flags=flags, config=config)
            if smaller == request:
                raise
            request = smaller
            notes.append(error.note)


class NoCompilerError(UserError):
    """The compiler, or MaxText, is not installed: no other program would compile either."""


class UnknownOptionError(UserError):
    """The compiler, or the trainer, does not know some options.

    Attributes:
        options: names of these options.
        instead: flags to pass in their place.
        note: describes what is left out or passed instead.
    """

    def __init__(self, message: str, *options: str, instead: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.options, self.instead = options, instead
        self.note = f"left out, unknown to what is installed: {', '.join(options)}"
        if instead:
            self.note = f"{message}: {' '.join(instead)} is passed"

    def sets(self, word: str) -> bool:
        """Whether a ``key=value`` or a flag sets one of them."""
        return word.partition("=")[0].lstrip("-") in self.options


def compiler_flags(flags: str | Sequence[str]) -> tuple[str, ...]:
    """Splits flags into words; compilers silently ignore words that are not flags.

    Args:
        flags: ``--name=value`` words, in one string or as a sequence.

    Raises:
        UserError: a word is not a flag.

    >>> compiler_flags("--xla_a=1 --xla_b=true")
    ('--xla_a=1', '--xla_b=true')
    """
    words = flags.split() if isinstance(flags, str) else tuple(flags)
    for word in words:
        if not word.startswith("--"):
            raise UserError(f"xla_flags has {word!r}; expected flags as --name=value")
    return tuple(words)


def request_json(request: Request) -> dict[str, Any]:
    """The compiling module's input, as JSON values."""
    target = request.target
    is_gpu = target.platform == "cuda"
    return {
        "config": dict(request.config),
        "platform": target.platform,
        "topology": target.topology,
        "slices": target.slices,
        "rings": list(target.rings),
        "devices": target.devices,
        "target_config": target_config(target.chip, target.memory_fraction) if is_gpu else "",
    }


def _environment(request: Request, limits: Limits, dumps: Path) -> dict[str, str]:
    environment = child_environment(JAX_PLATFORMS="cpu", PYTHONUNBUFFERED="1")
    environment[MEMORY] = str(limits.memory_bytes)
    flags = " ".join(request.flags)
    if request.target.platform == "tpu":
        own = f"{os.environ.get('XLA_FLAGS', '')} {dump_flags(dumps)}"
        return {**environment, **_TPU_ENVIRONMENT, "LIBTPU_INIT_ARGS": flags, "XLA_FLAGS": own}
    return {**environment, "XLA_FLAGS": flags}


def _refusal(log: str) -> TooLarge | None:
    if not (match := _DOES_NOT_FIT.search(log)):
        return None
    a, a_unit, b, b_unit = [part for part in match.groups() if part is not None]
    return TooLarge(
        used_bytes=int(float(a) * _UNITS[a_unit]),
        limit_bytes=int(float(b) * _UNITS[b_unit]),
        message=match[0],
    )


def _kept(log: str) -> str:
    """Writes the whole log; returns where it is, for a message; empty if it cannot be written."""
    with contextlib.suppress(OSError):
        handle, path = tempfile.mkstemp(prefix="mfu-jax-plan-", suffix=".log")
        with open(handle, "w", encoding="utf-8") as file:
            file.write(log)
        return f"; the whole log: {path}"
    return ""


def _last_line(log: str) -> str:
    """The error's line: JAX tracebacks end with a note, and libtpu logs more after it crashes."""
    if fatal := _FATAL.search(log):
        return fatal[1]
    lines = [line for line in log.splitlines() if line.strip(" -")]
    said = [line for line in lines if not line.startswith(_ABOUT_TRACEBACKS)]
    return said[-1] if said else "no message"


def _allowed(limits: Limits) -> str:
    gib = limits.memory_bytes / _UNITS["G"]
    return f"compile_gib={gib:g}" if gib else "all that this machine had"


def _unknown_flags(log: str) -> list[str]:
    """Flags reported unknown: TPU compilers log one per line, GPU compilers all in one line."""
    gpu = _UNKNOWN_GPU_FLAGS.search(log)
    return _FLAG_NAME.findall(gpu[1]) if gpu else _UNKNOWN_FLAG.findall(log)


def _raise(request: Request, code: int | None, log: str, limits: Limits) -> Any:
    chip = request.target.chip.name
    if code is None:
        raise UserError(
            f"compiling for {chip} took over {limits.seconds:.0f} s",
            hint="usually a large program on few cores; pass compile_seconds=… or plan fewer "
            "layers",
        )
    last = _last_line(log)
    if flags := _unknown_flags(log):
        message = f"the compiler for {chip} does not know the flags {', '.join(flags)}"
        raise UnknownOptionError(message, *dict.fromkeys(flags))
    if flag := _REFUSED_FLAG.search(log):
        message = f"the compiler for {chip} refuses the flag --{flag[1]}"
        raise UnknownOptionError(message, flag[1], instead=(f"--{flag[1]}=false",))
    if key := _UNKNOWN_KEY.search(log):
        raise UnknownOptionError(f"MaxText does not know the key {key[1]}", key[1])
    if "No module named 'maxtext'" in log:
        raise NoCompilerError(
            f"{request.python} has no MaxText",
            hint="run pip install 'maxtext[tpu]' there (Python 3.12 or newer), or pass "
            "maxtext_python=…",
        )
    for missing, extra in _NO_COMPILER:
        if missing.search(log):
            raise NoCompilerError(
                f"{request.python} has no compiler for {chip}",
                hint=f"run pip install 'mfu-jax[{extra}]'",
            )
    has_no_stack = limits.memory_bytes > 0 and _NO_THREAD.search(log)  # thread stacks count
    if _OUT_OF_MEMORY.search(log) or code == -signal.SIGKILL or has_no_stack:
        how = "was killed, probably as it " if code == -signal.SIGKILL else ""
        raise UserError(
            f"compiling for {chip} {how}ran out of host memory ({_allowed(limits)})",
            hint="usually a program that is not scanned; pass a larger compile_gib=…, or plan "
            "fewer layers",
        )
    how = f"was killed by signal {-code}" if code < 0 else f"failed with exit code {code}"
    if code < 0 and limits.memory_bytes:  # often a null pointer
        how += f", perhaps for {_allowed(limits)}"
    raise UserError(f"compiling for {chip} {how}: {last}{_kept(log)}")
