"""Stores a compiled program in one file, or shows such a file.

usage: mfu-jax dump OUT.mfu [FILE.yml] key=value …
       mfu-jax dump OUT.mfu xla=FOLDER_OR_FILE [module=NAME]
       mfu-jax dump FILE.mfu [--json]

A dump has the optimised HLO with its large constants, XLA's cost and memory analysis, the devices,
the versions, and the model FLOPs where known. mfu-jax compare FILE.mfu explains it. In your own
program, call mfu_jax.dump(compiled, "step.mfu"), or set dump_program=step.mfu.

The first form compiles the reference model's train step for the attached devices; keys are
model=NAME and those of configs/base.yml. The second reads what
XLA_FLAGS="--xla_dump_to=FOLDER --xla_dump_hlo_as_proto" wrote: …after_optimizations.hlo.pb, or
.txt, in which XLA omits large constants:
  module=NAME      part of the file name, if the folder has several programs
The third shows a dump:
  --json           one JSON object on stdout, with everything but the HLO text

example: mfu-jax dump step.mfu model=llama2-7b scale=tiny"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from mfu_jax.dumps import SUFFIX, ModelFlops, ProgramDump, load, record, write
from mfu_jax.dumps.files import to_json
from mfu_jax.errors import UserError
from mfu_jax.util.arguments import Arguments, parse
from mfu_jax.util.formatting import columns, json_text

_MEMORY = {
    "arguments": "argument_size_in_bytes",
    "outputs": "output_size_in_bytes",
    "aliased": "alias_size_in_bytes",
    "temporaries": "temp_size_in_bytes",
    "peak": "peak_memory_in_bytes",
}


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    arguments = parse(argv, flags=("--json",))
    if not arguments.names or not arguments.names[0].endswith(SUFFIX):
        raise UserError(
            f"expected a file that ends with {SUFFIX}, to write or to show, got "
            f"{' '.join(argv) or 'nothing'}",
            hint=f"pass, for example, step{SUFFIX}",
        )
    path = arguments.names[0]
    if "xla" in arguments.values:
        write(_of_xla(arguments), path)
    elif arguments.pairs or len(arguments.names) > 1:
        write(_of_config([w for w in argv if w not in (path, "--json")]), path)
    dump = load(path)
    print(json_text(to_json(dump)) if arguments.flags else _summary(dump))
    return 0


def _of_xla(arguments: Arguments) -> ProgramDump:
    from mfu_jax.dumps.xla_files import read_xla

    arguments.one_name("file to write")
    values = arguments.checked(("xla", "module")).values
    return read_xla(Path(values["xla"]), values.get("module", ""))


def _of_config(words: Sequence[str]) -> ProgramDump:
    from mfu_jax.commands.compare import compiled_config
    from mfu_jax.trainer.run.run_logger import model_of

    config, compiled = compiled_config(words)
    return record(compiled, model=model_of(config))


def _summary(dump: ProgramDump) -> str:
    rows = [("program", dump.name), ("HLO text", _text(dump)), ("devices", _devices(dump))]
    rows.append(("versions", ", ".join(f"{k} {v}" for k, v in sorted(dump.versions.items()))))
    rows += [("memory", _memory(dump)), ("model FLOPs", _model(dump.model))]
    reported = (dump.cost or {}).get("flops")
    rows.append(("XLA-reported FLOPs", "" if reported is None else f"{reported:,.0f}"))
    return "\n".join(columns([(f"  {name}", text or "unknown") for name, text in rows], "<<"))


def _text(dump: ProgramDump) -> str:
    elided = f"{dump.elided} large constants are left out: XLA dumps them with "
    complete = "complete" if not dump.elided else f"{elided}--xla_dump_hlo_as_proto"
    return f"{len(dump.text):,} characters, {complete}"


def _devices(dump: ProgramDump) -> str:
    at = dump.topology
    if not at.devices:
        return ""
    mesh = "".join(f", {axis}={size}" for axis, size in at.mesh.items() if size > 1)
    processes = f", {at.processes} processes" if at.processes > 1 else ""
    return f"{at.devices} × {at.device_kind} ({at.platform}{processes}){mesh}"


def _memory(dump: ProgramDump) -> str:
    memory: dict[str, Any] = dict(dump.memory or {})
    known = {name: memory[key] for name, key in _MEMORY.items() if key in memory}
    return ", ".join(f"{name} {size / 2**30:.3g} GiB" for name, size in known.items())


def _model(model: ModelFlops | None) -> str:
    if model is None:
        return ""
    exact = isinstance(model.per_device, Fraction)
    number = f"{float(model.per_device):,.1f}" if exact else f"{model.per_device:,}"
    return f"{number} per device, convention {model.convention}"
