"""Stands in for a compiler in a child process: does what the request's `config` asks for."""

import json
import os
import sys
import time
from pathlib import Path

from mfu_jax.dumps.files import write
from mfu_jax.dumps.program import ProgramDump
from mfu_jax.planning.compilation.child_process import obey_parent

TEXT = """HloModule m
ENTRY %main (x: f32[8,8]) -> f32[8,8] {
  %x = f32[8,8] parameter(0)
  ROOT %d = f32[8,8] dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""


def main(asked: str, out: str) -> None:
    obey_parent()
    config = json.loads(Path(asked).read_text())["config"]
    flags = os.environ.get("LIBTPU_INIT_ARGS", "")
    if log := config.get("log") or os.environ.get("FAKE_COMPILER_LOG"):
        with open(log, "a") as file:
            file.write(f"{' '.join(config.get('arguments', ()))}\n")
    if chose := config.get("chose"):
        print(f"note: {chose}", flush=True)
    print("compiling", flush=True)
    if old := [flag for flag in ("xla_old", "xla_older") if f"--{flag}=" in flags]:
        sys.exit("\n".join(f"ERROR: Unknown command line flag '{flag}'" for flag in old))
    if any(word.startswith("old_key=") for word in config.get("arguments", ())):
        sys.exit("ValueError: 'old_key' not in 'emb_dim', 'mlp_dim'")
    if (name := config.get("refuses")) and f"--{name}=false" not in flags:
        sys.exit(f"FAILED_PRECONDITION: two at once. Please disable it with {name}=false")
    bytes(config.get("bytes", 0))
    if config.get("scheduled"):
        _dump(Path(os.environ["XLA_FLAGS"].partition("--xla_dump_to=")[2].split()[0]))
    if number := config.get("crash"):
        os.kill(os.getpid(), number)
    time.sleep(config.get("seconds", float(os.environ.get("FAKE_COMPILER_SECONDS", 0))))
    words = dict(word.split("=", 1) for word in config.get("arguments", ()) if "=" in word)
    if "remat_policy" in words:
        write(_swept(words["remat_policy"], int(words["per_device_batch_size"])), out)
        return
    if config.get("reads_profile"):
        profile = Path(os.environ["XLA_FLAGS"].partition("_directory_path=")[2].split()[0])
        write(ProgramDump(text=profile.read_text()), out)
        return
    if message := config.get("message"):
        sys.exit(message)
    write(ProgramDump(text=TEXT), out)


def _dump(folder: Path) -> None:
    """What XLA writes before machine code, of the step and of a small program of the host."""
    folder.mkdir()
    for name, text in (("m0.jit_step.cl_1.", TEXT), ("m1.jit_init.cpu_", TEXT * 2)):
        start = f"{folder}/{name}after_optimizations"
        Path(f"{start}.txt").write_text(text)
        Path(f"{start}-buffer-assignment.txt").write_text("allocation 0: size 1536, parameter 0:\n")
        Path(f"{start}_after_buffer_assignment.txt").write_text(text)


def _swept(policy: str, batch: int) -> ProgramDump:
    """11 GiB, and so many for each sequence, of 31.25; time is that of the rows of a matmul."""
    peak = (11 + {"none": 30, "minimal": 5, "full": 2}[policy] * batch) * 2**30
    if peak > 31.25 * 2**30:
        sys.exit(f"Ran out of memory. Used {peak / 2**30:.2f}G of 31.25G hbm.")
    rows = batch * {"none": 3_000_000, "minimal": 3_200_000, "full": 4_000_000}[policy]
    text = TEXT.replace("[8,8] dot", f"[{rows},8] dot").replace("x: f32[8,8]", f"x: f32[{rows},8]")
    text = text.replace("%x = f32[8,8] p", f"%x = f32[{rows},8] p")
    text = text.replace("(%x, %x)", "(%x, %w)").replace(
        "  ROOT", "  %w = f32[8,8] parameter(1)\n  ROOT"
    )
    text = text.replace(") -> f32[8,8]", f", w: f32[8,8]) -> f32[{rows},8]")
    memory = {"peak_memory_in_bytes": peak, "argument_size_in_bytes": 1}
    return ProgramDump(text=text, memory=memory)


if __name__ == "__main__":
    main(*sys.argv[1:])
