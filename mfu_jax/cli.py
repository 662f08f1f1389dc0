"""`mfu-jax COMMAND …`: each module in `mfu_jax.commands` is a command, and so is `mfu_jax.train`.

Its docstring is its manual: ``mfu-jax --help`` shows the first line, ``mfu-jax COMMAND --help`` all
of it. A command is imported only when it runs; its ``main`` takes the words after its name and
returns the exit code.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import sys
import tempfile
import traceback
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from mfu_jax.errors import UserError, nearest, two_lines

_FOLDER = Path(__file__).parent / "commands"
_HELP = frozenset({"-h", "--help"})
_TRAIN = "train"  # not in the folder: python -m mfu_jax.train runs it, too
_OF_WORDS = ("flops", "project", "report", "watch")  # they say nothing without any
_EXAMPLE = "\nexample: "  # in the last line of a manual
_NO_BACKEND = "Unable to initialize backend"  # JAX's words
_GROUPS = {
    "Begin": ("doctor", "hardware"),
    "Count FLOPs": ("flops", "compare", "dump"),
    "Run": ("train", "watch", "replay"),
    "Judge": ("report", "profile", "gate", "published"),
    "Plan": ("plan", "tune", "project"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Returns:
        Its exit code: 2 if the input was wrong; 1 if the output cannot be written, memory ran out,
        JAX finds no device, or it hit a bug of ours, each with one line on stderr and one with a
        hint; 130 after Ctrl-C; 141 if nobody reads the output any more.
    """
    _print_anything()
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = arguments[0] if arguments else "--help"
    try:
        code = _run(*arguments)
        print(end="", flush=True)  # reports a full disk here, not as a traceback at exit
        return code
    except UserError as error:
        return _stopped(name, error.what, 2, error.hint or _help_of(name))
    except BrokenPipeError:
        sys.stderr.close()
        return 141
    except OSError as error:
        _forget_output()
        is_denied = isinstance(error, PermissionError)
        hint = "ask its owner to let you read it" if is_denied else "free space, or ask again"
        return _stopped(name, f"stopped by the system: {error}", 1, hint)
    except MemoryError:
        return _stopped(name, "memory ran out", 1, "pass a smaller input")
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if _NO_BACKEND in str(error):
            hint = "usually JAX_PLATFORMS is wrong, or another process holds the devices"
            return _stopped(name, str(error), 1, hint)
        return _stopped(name, f"a bug of mfu_jax: {type(error).__name__}: {error}", 1, _kept(error))


def _run(name: str | None = None, *rest: str) -> int:
    if name is None or name in {*_HELP, "help"}:
        print(_usage())
        return 0 if name else 2
    if name in ("--version", "version"):
        print(f"mfu-jax {version('mfu-jax')}")
        return 0
    if name not in (known := command_names()):
        listed = f"the commands are: {', '.join(known)}"
        raise UserError(f"unknown command {name!r}", hint=nearest(name, known) + listed)
    if _HELP & set(rest) or (name in _OF_WORDS and not rest):
        print(manual(name))
        return 0 if rest else 2
    return int(importlib.import_module(module_of(name)).main(list(rest)) or 0)


def _print_anything() -> None:
    """Names may contain bytes that are not UTF-8, and a terminal may lack ``×``."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _stopped(name: str, what: str, code: int, hint: str) -> int:
    print(two_lines(f"mfu-jax {name}", UserError(what, hint=hint)), file=sys.stderr)
    return code


def _help_of(name: str) -> str:
    return f"mfu-jax {name} --help shows what it takes"


def _forget_output() -> None:
    """Drops output that cannot be written: Python would retry at exit, with a traceback."""
    try:
        print(end="", flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _kept(error: Exception) -> str:
    """What to do about an unexpected exception: its traceback goes to a file."""
    with contextlib.suppress(OSError):
        descriptor, path = tempfile.mkstemp(prefix="mfu-jax-", suffix=".txt")
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.writelines(traceback.format_exception(error))
        return f"please report it with the traceback in {path}"
    return "please report it"


def command_names() -> list[str]:
    """All commands, in alphabetical order."""
    return sorted([*(path.stem for path in _FOLDER.rglob("[!_]*.py")), _TRAIN])


def module_of(name: str) -> str:
    """The module of a command."""
    if name == _TRAIN:
        return f"mfu_jax.{name}"
    return ".".join(["mfu_jax.commands", *_file_of(name).relative_to(_FOLDER).parts[:-1], name])


def _file_of(name: str) -> Path:
    if name == _TRAIN:
        return Path(__file__).with_name(f"{name}.py")
    return next(_FOLDER.rglob(f"{name}.py"))


def manual(name: str) -> str:
    """The docstring of a command's module, read without importing it: some import jax."""
    source = _file_of(name).read_text(encoding="utf-8")
    return source.partition('"""')[2].partition('"""')[0].rstrip()


def _usage() -> str:
    """All commands by task, each with its first line and its example."""
    lines = ["usage: mfu-jax COMMAND [arguments]"]
    left = command_names()
    for title, names in (*_GROUPS.items(), ("Others", tuple(left))):
        found = [name for name in names if name in left]
        left = [name for name in left if name not in found]
        lines += ["", title] if found else []
        for name in found:
            first, _, rest = manual(name).partition("\n")
            lines.append(f"  {name:<11}{first.rstrip('.')}")
            if example := rest.partition(_EXAMPLE)[2]:
                lines.append(f"{'':13}{example}")
    return "\n".join([*lines, "", "mfu-jax COMMAND --help tells more."])


if __name__ == "__main__":
    raise SystemExit(main())
