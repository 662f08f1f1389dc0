"""Time of a collective on a TPU's torus or between its slices, and the least time on GPUs.

Ring algorithms, as derived in the JAX scaling book (jax-ml/scaling-book, "Sharded matrices"): an
all-gather moves its whole result through each device's links once, an all-reduce twice; an
all-to-all on a ring of n devices loads each link with n/8 of one device's buffer. Bandwidths are
one-way, from hardware.yml.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from mfu_jax.flops.executed.cost_types import Collective
from mfu_jax.flops.executed.records import InstructionRecord
from mfu_jax.planning.targets import Target

_MESSAGES = {"send": "dcn up", "recv": "dcn down"}  # both directions work at once
_HOP_SECONDS = 1e-6  # latency of a link (scaling book: about 1 µs)


@dataclass(frozen=True, kw_only=True)
class Route:
    """The links that a group of devices uses.

    Attributes:
        link: ``ici``, ``nvlink`` or ``dcn``.
        bytes_per_sec: into one device, over all links that it uses at once.
        hops: links between the two devices that are farthest apart.
        ring: devices in the longest ring; 1 if every device reaches every other one directly.
    """

    link: str
    bytes_per_sec: float
    hops: int
    ring: int = 1


def route(target: Target, group: Sequence[int], size: int) -> Route:
    """The links that connect a group of devices.

    Args:
        target: the chips.
        group: partition ids of one group; empty if the text does not say.
        size: devices in the group.
    """
    if parts(target, group, size) > 1:
        return Route(link="dcn", bytes_per_sec=target.network_bytes_per_sec, hops=2)
    if target.platform == "cuda":
        nvlink = target.chip.interconnect["nvlink_gbps"] * 1e9
        return Route(link="nvlink", bytes_per_sec=nvlink, hops=1)
    return _torus(target, size)


def parts(target: Target, group: Sequence[int], size: int) -> int:
    """Number of slices, or of GPU hosts, that a group spans."""
    gpus = target.platform == "cuda"
    within = target.shape[-1] if gpus else target.devices // target.slices
    return len({number // within for number in group}) if group else -(-size // within)


def _torus(target: Target, size: int) -> Route:
    """The route along the torus axes that a group of `size` devices spans, if well placed."""
    chip = target.chip
    per_link = chip.interconnect["ici_gbps_per_link"] * 1e9
    chips = max(1, size // chip.devices_per_chip)
    axes = _spanned(target.shape, chips)
    rings = {n for n, is_ring in zip(target.shape, target.rings, strict=True) if is_ring}
    links = sum(2 if n in rings else 1 for n in axes) or 1
    hops = sum(n // 2 if n in rings else n - 1 for n in axes) or 1
    ring = max(axes, default=1)
    return Route(link="ici", bytes_per_sec=links * per_link, hops=hops, ring=ring)


def _spanned(shape: Sequence[int], chips: int) -> tuple[int, ...]:
    """The fewest whole axes with this many chips; else a part of one axis, else all axes."""
    real = [n for n in shape if n > 1]
    for count in range(1, len(real) + 1):
        for axes in itertools.combinations(real, count):
            if math.prod(axes) == chips:
                return axes
    if chips <= max(real, default=1):
        return (chips,) if chips > 1 else ()
    return tuple(real)


def seconds(collective: Collective, group: Sequence[int], target: Target) -> float:
    """Time of one run of a collective with nothing else on its links, at their full bandwidth."""
    size = collective.group_size or target.devices
    if size < 2:
        return 0.0
    if target.platform == "cuda":
        return _least_on_gpus(collective, size, parts(target, group, size), target)
    way = route(target, group, size)
    if collective.kind == "collective-permute":
        one_link = target.chip.interconnect.get("ici_gbps_per_link", 0) * 1e9
        bandwidth = one_link if way.link == "ici" else way.bytes_per_sec
        return collective.bytes / bandwidth + _HOP_SECONDS
    if way.link == "dcn" and not collective.kind.endswith("all-to-all"):
        return _over_network(collective, parts(target, group, size), way, target)
    if way.ring > 1 and collective.kind.endswith("all-to-all"):
        one_link = target.chip.interconnect["ici_gbps_per_link"] * 1e9
        return collective.bytes * way.ring / 8 / one_link + way.hops * _HOP_SECONDS
    moved = collective.bytes * _crossings(collective) * (size - 1) / size
    return moved / way.bytes_per_sec + way.hops * _HOP_SECONDS


def _least_on_gpus(collective: Collective, size: int, hosts: int, target: Target) -> float:
    """What no algorithm beats: a switch that reduces (NVLink SHARP) sends each byte once.

    `nccl` has the time that NCCL's take.
    """
    within = size // hosts or 1
    moved = collective.bytes if collective.kind == "collective-permute" else 0.0
    if hosts == 1:
        nvlink = target.chip.interconnect["nvlink_gbps"] * 1e9
        return (moved or collective.bytes * (size - 1) / size) / nvlink
    moved = moved or collective.bytes / within * (hosts - 1) / hosts
    return moved / target.network_bytes_per_sec


def _crossings(collective: Collective) -> float:
    """How many times one device's buffer crosses its links."""
    return 2.0 if collective.kind == "all-reduce" else 1.0


def _over_network(collective: Collective, slices: int, way: Route, target: Target) -> float:
    """Time within each slice or host plus between them: each device sends only its share."""
    inside = max(1, (collective.group_size or target.devices) // slices)
    within = dataclasses.replace(collective, group_size=inside)
    between = collective.bytes / inside * _crossings(collective) * (slices - 1) / slices
    return seconds(within, (), target) + between / way.bytes_per_sec + way.hops * _HOP_SECONDS


def between_slices(record: InstructionRecord, target: Target) -> tuple[str, float] | None:
    """Lane and seconds of a message to or from another slice; None for other instructions.

    XLA splits a collective across slices into one within each slice and messages over the
    data-center network, which appear as host transfers.
    """
    is_message = record.opcode in _MESSAGES and record.shape.is_host_transfer
    if target.slices < 2 or not is_message:
        return None
    return _MESSAGES[record.opcode], record.shape.result_bytes / target.network_bytes_per_sec


def lanes(collective: Collective, groups: Sequence[Sequence[int]], link: str) -> tuple[str, ...]:
    """The lanes that a collective occupies: transfers that share a lane wait for each other.

    Neighbours in a group identify the mesh axis, and thus the torus axes; a permutation to the next
    device uses one direction and leaves the other one free.

    Args:
        collective: one of the program's collectives.
        groups: partition ids of its groups, or pairs (source, target) of a permutation.
        link: as named in `Route.link`.
    """
    strides = [group[1] - group[0] for group in groups if len(group) > 1]
    if not strides or link != "ici":
        return (link,)
    stride = min(strides, key=abs)  # the pair that closes the ring is the farthest apart
    if collective.kind == "collective-permute":
        return (f"{link} {abs(stride)} {'up' if stride > 0 else 'down'}",)
    return (f"{link} {abs(stride)} up", f"{link} {abs(stride)} down")
