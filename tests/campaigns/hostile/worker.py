"""A process that runs commands of `mfu-jax` in itself, one JSON line in, one JSON line out.

A command may hang or take all memory, so its owner, `hostile_inputs.Worker`, watches from outside.
`train` and `compare` stop after they have read their config: no training is under test here.
"""

from __future__ import annotations

import io
import json
import os
import resource
import sys
import time
import types
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from mfu_jax import cli
from mfu_jax.commands import compare, hardware
from mfu_jax.errors import UserError
from mfu_jax.trainer.config.pyconfig import load

_ADDRESS_SPACE_BYTES = 4 * 2**30  # protects the machine; the tests look at the peak's growth


def serve(requests: IO[str], answers: IO[str]) -> None:
    """Answers every line of `requests`, ``[arguments, text for stdin]``, until the stream ends."""
    for line in requests:
        print(json.dumps(run(*json.loads(line))), file=answers, flush=True)


def run(argv: Sequence[str], stdin: str = "") -> dict[str, Any]:
    """What `mfu-jax` does with `argv`: code, texts, exception, seconds, growth in bytes."""
    output, errors = (io.TextIOWrapper(io.BytesIO(), "utf-8", name) for name in _STREAMS)
    kept = sys.stdin, sys.stdout, sys.stderr
    sys.stdin = io.TextIOWrapper(io.BytesIO(stdin.encode(errors="replace")), "utf-8")
    sys.stdout, sys.stderr = output, errors
    code, raised = None, ""
    before, begun = _restart_peak(), time.monotonic()
    try:
        code = cli.main(argv)
    except BaseException as error:  # SystemExit and MemoryError, too
        raised = _described(error)
    finally:
        sys.stdin, sys.stdout, sys.stderr = kept
    return {
        "code": code,
        "raised": raised,
        "output": _text(output),
        "errors": _text(errors),
        "seconds": time.monotonic() - begun,
        "growth": _status("VmHWM") - before,
    }


_STREAMS = ("strict", "backslashreplace")  # how Python encodes stdout and stderr


def _text(stream: io.TextIOWrapper) -> str:
    stream.flush()
    buffer: Any = stream.buffer
    return str(buffer.getvalue(), "utf-8")


def _described(error: BaseException) -> str:
    frames, trace = [], error.__traceback__
    while trace is not None:
        frames.append(f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}")
        trace = trace.tb_next
    return f"{type(error).__name__}: {str(error)[:200]} ({' '.join(frames[-3:])})"


def _restart_peak() -> int:
    """Resident bytes now; `VmHWM` is their peak from here on."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _status("VmRSS")


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(name)


def _config_only(argv: Sequence[str]) -> int:
    load(argv)
    return 0


def _no_ledger(argv: Sequence[str]) -> Any:
    load(argv)
    raise UserError("nothing is compiled here")


def _no_device(*_: object, **__: object) -> Any:
    raise UserError("no device is asked here")


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (_ADDRESS_SPACE_BYTES, _ADDRESS_SPACE_BYTES))
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # a command that reads /dev/stdin finds nothing
    trainer: Any = types.ModuleType("mfu_jax.train")
    trainer.main = _config_only
    sys.modules["mfu_jax.train"] = trainer
    compare.ledger_of_config = _no_ledger
    hardware._attached = _no_device
    serve(requests, sys.stdout)
