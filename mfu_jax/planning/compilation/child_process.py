"""The child process that compiles: its limits, its end with its parent, its interpreter's versions.

Another interpreter also runs this file by its path, to print the versions of the packages that
determine a compiled program, so it imports only the standard library.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import resource
import signal
import sys
from pathlib import Path

MEMORY = "MFU_JAX_COMPILE_BYTES"  # of the environment; 0 or absent: no limit
_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
_PACKAGES = (
    *("mfu_jax", "jax", "jaxlib", "libtpu", "flax", "optax", "qwix", "maxtext", "tokamax"),
    *("jax-cuda12-plugin", "jax-cuda13-plugin", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13"),
)
# Whose files make a program, beside the versions: ours, and MaxText's where it is a checkout.
_OWN = ("mfu_jax.layers", "mfu_jax.trainer", "mfu_jax.planning.compilation")
_INSTALLED = {"site-packages", "dist-packages"}
_SOURCES = {".py", ".yml"}


def obey_parent() -> None:
    """Limits this process's memory; on Linux, ends it with its parent.

    Otherwise a killed command would leave a compile of half an hour behind.
    """
    if limit := int(os.environ.get(MEMORY, 0)):
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)


def versions() -> dict[str, str]:
    """Package → version; where that says little, also a hash of the files."""
    found = {}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    for name in ("maxtext", *_OWN):
        with contextlib.suppress(ModuleNotFoundError):
            spec = importlib.util.find_spec(name)
            for folder in map(Path, (spec and spec.submodule_search_locations) or ()):
                if name in _OWN or not _INSTALLED & set(folder.parts):  # pip did not copy it
                    found[f"{name} source"] = _hash_of(folder)
    return found


def _hash_of(folder: Path) -> str:
    """Changes with the contents of any source or config file."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.suffix in _SOURCES and path.is_file():
            digest.update(str(path.relative_to(folder)).encode() + b"\0")
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


if __name__ == "__main__":
    print(json.dumps(versions()))
