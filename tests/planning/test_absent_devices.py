"""What libtpu is asked for."""

import pytest

from mfu_jax.planning.absent_devices import tpu_options


@pytest.mark.parametrize(
    ("topology", "slices", "options"),
    [
        ("v5p:2x2x1", 1, {}),
        ("v5p:2x2x1", 2, {"num_slices": 2}),
        # JAX has one device for both cores of a v4; libtpu has one for each without being told.
        ("v4:2x2x1", 1, {"chip_config_name": "megacore"}),
        ("v4:2x2x1", 2, {"num_slices": 2, "chip_config_name": "megacore"}),
    ],
)
def test_slices_and_the_cores_of_a_v4(topology, slices, options):
    assert tpu_options({"topology": topology, "slices": slices}) == options
