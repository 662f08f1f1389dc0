"""NCCL's times against what others measured with nccl-tests, and by hand."""

import pytest

from mfu_jax.flops.executed.cost_types import Collective
from mfu_jax.flops.executed.records import InstructionRecord
from mfu_jax.hardware.chips import table
from mfu_jax.planning.step_time import links, nccl
from mfu_jax.planning.step_time.durations import Durations, Efficiencies
from mfu_jax.planning.targets import parse_target, with_network

MIB, GIB = 2**20, 2**30
SHARES = Efficiencies()


def _seconds(kind, nbytes, devices, hosts):
    return nccl.seconds(
        Collective(kind=kind, bytes=nbytes, group_size=devices),
        hosts=hosts,
        nvlink_bytes_per_sec=450e9 * SHARES.nvlink,
        network_bytes_per_sec=50e9 * SHARES.link,
    )


def _record(kind, nbytes, groups):
    return InstructionRecord(
        name="c",
        module="m",
        computation="main",
        opcode=kind,
        collective=Collective(kind=kind, bytes=nbytes, group_size=2),
        device_groups=groups,
    )


@pytest.mark.parametrize(
    ("devices", "hosts", "nbytes", "bus_gbps"),
    [
        (16, 2, 8 * GIB, 8 * 47.0),  # NVIDIA/nccl-tests#290: 46 to 48 GB/s of each card, as a ring
        (32, 4, 16 * GIB, 365.84),  # NVIDIA/nccl-tests#309
        (256, 32, 2 * GIB, 340.0),  # NVIDIA/nccl#1218
        (8, 1, 8 * MIB, 180.88),  # kvcache-ai/Mooncake#3484, eight GPUs
        (8, 1, 32 * MIB, 300.51),
    ],
)
def test_all_reduces_take_what_nccl_tests_measured_on_hosts_of_eight_h100(
    devices, hosts, nbytes, bus_gbps
):
    measured = 2 * (devices - 1) / devices * nbytes / (bus_gbps * 1e9)
    assert _seconds("all-reduce", nbytes, devices, hosts) == pytest.approx(measured, rel=0.12)


def test_an_all_gather_of_2_mb_takes_25_microseconds_beside_its_bytes_as_in_xlas_table():
    moved = 2e6 * 7 / 8 / (450e9 * SHARES.nvlink)
    assert _seconds("all-gather", 2e6, 8, 1) - moved == pytest.approx(25e-6, rel=0.1)


def test_a_long_ring_pays_for_its_steps():
    """64 hosts: 448 steps within them, bound by posting to the card, and 63 between them."""
    low_latency = 6.6e-6 + 448 * 1e-6 + 63 * 2.7e-6
    assert _seconds("all-gather", 8, 512, 64) == pytest.approx(low_latency, rel=1e-3)
    assert _seconds("all-reduce", 8, 512, 64) == pytest.approx(
        6.8e-6 + 2 * (7 * 0.6e-6 + 6 * 5e-6),
        rel=1e-3,  # a tree
    )


def test_what_goes_to_one_partner_or_to_all_crosses_the_slower_link_once():
    assert _seconds("collective-permute", GIB, 16, 2) == pytest.approx(GIB / 45e9, rel=1e-2)
    assert _seconds("all-to-all", GIB, 16, 2) == pytest.approx(GIB / 2 / 45e9, rel=1e-2)
    assert _seconds("all-to-all", GIB, 8, 1) == pytest.approx(GIB * 7 / 8 / 351e9, rel=1e-2)


def test_one_device_of_each_host_has_one_card():
    ring = GIB * 7 / 8 / 45e9
    assert _seconds("all-gather", GIB, 8, 8) == pytest.approx(ring, rel=1e-2)


def test_cards_of_200_gbits_take_what_nccl_tests_measured_on_two_a3_megas():
    """A tree over two hosts sends each byte once (lessizzmore/create-a3mega-ztan-fork@02dd8f45)."""
    target = with_network(parse_target(hardware="h100", devices=16), 200)
    (duration,) = Durations(target=target, efficiencies=SHARES).of(
        _record("collective-permute", GIB, ((0, 8),))
    )
    assert duration.seconds == pytest.approx(47.535e-3, rel=0.02)  # of 8 GiB over eight cards


@pytest.mark.parametrize("chip", [c.name for c in table() if "nvlink_gbps" in c.interconnect])
@pytest.mark.parametrize("kind", ["all-gather", "all-reduce", "reduce-scatter", "all-to-all"])
def test_on_any_gpus_of_one_host_no_algorithm_beats_the_links(chip, kind):
    target = parse_target(hardware=chip, devices=2)
    for nbytes in (0, 1, 10**5, 10**9):
        record = _record(kind, nbytes, ((0, 1),))
        (duration,) = Durations(target=target, efficiencies=SHARES).of(record)
        assert duration.seconds >= links.seconds(record.collective, (0, 1), target)
