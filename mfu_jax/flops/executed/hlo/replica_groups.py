"""Groups of devices in HLO text: which devices a collective connects."""

from __future__ import annotations

import functools
import itertools
import math
import re

import numpy as np

from mfu_jax.flops.executed.hlo.module import HloInstruction

_PAIR = re.compile(r"\{(\d+),(\d+)\}")
_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?$")
_MESH = re.compile(
    r"mesh\[((?:'\w+'=\d+,?)+)\]"
    r"(?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{((?:'\w+',?)*)\}$"
)


def groups_text(instruction: HloInstruction) -> str:
    """The attribute that says which devices exchange data; empty if there is none.

    ``mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}`` has a comma and is two attributes.
    """
    text = instruction.attribute("replica_groups")
    if " device_ids=" not in instruction.attribute_text:  # use_global_device_ids is another
        return text
    order = instruction.attributes.get("device_ids", "")
    return f"{text}, device_ids={order}" if order else text


def replica_groups(text: str, devices: int) -> list[list[int]] | None:
    """The groups of a collective; None if they do not cover every device once."""
    groups = listed_groups(text, devices)
    is_whole = sorted(itertools.chain.from_iterable(groups)) == list(range(devices))
    return groups if is_whole else None


@functools.lru_cache(maxsize=256)  # a program has few
def listed_groups(text: str, devices: int) -> list[list[int]]:
    """The groups that a text lists, for whatever devices; empty if it does not say."""
    try:
        if text == "{}":
            return [list(range(devices))]
        if text.startswith("{{"):
            return [numbers(group) for group in re.findall(r"\{([\d,]+)\}", text)]
        if match := _IOTA.match(text):
            ids = iota(*match.groups())
        elif match := _MESH.match(text):
            ids = _along_axes(*match.groups())
        else:
            return []
    except ValueError:  # damaged
        return []
    return ids.tolist() if ids.ndim == 2 else []


def _along_axes(mesh: str, dims: str | None, order: str | None, axes: str) -> np.ndarray:
    """The groups along some axes of a mesh, one in each row."""
    sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh)}
    shape = ",".join(map(str, sizes.values()))
    chosen = [list(sizes).index(name) for name in re.findall(r"'(\w+)'", axes)]
    return groups_along(iota(shape, dims or shape, order), chosen)


def groups_along(ids: np.ndarray, axes: list[int]) -> np.ndarray:
    """The devices that differ only in their place along some axes of `ids`, [groups, devices]."""
    others = [axis for axis in range(ids.ndim) if axis not in axes]
    width = math.prod(ids.shape[axis] for axis in axes)
    return ids.transpose(others + axes).reshape(-1, width)


def device_pairs(instruction: HloInstruction) -> list[tuple[int, int]]:
    """Who sends to whom in a collective permute; empty in other collectives."""
    text = instruction.attributes.get("source_target_pairs", "")
    return [(int(source), int(target)) for source, target in _PAIR.findall(text)]


def iota(dims: str, source: str, order: str | None) -> np.ndarray:
    """Device numbers in an array of `dims`, in the order that HLO's iota form gives."""
    shape = numbers(source)
    ids = np.arange(math.prod(shape)).reshape(shape)
    return (ids.transpose(numbers(order)) if order else ids).reshape(numbers(dims))


def numbers(text: str) -> list[int]:
    """Numbers separated by commas."""
    return [int(number) for number in text.split(",")]
