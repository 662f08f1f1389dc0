"""Stands in for a compiler in a child process: does what the request's `config` asks for."""

import json
import os
import signal
import sys
import time
from pathlib import Path

from mfu_jax.dumps.files import write
from mfu_jax.dumps.program import ProgramDump

TEXT = """HloModule m
ENTRY %main (x: f32[8,8]) -> f32[8,8] {
  %x = f32[8,8] parameter(0)
  ROOT %d = f32[8,8] dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""


def main(asked: str, out: str) -> None:
    config = json.loads(Path(asked).read_text())["config"]
    flags = os.environ.get("LIBTPU_INIT_ARGS", "")
    if log := config.get("log") or os.environ.get("FAKE_COMPILER_LOG"):
        with open(log, "a") as file:
            file.write(f"{' '.join(config.get('arguments', ()))}\n")
    print("compiling", flush=True)
    if "--xla_old" in flags:
        sys.exit("ERROR: Unknown command line flag 'xla_old'")
    if any(word.startswith("old_key=") for word in config.get("arguments", ())):
        sys.exit("ValueError: 'old_key' not in 'emb_dim', 'mlp_dim'")
    if config.get("crash"):
        os.kill(os.getpid(), signal.SIGSEGV)
    time.sleep(config.get("seconds", 0))
    if message := config.get("message"):
        sys.exit(message)
    write(ProgramDump(text=TEXT), out)


if __name__ == "__main__":
    main(*sys.argv[1:])
