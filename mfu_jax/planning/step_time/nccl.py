"""Time of a collective on GPUs by its size, as NCCL models itself when it chooses an algorithm.

Each protocol of each algorithm takes a latency, which grows with the ring or the tree, and its
bytes over the links; NCCL takes the fastest (NVIDIA/nccl, src/graph/tuning.cc at b6475625, for
Hopper and Intel hosts, without NVLink SHARP and without its correction of trees at medium sizes).
The links' bandwidths are not NCCL's but the caller's, as measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from mfu_jax.flops.executed.cost_types import Collective


class _Protocol(NamedTuple):
    """One way of sending, in microseconds.

    Attributes:
        call: latency of a call.
        nvlink: latency of a step within a host.
        network: latency of a step between hosts.
        share: of the links' bandwidth.
        posts: messages to the network card in a step; a ring waits for them at every step.
        is_ll: whether flags take half of each word: NCCL limits its bandwidth.
    """

    call: float
    nvlink: float
    network: float
    share: float
    posts: int = 1
    is_ll: bool = False


_RING = (
    _Protocol(6.6, 0.6, 2.7, 1 / 4, is_ll=True),
    _Protocol(14.0, 1.9, 4.0, 0.92),
    _Protocol(8.4, 3.4, 14.0, 1.0, posts=3),
)
_IN_A_TREE = 0.92 * 0.85
_TREE = (
    _Protocol(6.8, 0.6, 5.0, _IN_A_TREE / 3.8, is_ll=True),
    _Protocol(14.0, 1.25, 8.5, _IN_A_TREE * 120 / 128),
    _Protocol(0.0, 28.0, 28.0, _IN_A_TREE),
)
_LL_GBPS = (87.7, 39.0, 20.4)  # on one host, two, and more
_POST = 1.0  # microseconds
_MICRO, _GIGA = 1e-6, 1e9
# Of NVLink, beside all-gathers': those of 0.25 to 2 GB on eight H100 in XLA's table of collectives
# (openxla/xla, default_collective_perf_table.txtpb) reach 0.78, these 0.89 and 0.73.
_BESIDE_ALL_GATHERS = {"all-reduce": 0.89 / 0.78, "reduce-scatter": 0.73 / 0.78}


def seconds(
    collective: Collective, *, hosts: int, nvlink_bytes_per_sec: float, network_bytes_per_sec: float
) -> float:
    """Time of one run of a collective with nothing else on its links.

    Args:
        collective: with at least two devices in a group.
        hosts: hosts, or NVLink domains, that a group spans.
        nvlink_bytes_per_sec: into one device, as an all-gather reaches it.
        network_bytes_per_sec: into one device from other hosts.
    """
    size = collective.group_size
    nvlink = nvlink_bytes_per_sec * _BESIDE_ALL_GATHERS.get(collective.kind, 1.0)
    if not _is_ring(collective.kind):
        link = nvlink if hosts == 1 else network_bytes_per_sec
        partners = size - 1 if hosts == 1 else size - size / hosts  # what NVLink moves is hidden
        share = partners / size if collective.kind.endswith("all-to-all") else 1.0
        direct = _RING[-1]
        latency = direct.call + (direct.nvlink if hosts == 1 else direct.network)
        return latency * _MICRO + collective.bytes * share / link
    whole = nvlink if hosts == 1 else min(nvlink, size / hosts * network_bytes_per_sec)
    return min(_each(collective, hosts, whole))


def _is_ring(kind: str) -> bool:
    return kind in ("all-gather", "all-reduce", "reduce-scatter", "collective-broadcast")


def _each(collective: Collective, hosts: int, ring_bytes_per_sec: float) -> Iterator[float]:
    """The time of every algorithm and protocol that NCCL may choose."""
    size, reduces = collective.group_size, collective.kind == "all-reduce"
    steps = (2 if reduces else 1) * (size - 1)
    between = 0 if hosts == 1 else 2 * hosts if reduces else hosts - 1
    within = max(0, steps - between)
    most = _LL_GBPS[min(hosts, len(_LL_GBPS)) - 1] * _GIGA
    for way in _RING:
        post = _POST * way.posts if hosts > 1 else 0.0
        latency = way.call + within * max(way.nvlink, post) + between * way.network
        yield latency * _MICRO + collective.bytes * steps / size / _limited(
            way, ring_bytes_per_sec, most
        )
    if not reduces or hosts == 1:
        return
    for way in _TREE:
        deep = (size / hosts - 1) * way.nvlink + math.floor(math.log2(hosts)) * way.network
        bandwidth = _limited(way, ring_bytes_per_sec, most)
        yield (way.call + 2 * deep) * _MICRO + 2 * collective.bytes / bandwidth


def _limited(way: _Protocol, bytes_per_sec: float, most: float) -> float:
    return min(way.share * bytes_per_sec, most if way.is_ll else math.inf)
