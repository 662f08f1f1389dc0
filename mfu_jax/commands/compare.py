"""The ledger from model FLOPs to executed and XLA-reported FLOPs.

usage: mfu-jax compare [FILE.yml] [key=value …] [--json]
       mfu-jax compare PROGRAM.mfu|PROGRAM.hlo[.gz|.xz] [model_flops=N] [dense=N]
                       [attention=N] [xla=N]
                       [group_sizes=N,N,…] [sequence_lengths=N,N,…] [--json]

Explains executed FLOPs in terms of model FLOPs, and XLA's own report in terms of executed FLOPs,
line by line, for one step on one device.

The first form compiles the reference model's train step for the attached devices; keys are
model=NAME and those of configs/base.yml. The second reads any program: either a dump (see mfu-jax
dump), which has XLA's FLOPs and possibly the model's, or compiled.as_text(), which lacks large
constants:
  model_flops=N    model FLOPs of the step on one device, by convention=… (default maxtext)
  dense=N          the same with every attention pair, if the program computes them all
  attention=N      the attention FLOPs among them, if the program runs attention in kernels
  xla=N            compiled.cost_analysis()["flops"]
  group_sizes=     rows per group (expert) in grouped matmuls, on one device
  sequence_lengths=  keys per sequence in paged attention
  --json           one JSON object on stdout

example: mfu-jax compare step.mfu"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import lzma
import zlib
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from mfu_jax.dumps import SUFFIX, ModelFlops, ProgramDump, load
from mfu_jax.errors import UserError
from mfu_jax.util.arguments import MODEL_FLOPS, Arguments, parse
from mfu_jax.util.formatting import json_text
from mfu_jax.util.user_files import opened, too_large, unreadable
from mfu_jax.util.values import typed

if TYPE_CHECKING:
    import jax

    from mfu_jax.flops.ledger import Ledger
    from mfu_jax.trainer.config.pyconfig import Config

_OPENERS: dict[str, Callable[[BinaryIO], Any]] = {
    ".hlo": contextlib.nullcontext,
    ".txt": contextlib.nullcontext,
    ".gz": gzip.open,
    ".xz": lzma.open,
}
_EXPECTED = (
    "HLO text, plain or compressed by gzip or xz; usually a wrong path or a truncated file; write "
    "compiled.as_text() to it again"
)
# Also once decompressed. A 70B model's scanned step is 0.4 MB; this is hundreds of times that.
_MOST_BYTES = 256 * 2**20
_NUMBERS = (MODEL_FLOPS, "dense", "attention", "xla")
_LENGTHS = ("group_sizes", "sequence_lengths")


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    arguments = parse(argv, flags=("--json",))
    if arguments.names and Path(arguments.names[0]).suffix in (*_OPENERS, SUFFIX):
        ledger = _of_program(arguments)
    else:
        ledger = ledger_of_config([word for word in argv if word != "--json"])
    print(json_text(ledger.to_json()) if arguments.flags else ledger.render())
    return 0


def ledger_of_config(arguments: Sequence[str]) -> Ledger:
    """Compiles the reference model's train step and explains its FLOPs.

    Args:
        arguments: a YAML file and ``key=value``, as the trainer takes them.

    Raises:
        UserError: the config is wrong, or does not fit the attached devices.
    """
    from mfu_jax.trainer.run.run_logger import count_step

    return count_step(*compiled_config(arguments)).ledger


def compiled_config(arguments: Sequence[str]) -> tuple[Config, jax.stages.Compiled]:
    """The config and the reference model's compiled train step; arguments as `ledger_of_config`."""
    from mfu_jax.trainer.config.pyconfig import load
    from mfu_jax.trainer.step.mesh import make_mesh, with_mesh_sizes
    from mfu_jax.trainer.step.state import abstract_state, resolve_attention
    from mfu_jax.trainer.step.train_step import compile_train_step

    config = load(arguments)
    _refuse_absurd(config)
    config = with_mesh_sizes(config)
    mesh = make_mesh(config)
    config = resolve_attention(config, mesh)
    return config, compile_train_step(config, mesh, abstract_state(config, mesh))


# XLA aborts the process if an array's byte count overflows 63 bits; the largest array holds the
# layers' activations or attention scores.
_MOST_ELEMENTS = 2**56


def _refuse_absurd(config: Config) -> None:
    """Nothing is allocated here, so any size up to these limits compiles."""
    layers, length = config.num_decoder_layers, config.max_target_length
    heads = config.num_query_heads
    width = max(config.vocab_size, config.emb_dim, config.mlp_dim, heads * config.head_dim)
    rows = config.per_device_batch_size * config.gradient_accumulation_steps * length
    elements = layers * max(rows * max(width, heads * length), config.emb_dim * width)
    if elements > _MOST_ELEMENTS:
        raise UserError(
            f"the config makes an array of {elements:.2g} elements; expected at most 2^56",
            hint="usually a typo in a size; look at per_device_batch_size, max_target_length "
            "and emb_dim",
        )


def _of_program(arguments: Arguments) -> Ledger:
    from mfu_jax.flops.executed.counting import executed_flops
    from mfu_jax.flops.ledger import compare_flops

    name = arguments.one_name("file with HLO text")
    usually = "usually a config key, which belongs with a YAML file, not with HLO text"
    values = arguments.checked((*_NUMBERS, *_LENGTHS, "convention"), usually=usually).values
    numbers = {key: _flops(key, values[key]) for key in _NUMBERS if key in values}
    program = load(name) if name.endswith(SUFFIX) else ProgramDump(text=_read(Path(name)))
    executed = executed_flops(
        program,
        kernel_flops=program.kernel_flops,
        trip_counts=program.trip_counts,
        **_lengths(program, values),
    )
    model = _model(program, numbers, values.get("convention") or "maxtext")
    is_whole = model.is_whole and not executed.unaccounted
    return compare_flops(
        **dataclasses.replace(model, is_whole=is_whole).ledger_arguments,
        xla_reported=numbers.get("xla", (program.cost or {}).get("flops")),
        executed=executed,
    )


def _model(program: ProgramDump, numbers: Mapping[str, int], convention: str) -> ModelFlops:
    """The model FLOPs given on the command line, else those of the dump."""
    model = program.model or ModelFlops(per_device=0, convention=f"none: pass {MODEL_FLOPS}=…")
    if MODEL_FLOPS in numbers:
        model = ModelFlops(per_device=numbers[MODEL_FLOPS], convention=convention)
    return dataclasses.replace(
        model,
        dense=numbers.get("dense", model.dense),
        attention=numbers.get("attention", model.attention),
    )


def _lengths(program: ProgramDump, values: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    """Group sizes and sequence lengths given on the command line, else those of the dump."""
    given = {key: typed(key, values[key], tuple[int, ...]) for key in _LENGTHS if key in values}
    return program.lengths.named | given


def _read(path: Path) -> str:
    try:
        with opened(path, _EXPECTED, _MOST_BYTES) as file, _OPENERS[path.suffix](file) as text:
            content: bytes = text.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise too_large(path, len(content), _MOST_BYTES, _EXPECTED)
        return content.decode()
    except (EOFError, lzma.LZMAError, zlib.error, UnicodeDecodeError) as error:
        raise unreadable(path, str(error), _EXPECTED) from None


def _flops(key: str, text: str) -> int:
    hint = "usually a unit was left on it; pass FLOPs of one device in one step, as 1.5e12"
    return int(typed(key, text, int | Fraction, hint=hint))
