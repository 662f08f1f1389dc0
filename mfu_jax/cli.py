"""`mfu-jax COMMAND …`: each command is a module of `mfu_jax.commands`, imported when it is run."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from mfu_jax.errors import UserError

COMMANDS = {
    "train": "train the reference model and log TFLOP/s, MFU and HFU of every step",
    "flops": "model FLOPs and parameters of a model name, MaxText YAML or config.json",
    "compare": "the ledger from model FLOPs to executed and XLA-reported FLOPs",
    "report": "what a finished run came to: from metrics.jsonl, MaxText's metrics_file or a log",
    "hardware": "peaks of the attached or named accelerator; --calibrate measures one",
    "project": "training time, chips, MFU needed or cost, each from the others",
    "published": "published results recomputed: how far each is from what was printed",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 2 where the input was wrong."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0 if arguments else 2
    name = arguments[0]
    try:
        if name not in COMMANDS:
            raise UserError(f"unknown command {name!r}; the commands are: {', '.join(COMMANDS)}")
        command = importlib.import_module(f"mfu_jax.commands.{name}")
        return int(command.main(arguments[1:]) or 0)
    except UserError as error:
        print(f"mfu-jax {name}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        sys.stderr.close()
        return 141


def _usage() -> str:
    width = max(map(len, COMMANDS))
    rows = "\n".join(f"  {name:<{width}}  {text}" for name, text in COMMANDS.items())
    return f"usage: mfu-jax COMMAND [arguments]\n\n{rows}\n\nmfu-jax COMMAND --help tells more."


if __name__ == "__main__":
    raise SystemExit(main())
