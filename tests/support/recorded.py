"""Recorded programs: their texts, their counts, what was recorded of each."""

from __future__ import annotations

import functools
import json
import lzma
import re
from typing import Any

from mfu_jax.flops.executed.counting import executed_flops
from mfu_jax.flops.executed.result import ExecutedCount
from tests.support.paths import RECORDED
from tests.support.program_list import PROGRAMS


@functools.lru_cache(maxsize=8)
def text_of(name: str) -> str:
    """The HLO text of a recorded program."""
    return lzma.decompress((RECORDED / f"{name}.hlo.xz").read_bytes()).decode()


@functools.cache
def index() -> dict[str, dict[str, Any]]:
    """What was recorded of each program, by its name."""
    entries: dict[str, dict[str, Any]] = json.loads((RECORDED / "index.json").read_text())
    return entries


@functools.cache
def count(name: str) -> ExecutedCount:
    """The executed count of a recorded program."""
    return executed_flops(text_of(name))


def names(pattern: str) -> list[str]:
    """Names of the programs that match."""
    found = [name for name in PROGRAMS if re.fullmatch(pattern, name)]
    assert found
    return found
