"""Cache of compiled programs: a compile takes minutes, its result a hundred kilobytes.

An entry's name is a hash of everything that determines the program: the compiling module's input,
the chips, the flags, the environment that XLA and JAX read, and the installed versions. It holds
the dump or the compiler's refusal, and what was left out of the compile.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from mfu_jax.dumps.files import load, write
from mfu_jax.dumps.program import ProgramDump
from mfu_jax.errors import UserError, first_line
from mfu_jax.hardware.calibration import cache_directory
from mfu_jax.planning.compilation import child_process
from mfu_jax.planning.compilation.compiling import (
    Compiled,
    Limits,
    Request,
    TooLarge,
    compile_known_flags,
    request_json,
)
from mfu_jax.planning.compilation.gpu_autotuning import CHOICES
from mfu_jax.storage.files import replace_file
from mfu_jax.util.child_process import child_environment

_VERSIONS_SECONDS = 60.0
_ENVIRONMENT = ("JAX_", "XLA_", "LIBTPU_")
_COMPILERS = {"tpu": ("libtpu",), "cuda": ("jax-cuda12-plugin", "jax-cuda13-plugin")}


def default_folder() -> Path:
    """The cache's folder unless the user names one."""
    return cache_directory() / "plans"


def chosen_folder(values: Mapping[str, str]) -> Path | None:
    """The folder that the key ``cache`` names; the default one without it; empty: None."""
    if "cache" not in values:
        return default_folder()
    return Path(values["cache"]) if values["cache"] else None


def compile_cached(
    request: Request,
    *,
    folder: Path | None,
    limits: Limits | None = None,
    progress: Callable[[str], None] = lambda word: None,
) -> Compiled:
    """Runs `compile_known_flags`, unless an earlier call compiled the same request.

    Args:
        request: the program and the chips.
        folder: the cache's folder; None: the cache is neither read nor written.
        limits: limits of the child process.
        progress: called with a word for each stage; not called on a cache hit.

    Returns:
        The program or the compiler's refusal, and notes: what was left out, and whether the
        program comes from the cache, or could not be stored in it.

    Raises:
        UserError: as `compile_known_flags`.
    """
    if folder is None:
        return compile_known_flags(request, limits=limits, progress=progress)
    entry = _CacheEntry(folder, key_of(request))
    damage: tuple[str, ...] = ()
    try:
        if kept := entry.read():
            return kept
    except (UserError, ValueError, KeyError, TypeError, OSError) as error:
        damage = (f"{entry.path} was damaged ({first_line(error)}): compiled again",)
    found = compile_known_flags(request, limits=limits, progress=progress)
    try:
        entry.write(found)
    except (UserError, OSError) as error:
        damage = (*damage, f"not kept in the cache: {first_line(error)}")
    return found._replace(notes=(*found.notes, *damage))


def key_of(request: Request) -> str:
    """The name of a request's entry."""
    environment = {
        k: v for k, v in os.environ.items() if k.startswith(_ENVIRONMENT) and k != "JAX_PLATFORMS"
    }
    what = {
        "module": request.module,
        "program": request_json(request),
        "identity": dict(request.identity),
        "flags": request.flags,
        **({"profile": request.profile} if request.profile else {}),
        "environment": environment,
        "versions": installed_versions(request.python),
        "choices": CHOICES if request.target.platform == "cuda" else (),
    }
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:32]


def installed_versions(python: str) -> Mapping[str, str]:
    """Package → version, for packages that determine a program, as `python` imports them.

    A checkout of MaxText is named by its files, too.

    Raises:
        UserError: the interpreter cannot be run.
    """
    if python == sys.executable:
        return child_process.versions()
    try:
        said = subprocess.run(
            [python, "-P", child_process.__file__],
            capture_output=True,
            check=True,
            env=child_environment(),  # as the compile has it
            text=True,
            timeout=_VERSIONS_SECONDS,
        )
        return dict(json.loads(said.stdout))
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise UserError(
            f"{python} does not answer ({first_line(error)}); expected a Python interpreter",
            hint="usually a wrong path; pass maxtext_python=…",
        ) from None


def compiler_of(request: Request) -> str:
    """The packages of the compiler and their versions: ``jax 0.10.2, libtpu 0.0.42.1``.

    Raises:
        UserError: the interpreter cannot be run.
    """
    found = installed_versions(request.python)
    names = ("jax", *_COMPILERS[request.target.platform])
    return ", ".join(f"{name} {found[name]}" for name in names if name in found)


class _CacheEntry:
    """A dump or a refusal in the cache: ``KEY.json``, and ``KEY.mfu`` beside it.

    Args:
        folder: the cache's folder.
        key: the request's key.
    """

    def __init__(self, folder: Path, key: str) -> None:
        self.path = folder / f"{key}.json"
        self.dump = folder / f"{key}.mfu"

    def read(self) -> Compiled | None:
        """What was compiled; None if there is no entry."""
        if not self.path.exists():
            return None
        held = json.loads(self.path.read_text(encoding="utf-8"))
        refusal = held["refusal"]
        if refusal is None:
            program: ProgramDump | TooLarge = load(self.dump)
        else:
            scheduled = load(self.dump) if self.dump.exists() else None
            program = TooLarge(**refusal, program=scheduled)
        notes = (*held["left_out"], f"compiled earlier: {self.path.with_suffix('')}")
        return Compiled(program, notes)

    def write(self, found: Compiled) -> None:
        """Writes the JSON last, so that an entry exists only once it is complete."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        program, left_out = found
        refusal = None
        if isinstance(program, TooLarge):
            refusal = {
                key: getattr(program, key) for key in ("used_bytes", "limit_bytes", "message")
            }
        scheduled = program.program if isinstance(program, TooLarge) else program
        if scheduled:
            write(scheduled, self.dump)
        held = {"refusal": refusal, "left_out": list(left_out)}
        replace_file(self.path, [json.dumps(held).encode()])
