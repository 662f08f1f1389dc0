"""Chips that a person describes. The shapes are those of Google's and NVIDIA's machines."""

import pytest

from mfu_jax.errors import UserError
from mfu_jax.planning.targets import parse_target, target_of


@pytest.mark.parametrize(
    ("topology", "jax_name", "chips", "devices"),
    [
        ("v5p:8x8x8", "v5p:8x8x8", 512, 512),
        ("v5p-8", "v5p:2x2x1", 4, 4),
        ("v5p-1024", "v5p:8x8x8", 512, 512),
        ("v6e-8", "v6e:2x4", 8, 8),
        ("v6e-256", "v6e:16x16", 256, 256),
        ("v5litepod-16", "v5e:4x4", 16, 16),
        ("V4:2x2x4", "v4:2x2x4", 16, 16),
        ("tpu7x:4x4x4", "tpu7x:4x4x4", 64, 128),
        ("tpu7x-128", "tpu7x:4x4x4", 64, 128),
        ("tpu7x-4x4x8", "tpu7x:4x4x8", 128, 256),
        ("ironwood:4x4x4", "tpu7x:4x4x4", 64, 128),
        ("trillium-8", "v6e:2x4", 8, 8),
        ("2xv6e-256", "v6e:16x16", 512, 512),
    ],
)
def test_slices_by_shape_and_by_name(topology, jax_name, chips, devices):
    target = parse_target(topology=topology)
    assert (target.topology, target.chips, target.devices) == (jax_name, chips, devices)


# From MaxText's src/maxtext/utils/accelerator_to_spec_map.py (19142c2).
SHAPES = """
v4-8 2x2x1, v4-16 2x2x2, v4-32 2x2x4, v4-64 2x4x4, v4-128 4x4x4, v4-384 4x4x12, v4-1536 8x8x12,
v4-2048 8x8x16, v4-4096 8x16x16, v5p-640 4x4x20, v5p-768 4x8x12, v5p-1152 4x12x12,
v5p-2688 4x12x28, v5p-3072 8x12x16, v5p-3200 4x20x20, v5p-3456 12x12x12, v5p-4480 4x20x28,
v5p-6144 12x16x16, v5p-6784 4x4x212, v5p-6912 12x12x24, v5p-8448 8x12x44, v5p-8960 8x20x28,
v5p-9216 12x16x24, v5p-10368 12x12x36, v5p-11520 12x20x24, v5p-12288 16x16x24,
v5p-13824 12x24x24, v5p-17920 16x20x28, tpu7x-2 1x1x1, tpu7x-64 2x4x4, tpu7x-384 4x4x12,
tpu7x-16384 16x16x32, tpu7x-18432 16x24x24, v6e-32 4x8, v5e-128 8x16
"""


@pytest.mark.parametrize("row", [row.split() for row in SHAPES.split(",")])
def test_a_slice_named_by_its_cores_has_the_clouds_shape(row):
    name, shape = row
    target = parse_target(topology=name)
    assert target.topology.partition(":")[2] == shape


@pytest.mark.parametrize(
    ("name", "shape", "rings"),
    [
        ("v4-64", "2x4x4", "---"),
        ("v4-128", "4x4x4", "ooo"),
        ("v5e-64", "8x8", "--"),
        ("v5e-128", "8x16", "-o"),
        ("v5e-256", "16x16", "oo"),
        ("v5p-64", "2x4x4", "---"),
        ("v5p-256", "4x4x8", "ooo"),
        ("v6e-128", "8x16", "-o"),
        ("v6e-256", "16x16", "oo"),
        ("tpu7x-64", "2x4x4", "---"),
        ("tpu7x-128", "4x4x4", "ooo"),
        ("tpu7x-384", "4x4x12", "ooo"),
    ],
)
def test_slices_have_the_rings_of_maxtexts_table(name, shape, rings):
    """`wrap` of its accelerator_to_spec_map.py (10 March 2026); compiles with it print, to the
    digit, the memory that 64 TPU7x print (gpu-tpu-pedia, Hunyuan3-295B, AOT-COMPILE.md).
    """
    target = parse_target(topology=f"{name.partition('-')[0]}:{shape}")
    assert target.rings == tuple(ring == "o" for ring in rings)


