"""Times of collectives, against the formulas of the scaling book written out here.

v5p: 90e9 bytes/s a link and direction, three axes, rings from 4 x 4 x 4 chips on.
"""

import pytest

from mfu_jax.flops.executed.cost_types import Collective
from mfu_jax.planning.step_time import links
from mfu_jax.planning.targets import parse_target

V5P = parse_target(topology="v5p:8x8x8")
V6E = parse_target(topology="v6e:2x4")
HOP = 1e-6


def _seconds(target, kind, size, nbytes=2**30, group=()):
    return links.seconds(Collective(kind=kind, bytes=nbytes, group_size=size), group, target)


@pytest.mark.parametrize(
    ("size", "rings"),
    [(8, 1), (64, 2), (512, 3)],
)
def test_an_all_gather_uses_both_directions_of_each_ring(size, rings):
    expected = 2**30 * (size - 1) / size / (rings * 2 * 90e9) + rings * 4 * HOP
    assert _seconds(V5P, "all-gather", size) == pytest.approx(expected)


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather():
    moved = 2 * 2**30 * 511 / 512 / (6 * 90e9)
    assert _seconds(V5P, "all-reduce", 512) == pytest.approx(moved + 12 * HOP)


def test_an_axis_that_is_no_ring_has_one_direction():
    expected = 2**30 * 7 / 8 / (2 * 90e9) + (1 + 3) * HOP  # 2 chips and 4 chips in a line
    assert _seconds(V6E, "all-gather", 8) == pytest.approx(expected)


@pytest.mark.parametrize(("topology", "size"), [("v5p:2x4x4", 4), ("v5p:8x8x8", 4), ("v6e:8x8", 8)])
def test_part_of_a_cube_or_of_an_axis_is_no_ring(topology, size):
    seconds = _seconds(parse_target(topology=topology), "all-gather", size)
    assert seconds == pytest.approx(2**30 * (size - 1) / size / 90e9 + (size - 1) * HOP)


def test_an_all_to_all_loads_a_ring_with_an_eighth_for_each_device():
    assert _seconds(V5P, "all-to-all", 8) == pytest.approx(2**30 * 8 / 8 / 90e9 + 4 * HOP)


def test_a_permute_uses_one_link():
    assert _seconds(V5P, "collective-permute", 2) == pytest.approx(2**30 / 90e9 + HOP)


def test_groups_across_slices_use_the_data_center_network():
    two = parse_target(topology="v6e:2x4", slices=2)
    expected = 2**30 * 1 / 2 / 12.5e9 + 2 * HOP
    assert _seconds(two, "all-gather", 2, group=(0, 8)) == pytest.approx(expected)
    assert links.route(two, (0, 1), 2).link == "ici"


@pytest.mark.parametrize(
    ("kind", "devices", "least"),
    [
        ("all-gather", 8, 2**30 * 7 / 8 / 450e9),
        ("all-reduce", 8, 2**30 * 7 / 8 / 450e9),  # a switch that adds sends each byte once
        ("all-gather", 16, 2**30 / 2 / (8 * 50e9)),  # half of it comes over eight cards
        ("collective-permute", 16, 2**30 / 50e9),
    ],
)
def test_the_least_time_on_gpus_is_that_of_the_bytes_on_the_slowest_link(kind, devices, least):
    hosts = parse_target(hardware="h100", devices=16)
    assert _seconds(hosts, kind, devices, group=tuple(range(devices))) == pytest.approx(least)
    assert links.route(hosts, tuple(range(8)), 8).link == "nvlink"
    assert links.route(hosts, tuple(range(16)), 16).link == "dcn"


def test_a_group_on_two_slices_gathers_within_each_and_each_devices_share_between_them():
    """v6e: 256 chips of a slice, two rings of 4 links of 90e9; 12.5e9 between slices."""
    two = parse_target(topology="v6e-256", slices=2)
    within = 2**30 * 255 / 256 / (4 * 90e9) + 16 * HOP
    between = 2**30 / 256 / 2 / 12.5e9 + 2 * HOP
    assert _seconds(two, "all-gather", 512) == pytest.approx(within + between)
    group = (0, 256)
    assert _seconds(two, "all-reduce", 2, group=group) == pytest.approx(2**30 / 12.5e9 + 2 * HOP)


def test_a_group_of_one_takes_no_time():
    assert _seconds(V5P, "all-reduce", 1) == 0.0


def _lanes(kind, groups, link="ici"):
    return links.lanes(Collective(kind=kind, bytes=1, group_size=2), groups, link)


def test_lanes_tell_the_axis_and_of_permutations_the_direction():
    assert _lanes("all-gather", [(0, 8, 16)]) == ("ici 8 up", "ici 8 down")
    assert _lanes("collective-permute", [(3, 0), (0, 1), (1, 2)]) == ("ici 1 up",)
    assert _lanes("collective-permute", [(0, 24), (8, 0), (16, 8)]) == ("ici 8 down",)
    assert _lanes("all-reduce", []) == ("ici",)
    assert _lanes("all-reduce", [(0, 256)], "dcn") == ("dcn",)
