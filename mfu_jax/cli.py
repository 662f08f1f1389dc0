"""`mfu-jax COMMAND …`: every module of `mfu_jax.commands` is a command.

Its docstring is its manual: ``mfu-jax --help`` shows the first line, ``mfu-jax COMMAND --help`` all
of it. A command is imported only to be run; its ``main`` takes the words after its name and returns
the exit code.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from mfu_jax.errors import UserError
from mfu_jax.formatting import columns

_FOLDER = Path(__file__).parent / "commands"
_HELP = frozenset({"-h", "--help"})


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 2 if the input was wrong."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in {*_HELP, "help"}:
        print(_usage())
        return 0 if arguments else 2
    name, *rest = arguments
    try:
        if name not in command_names():
            known = ", ".join(command_names())
            raise UserError(f"unknown command {name!r}; the commands are: {known}")
        if _HELP & set(rest):
            print(manual(name))
            return 0
        return int(importlib.import_module(f"mfu_jax.commands.{name}").main(rest) or 0)
    except UserError as error:
        print(f"mfu-jax {name}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        sys.stderr.close()
        return 141


def command_names() -> list[str]:
    """All commands, in alphabetical order."""
    return sorted(path.stem for path in _FOLDER.glob("[!_]*.py"))


def manual(name: str) -> str:
    """The docstring of a command's module, read without importing it: some import jax."""
    source = (_FOLDER / f"{name}.py").read_text(encoding="utf-8")
    return source.partition('"""')[2].partition('"""')[0].rstrip()


def _usage() -> str:
    rows = [(f"  {name}", manual(name).partition("\n")[0].rstrip(".")) for name in command_names()]
    table = "\n".join(columns(rows, "<"))
    return f"usage: mfu-jax COMMAND [arguments]\n\n{table}\n\nmfu-jax COMMAND --help tells more."


if __name__ == "__main__":
    raise SystemExit(main())