def test_slices_multiply_the_devices_but_not_the_topology():
    target = parse_target(topology="v6e-256", slices=2)
    assert (target.topology, target.devices, target.slices) == ("v6e:16x16", 512, 2)


@pytest.mark.parametrize(
    ("hardware", "devices", "topology"),
    [("h100", 4, "1x1x4"), ("h100", 8, "1x1x8"), ("h200", 64, "1x8x8"), ("gb200", 72, "1x1x72")],
)
def test_gpus_by_host(hardware, devices, topology):
    assert parse_target(hardware=hardware, devices=devices).topology == topology


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"topology": "v9:2x2"}, "expected a TPU generation"),
        ({"topology": "v5p"}, "its shape"),
        ({"topology": "v5p:8x8"}, "expected 3 axes"),
        ({"topology": "v6e:2x4x1"}, "expected 2 axes"),
        ({"topology": "v6e:0x4"}, "expected 2 axes"),
        ({"topology": "v5p-12"}, "power of 2, or a multiple of 128, of TensorCores"),
        ({"topology": "v6e-192"}, "power of 2 of chips"),
        ({"topology": "v6e-0"}, "power of 2 of chips"),
        ({"topology": "v5p:9999x9999x9999"}, "over 65,536 chips"),
        ({"topology": "v6e-8", "slices": 0}, "slices=0"),
        ({"topology": "2xv6e-256", "slices": 3}, "expected the same number"),
        ({"hardware": "trillium", "devices": 8}, "topology=v6e:SHAPE"),
        ({"hardware": "v5e-8"}, "'v5e-8' is a TPU\nhint: pass topology=v5e:SHAPE"),
        ({"hardware": "h100", "devices": 12}, "multiple of it"),
        ({"hardware": "h100", "slices": 2}, "only TPUs have slices"),
        ({"hardware": "h100", "devices": 0}, "expected 1 to"),
        ({"hardware": "t4", "devices": 8}, "no interconnect"),
        ({}, "no chips to plan for"),
        ({"topology": "v6e"}, r"'v6e'; expected"),  # no hint at the same name
        ({"topology": "v6e-8", "hardware": "h100"}, "topology='v6e-8' and hardware='h100'"),
        ({"topology": "2xv6e-256", "slices": 1}, "expected the same number"),
    ],
)
def test_wrong_chips_are_one_line(given, word):
    with pytest.raises(UserError, match=word):
        parse_target(**given)


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"topology": "v6e-8", "memory_fraction": "0.9"}, "a GPU's memory only"),
        ({"hardware": "h100", "memory_fraction": "0"}, "expected a share"),
        ({"hardware": "h100", "memory_fraction": "90"}, "expected a share"),
        ({"hardware": "h100", "network_gbits": "0"}, "expected Gb/s of one device"),
    ],
)
def test_a_wrong_share_of_the_memory_or_network_is_one_line(given, word):
    with pytest.raises(UserError, match=word):
        target_of(given)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"topology": "v6e-8"}, "v6e:2x4 (8 chips)"),
        ({"topology": "v6e-1"}, "v6e:1x1 (1 chip)"),
        ({"topology": "2xv6e-256"}, "2 × v6e:16x16 (512 chips)"),
        ({"hardware": "h100", "devices": 8}, "8 × H100 SXM"),
        ({"hardware": "h100", "devices": 64}, "64 × H100 SXM on 8 hosts"),
    ],
)
def test_chips_as_text(given, text):
    assert str(parse_target(**given)) == text


def test_the_network_of_a_cloud_is_said_and_taken():
    a3_mega = target_of({"hardware": "h100", "devices": "64", "network_gbits": "200"})
    assert str(a3_mega) == "64 × H100 SXM on 8 hosts, 200 Gb/s each"
    assert a3_mega.network_bytes_per_sec == 25e9
    assert target_of({"hardware": "h100", "devices": "64"}).network_bytes_per_sec == 50e9


def test_a_network_that_the_table_lacks_is_asked_for():
    chips = {"hardware": "vr200", "devices": "144"}
    with pytest.raises(UserError, match="on 2 hosts: the table has no network for it"):
        _ = target_of(chips).network_bytes_per_sec
    assert target_of({**chips, "network_gbits": "800"}).network_bytes_per_sec == 100e9
