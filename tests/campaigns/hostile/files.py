"""Files that no reader should trust: what is no file, no text, or far too large."""

from __future__ import annotations

import gzip
import lzma
import os
from pathlib import Path

_SUFFIXES = ("yml", "json", "jsonl", "hlo", "gz", "xz")
_ON_THE_SYSTEM = {
    "zero": Path("/dev/zero"),
    "null": Path("/dev/null"),
    "stdin": Path("/dev/stdin"),
    "memory": Path("/proc/self/mem"),
}
# Names that a cell of a path may not have.
_NAMES = {"long": "x" * 300, "deep": "a/" * 3000, "missing": "missing", "nul": "a\0b"}
_MADE = ("folder", "fifo", "loop")
SPECIAL = (
    *_ON_THE_SYSTEM,
    *_NAMES,
    *_MADE,
    *(f"{kind}_{suffix}" for suffix in _SUFFIXES for kind in ("sparse", "fifo")),
    *("laughs_yml", "merges_yml", "chain_yml", "cycle_yml", "flat_yml", "keys_yml", "scalar_yml"),
    *("nested_json", "nested_jsonl", "digits_json", "lines_jsonl", "long_jsonl", "nul_jsonl"),
    *("bomb_gz", "bomb_xz", "torn_gz", "text_gz", "binary_hlo"),
)


def special_files(folder: Path) -> dict[str, Path]:
    """Name → path, for every name of `SPECIAL`; made in `folder` unless the system has it."""
    paths = {
        **_ON_THE_SYSTEM,
        **{name: folder / text for name, text in _NAMES.items()},
        "folder": folder,
        "fifo": folder / "fifo",
        "loop": folder / "loop",
    }
    os.mkfifo(paths["fifo"])
    paths["loop"].symlink_to(paths["loop"])
    for suffix in _SUFFIXES:
        sparse, fifo = folder / f"sparse.{suffix}", folder / f"fifo.{suffix}"
        sparse.touch()
        os.truncate(sparse, 2**30)
        os.mkfifo(fifo)
        paths |= {f"sparse_{suffix}": sparse, f"fifo_{suffix}": fifo}
    for name, content in _contents().items():
        paths[name] = folder / name.replace("_", ".")
        paths[name].write_bytes(content)
    assert set(paths) == set(SPECIAL)
    return paths


def _contents() -> dict[str, bytes]:
    """File name, with an underscore for the dot, → its bytes."""
    zeros = bytes(2**24)
    return {
        **{name: text.encode() for name, text in _yaml_texts().items()},
        "nested_json": b'{"a":' + b"[" * 100_000,
        "nested_jsonl": b'{"step": 1, "a": ' + b"[" * 100_000,
        "digits_json": b'{"model_type": "llama", "vocab_size": ' + b"9" * 100_000 + b"}",
        "lines_jsonl": b"\n" * 3_000_000,
        "long_jsonl": b"completed step: 1, " + b"x" * 50_000_000,
        "nul_jsonl": b'{"step": 1, "perf/step_time_seconds": 1.0}\n' * 5 + bytes(100_000),
        "bomb_gz": gzip.compress(zeros, 1) * 128,  # 2 GB
        "bomb_xz": lzma.compress(zeros, preset=0) * 128,
        "torn_gz": gzip.compress(b"HloModule m")[:-5],
        "text_gz": b"HloModule m",
        "binary_hlo": bytes(range(256)) * 1000,
    }


def _yaml_texts() -> dict[str, str]:
    """Aliases that stand for 9³⁰ items, as lists and merges; a chain of 5,000 merges; a cycle."""
    nine = [", ".join([f"*a{n}"] * 9) for n in range(30)]
    return {
        "laughs_yml": "a0: &a0 [1]\n"
        + "".join(f"a{n}: &a{n} [{nine[n - 1]}]\n" for n in range(1, 31)),
        "merges_yml": "a0: &a0 {x: 1}\n"
        + "".join(f"a{n}: &a{n}\n  <<: [{nine[n - 1]}]\n" for n in range(1, 31)),
        "chain_yml": "a0: &a0 {x: 1}\n"
        + "".join(f"a{n}: &a{n}\n  <<: *a{n - 1}\n" for n in range(1, 5000)),
        "cycle_yml": "mlp_activations: &a [*a]\nvocab_size: *a\n",
        "flat_yml": "- 1\n" * 2**20,
        "keys_yml": "".join(f"k{n}: 1\n" for n in range(2**18)),
        "scalar_yml": "vocab_size: " + "9" * 3_000_000,
    }
